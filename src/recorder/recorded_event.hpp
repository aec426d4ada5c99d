// A recorded event, as the recorder and the replay of a step know it.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "nanlocator/recorder/step_recorder.hpp"
#include "operators/operator_info.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline recorder_room {

using RecordedEvents = std::vector<std::shared_ptr<const RecordedEvent>>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

/// False for a subclass, such as DTensor, whose values are in another tensor.
[[nodiscard]] inline bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

/// Part of a storage.
struct Region {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  at::ScalarType dtype{};

  static Region of(const at::Tensor& tensor) {
    return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
            tensor.scalar_type()};
  }
  [[nodiscard]] at::Tensor of(const c10::Storage& storage) const;
  bool operator==(const Region&) const = default;
  /// Of the storage, up to its end.
  [[nodiscard]] std::size_t bytes() const {
    return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype),
                                            static_cast<std::size_t>(offset));
  }
};

/// Autocast of the devices that training runs on.
struct Autocast {
  struct Of {
    at::DeviceType device;
    bool is_enabled;
    at::ScalarType dtype;
  };
  static constexpr auto kDevices = std::to_array({at::kCPU, at::kCUDA});
  std::array<Of, kDevices.size()> states;

  static Autocast now() {
    Autocast autocast;
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      autocast.states[i] = {kDevices[i], at::autocast::is_autocast_enabled(kDevices[i]),
                            at::autocast::get_autocast_dtype(kDevices[i])};
    }
    return autocast;
  }
  void set() const {
    for (const auto& of : states) {
      at::autocast::set_autocast_enabled(of.device, of.is_enabled);
      at::autocast::set_autocast_dtype(of.device, of.dtype);
    }
  }
};

/// The place of a view in a gradient's memory, `grad[0]` or `grad.data`.
struct ViewOfGradient {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;  // in elements, from the gradient's first one

  [[nodiscard]] at::Tensor of(const at::Tensor& gradient) const {
    return gradient.as_strided(sizes, strides, gradient.storage_offset() + offset);
  }
};

/// A tensor argument of an operator: made by an event, a parameter's gradient, or kept.
struct RecordedInput {
  std::size_t argument = 0;
  int element = -1;
  std::optional<RecordedValue> value;
  at::Tensor gradient_of;  // the parameter
  /// Of a view of that gradient; empty for the gradient itself.
  std::optional<ViewOfGradient> view;
  at::Tensor kept;
  std::uint32_t version = 0;  // of `kept`, when it was read
  at::Tensor sample;          // of its content then, unless it is a copy
  bool is_begun = false;      // `kept` is a copy of data that the operator writes in place
  bool is_read = true;        // its values are, not only its memory (views)

  [[nodiscard]] bool is_overwritten() const;
};

/// What a collective brought: put into the tensor `value`, or, if that is empty, a new tensor.
struct RecordedResult {
  std::optional<RecordedValue> value;
  RecordedInput content;  // not kept: the program has not read it
};

struct RecordedOutput {
  int index = 0;
  WeakTensor tensor;
  std::uint32_t version = 0;
};

struct RecordedEvent::Data {
  std::uint64_t number = 0;
  int backwards_before = 0;
  std::shared_ptr<void> payload;
  /// Events that must come before: makers of inputs, and writers to the inputs' memory.
  RecordedEvents needs;
  std::vector<RecordedValue> inputs;  // read by it
  /// Makers of the inputs through which gradients flow.
  RecordedEvents differentiated;
  std::string problem;   // why it cannot be executed again
  bool is_used = false;  // a backward of an earlier step has gone through it

  // An operator:
  const OperatorInfo* info = nullptr;
  std::optional<c10::OperatorHandle> handle;
  std::vector<c10::IValue> arguments;  // without the tensors that have a name
  std::vector<RecordedInput> tensors;
  std::vector<RecordedOutput> outputs;  // new tensors
  /// Of a collective, which a replay does not execute; its `tensors` are what it sent.
  std::vector<RecordedResult> results;
  std::size_t sent_argument = 0;
  /// The same, kept if it read data without keeping a copy: used once that data is overwritten.
  std::vector<at::Tensor> held;
  /// Gradients flow through its outputs, or it writes to something, so its first outputs cannot
  /// replace its execution.
  bool is_indispensable = false;
  bool is_on_gradients = false;  // reads or writes them, or what was computed from them
  bool grad_mode = true;
  ModulePath module = nullptr;  // a module without a call of its own: a loss
  Autocast autocast = {};
  GeneratorStates generators;
  ProgramCode::Caller caller;
};

/// Waits for a device.
[[nodiscard]] bool have_same_bits(const at::Tensor& a, const at::Tensor& b);

/// `events` and all events reachable from them through `links`, without duplicates.
[[nodiscard]] RecordedEvents reached_from(RecordedEvents events,
                                          RecordedEvents RecordedEvent::Data::*links);

/// The outputs of an operator's first execution, with their indices; nullopt if one of them is gone
/// or has been written to.
[[nodiscard]] std::optional<std::vector<std::pair<int, at::Tensor>>> first_outputs(
    const RecordedEvent::Data& operation);

}  // namespace nanlocator::inline recorder_room
