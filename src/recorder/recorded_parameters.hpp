// The parameters and their gradients, as the recorder knows them: by tensor, by memory and by
// number of writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "nanlocator/operators/earlier_write.hpp"
#include "recorder/recorded_event.hpp"

namespace nanlocator::inline recorder_room {

/// Thread: the training thread.
class RecordedParameters {
 public:
  void set(std::vector<at::Tensor> parameters);
  /// Parameters that were written to since the last `note_weights`, or since `set`. What a call
  /// between `begin_call` and `end_call` writes to its own weights does not count.
  void note_weights();
  void begin_call();
  void end_call();
  void note_updated() { take_weights(); }
  [[nodiscard]] std::vector<at::Tensor> changed_weights() const;
  /// Parameters that the program itself has written to or given other memory, and no update since.
  [[nodiscard]] std::vector<at::Tensor> written_by_program() const;
  [[nodiscard]] const at::Tensor& operator[](std::size_t index) const { return parameters_[index]; }
  [[nodiscard]] const std::vector<at::Tensor>& all() const { return parameters_; }

  [[nodiscard]] bool contain(const at::Tensor& tensor) const {
    return members_.contains(tensor.unsafeGetTensorImpl());
  }
  /// The parameter in whose memory `tensor` lies, `.data` or a part of it; null for other memory.
  [[nodiscard]] const at::Tensor* holder_of(const at::Tensor& tensor);
  /// The program itself has written to this parameter.
  void note_program_write(const at::Tensor& tensor, EarlierWrite write);
  /// Tells operator traces of weights that nothing else has written to since.
  void tell_traces() const;

  /// Their gradients may be others from now on, and no backward has written to them.
  void begin_step();

  /// The parameter that has this gradient.
  [[nodiscard]] std::optional<std::size_t> index_of(const at::Tensor& gradient);
  /// The parameter in whose gradient this view lies, and where.
  [[nodiscard]] std::optional<std::pair<std::size_t, ViewOfGradient>> place_of(
      const at::Tensor& view);
  [[nodiscard]] bool have_in_gradients(const at::Tensor& tensor) {
    return index_of(tensor).has_value() || place_of(tensor).has_value();
  }

  /// A backward may have written to all of them.
  void note_backward();
  /// The gradients of these parameters are again what was written last.
  void note_restored(std::span<const at::Tensor> parameters);
  /// A recorded event may have written to `tensor`; nothing happens if it is no gradient.
  void note_write(const at::Tensor& tensor);
  /// An operator has filled `tensor` with zeros.
  void note_zeroed(const at::Tensor& tensor);
  /// Parameters whose gradients the program itself has filled with zeros, and not written since.
  [[nodiscard]] std::vector<at::Tensor> zeroed_gradients() const;
  /// Parameters with gradients that something else has written to since the step's first backward.
  [[nodiscard]] std::vector<at::Tensor> changed_gradients() const;
  /// Another number after each write to a gradient and for each new one.
  [[nodiscard]] std::uint64_t state_of_gradients() const;

 private:
  /// A gradient and the number of writes to it.
  struct Written {
    const c10::TensorImpl* tensor = nullptr;
    std::uint32_t version = 0;
    friend bool operator==(const Written&, const Written&) = default;
  };
  [[nodiscard]] Written gradient_now(std::size_t parameter) const;
  /// Where a weight's values are, and the number of writes to it: `p.data = x` counts as none.
  struct Weight {
    const void* memory = nullptr;
    std::uint32_t version = 0;
    friend bool operator==(const Weight&, const Weight&) = default;
  };
  [[nodiscard]] Weight weight_now(std::size_t parameter) const;
  void take_weights();
  void find_gradients();

  std::vector<at::Tensor> parameters_;
  struct ProgramWrite {
    EarlierWrite write;
    std::uint32_t version = 0;
  };
  std::unordered_map<const c10::TensorImpl*, ProgramWrite> program_writes_;  // to parameters_
  std::unordered_set<const c10::TensorImpl*> members_;                       // of parameters_
  std::unordered_map<const c10::StorageImpl*, std::size_t> by_storage_;      // since `note_weights`
  std::vector<Weight> weights_;                       // the parameters, as they were noted last
  std::unordered_set<const c10::TensorImpl*> moved_;  // of them, since `note_weights`
  std::size_t calls_ = 0;                             // since `note_weights`
  /// Of them, between the latest `note_weights` and the one before.
  std::unordered_set<const c10::TensorImpl*> replaced_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_tensor_;  // to the parameter's index
  std::unordered_multimap<const c10::StorageImpl*, std::size_t> by_memory_;
  bool are_new_ = false;
  /// Of each parameter, after the last event that wrote it; empty before the step's first backward.
  std::vector<Written> written_;
  std::unordered_map<std::size_t, Written> zeroed_;  // since the last backward, by parameter
};

}  // namespace nanlocator::inline recorder_room
