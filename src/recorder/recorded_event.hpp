// What the recorder of a step and its replay know of an event.
#pragma once

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

namespace nanlocator::inline recorder_room {

using RecordedEvents = std::vector<std::shared_ptr<const RecordedEvent>>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using GeneratorStates = std::vector<std::pair<at::Generator, at::Tensor>>;

/// How often it has been written to.
[[nodiscard]] inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

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

/// A tensor among the arguments of an operator: made by an event, a parameter's gradient, or kept.
struct RecordedInput {
  std::size_t argument = 0;
  int element = -1;
  std::optional<RecordedValue> value;
  at::Tensor gradient_of;  // the parameter
  at::Tensor kept;
  std::uint32_t version = 0;  // of `kept`, when it was read
  at::Tensor sample;          // of its content then, where it is no copy
  bool is_read = true;        // its values, and not only its memory (views)

  [[nodiscard]] bool is_overwritten() const;
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
  /// Events that must come before: makers of inputs, and whoever has written to their memory.
  RecordedEvents needs;
  std::vector<RecordedValue> inputs;  // read by it
  /// Makers of those inputs through which gradients flow.
  RecordedEvents differentiated;
  std::string problem;   // why it cannot be executed again
  bool is_used = false;  // a backward of a step that is over has gone through it

  // An operator:
  std::optional<c10::OperatorHandle> handle;
  std::vector<c10::IValue> arguments;  // without the tensors that have a name
  std::vector<RecordedInput> tensors;
  std::vector<RecordedOutput> outputs;  // new tensors
  /// The same, kept where data that was read is not: they stand for it once it is overwritten.
  std::vector<at::Tensor> held;
  /// Gradients flow through what it makes, or it writes to something: its first outputs cannot
  /// stand for it.
  bool is_indispensable = false;
  bool grad_mode = true;
  ModulePath module = nullptr;  // that is no call of its own: a loss
  Autocast autocast = {};
  GeneratorStates generators;
  ProgramCode::Caller caller;
};

/// `events` and, each once, all that is reached from them through `links`.
[[nodiscard]] RecordedEvents reached_from(RecordedEvents events,
                                          RecordedEvents RecordedEvent::Data::*links);

/// The outputs of an operator as they were computed the first time, with their numbers; nullopt
/// where one of them is gone or has been written to.
[[nodiscard]] std::optional<std::vector<std::pair<int, at::Tensor>>> first_outputs(
    const RecordedEvent::Data& operation);

}  // namespace nanlocator::inline recorder_room
