// What a process still writes when SIGTERM ends it. A launcher sends it to all ranks as soon as one
// has ended (torchrun after 0.1 s), and the training thread may be in a collective that never
// returns.
//
// The handler is there only where nobody else's is: SIGTERM then runs all `write`s on a thread of
// its own, for kPatience at most, and ends the process as it would have. A forked child ends at
// once.
#pragma once

#include <functional>

namespace nanlocator::inline step_room {

class LastWords {
 public:
  /// `write` must not throw. Any thread may construct and destroy.
  explicit LastWords(std::function<void()> write);
  /// Returns when a `write` that runs has ended.
  ~LastWords();
  LastWords(const LastWords&) = delete;  // registered once
  LastWords& operator=(const LastWords&) = delete;

 private:
  int key_ = 0;
};

}  // namespace nanlocator::inline step_room
