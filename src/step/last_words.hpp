// Writes results when SIGTERM ends the process. A launcher sends it to all ranks as soon as one has
// ended (torchrun after 0.1 s), and the training thread may be in a collective that never returns.
//
// The handler is installed only if SIGTERM has none. It makes a separate thread run all `write`s,
// for at most kPatience, and then end the process as SIGTERM would have. A forked child ends at
// once.
#pragma once

#include <functional>

namespace nanlocator::inline step_room {

class LastWords {
 public:
  /// `write` must not throw. Any thread may construct and destroy.
  explicit LastWords(std::function<void()> write);
  /// Waits for a running `write`.
  ~LastWords();
  LastWords(const LastWords&) = delete;  // registered once
  LastWords& operator=(const LastWords&) = delete;

 private:
  int key_ = 0;
};

}  // namespace nanlocator::inline step_room
