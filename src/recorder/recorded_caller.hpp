// While one lives, replaces the frames of this thread below the execution of an event with the
// program line that the event was recorded at.
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

  /// Null if this thread executes no recorded event.
  [[nodiscard]] static const ProgramCode::Caller* current() noexcept { return current_; }

 private:
  static inline thread_local const ProgramCode::Caller* current_ = nullptr;
  const ProgramCode::Caller* before_;
};

}  // namespace nanlocator::inline recorder_room
