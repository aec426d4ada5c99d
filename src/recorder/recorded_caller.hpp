// The line of the program that an event was called from when it was recorded: while one lives, it
// stands for the frames of this thread below the execution of the event.
#pragma once

#include "nanlocator/operators/program_code.hpp"

namespace nanlocator::inline recorder_room {

class RecordedCaller {
 public:
  explicit RecordedCaller(const ProgramCode::Caller& caller) noexcept : before_(current_) {
    current_ = &caller;
  }
  ~RecordedCaller() { current_ = before_; }
  RecordedCaller(const RecordedCaller&) = delete;  // strictly nested
  RecordedCaller& operator=(const RecordedCaller&) = delete;

  /// Null where this thread executes no recorded event.
  [[nodiscard]] static const ProgramCode::Caller* current() noexcept { return current_; }

 private:
  static inline thread_local const ProgramCode::Caller* current_ = nullptr;
  const ProgramCode::Caller* before_;
};

}  // namespace nanlocator::inline recorder_room
