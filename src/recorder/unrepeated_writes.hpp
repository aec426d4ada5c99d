// Memory that a replay of a step reads and does not write, by its last write: what the program
// computed before the step, or in it beyond the recorder's limits; and copies of data whose own
// memory was written again since.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "nanlocator/operators/earlier_write.hpp"
#include "operators/operator_info.hpp"
#include "recorder/recorded_event.hpp"

namespace nanlocator::inline recorder_room {

/// Thread: the training thread.
class UnrepeatedWrites {
 public:
  /// `code`: for the lines of writes; null if unknown.
  explicit UnrepeatedWrites(std::shared_ptr<ProgramCode> code) : code_(std::move(code)) {}

  void begin_step() {
    ++step_;
    copies_.clear();
  }
  void clear() {
    writes_.clear();
    copies_.clear();
  }
  void forget_the_dead();
  [[nodiscard]] std::size_t size() const { return writes_.size(); }

  void note(const at::Tensor& tensor, EarlierWrite write);
  /// An operator that is not recorded has written to these. Elements that are only moved, filled in
  /// or drawn are data unless their source was not.
  /// `maker_of`: the write that made a tensor, if a recorded event of this step did.
  void note(const OperatorInfo& info, std::span<const c10::IValue> arguments, bool draws,
            std::span<const at::Tensor> written,
            const std::function<std::optional<EarlierWrite>(const at::Tensor&)>& maker_of);
  /// `copy` is what a replay reads in place of `data`.
  void note_copy_of(const at::Tensor& data, const at::Tensor& copy);
  /// The training thread writes to `data` itself, after it has read it.
  void note_write_in_order(const at::Tensor& data);

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
  struct Copy {
    WeakStorage storage;  // of the data
    Region region;
    WeakTensor copy;
  };
  [[nodiscard]] ProgramCode::Caller caller() const {
    return code_ ? code_->caller() : ProgramCode::Caller{};
  }

  std::shared_ptr<ProgramCode> code_;
  std::unordered_map<const c10::StorageImpl*, Write> writes_;
  std::vector<Copy> copies_;  // of this step
  std::uint64_t step_ = 0;
};

}  // namespace nanlocator::inline recorder_room
