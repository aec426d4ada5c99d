// Memory that a replay of a step reads and does not write, by its last write: what the program
// computed before the step, or in it beyond the recorder's limits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>

#include "nanlocator/operators/earlier_write.hpp"
#include "operators/operator_info.hpp"
#include "recorder/recorded_event.hpp"

namespace nanlocator::inline recorder_room {

/// Thread: the training thread.
class UnrepeatedWrites {
 public:
  /// `code`: for the lines of writes; null if unknown.
  explicit UnrepeatedWrites(std::shared_ptr<ProgramCode> code) : code_(std::move(code)) {}

  void begin_step() { ++step_; }
  void clear() { writes_.clear(); }
  void forget_the_dead();
  [[nodiscard]] std::size_t size() const { return writes_.size(); }

  void note(const at::Tensor& tensor, EarlierWrite write);
  /// An operator that is not recorded has written to these. Elements that are only moved, filled in
  /// or drawn are data unless their source was not.
  void note(const OperatorInfo& info, std::span<const c10::IValue> arguments, bool draws,
            std::span<const at::Tensor> written);

  /// The last write to the tensor's memory; null if a replay repeats it, or if it is data.
  [[nodiscard]] const EarlierWrite* of(const at::Tensor& tensor) const;
  /// True for state that the program keeps over steps, such as an average of weights.
  [[nodiscard]] bool is_older_than_step(const at::Tensor& tensor) const;
  /// Tells operator traces of them (note_earlier_write).
  void tell_traces() const;

 private:
  struct Write {
    WeakStorage storage;
    EarlierWrite last;
    std::uint64_t step = 0;  // in which it was first written
  };
  [[nodiscard]] ProgramCode::Caller caller() const {
    return code_ ? code_->caller() : ProgramCode::Caller{};
  }

  std::shared_ptr<ProgramCode> code_;
  std::unordered_map<const c10::StorageImpl*, Write> writes_;
  std::uint64_t step_ = 0;
};

}  // namespace nanlocator::inline recorder_room
