// What a step moves and a re-run of it must find as it was: generators, buffers, and whatever the
// integration registers (Python's and numpy's generators, a loss scaler, a data iterator).
//
// `save` before the step, `restore` before its re-run. Cost of a save: the generators' states
// (5 kB on the CPU, 16 bytes per CUDA device) and a copy of the buffers: small ones always
// (batch-norm statistics), large ones (masks, rotary tables) only when their version counter has
// moved. Weights are not kept: no re-run comes after the optimizer has stepped. Thread: the
// training thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/operators/operator_trace.hpp"

namespace nanlocator::inline step_room {

class StepState {
 public:
  StepState() = default;
  StepState(const StepState&) = delete;  // registered functions belong to one owner
  StepState& operator=(const StepState&) = delete;

  /// The model's buffers as they are now, asked by each `save`; the latest ones are kept alive. May
  /// be empty.
  void set_buffers(std::function<std::vector<NamedTensor>()> buffers);
  /// Further state. `save` is called by `save`; `restore` restores that and may be called more
  /// than once; it throws where it cannot.
  void add(std::string name, std::function<void()> save, std::function<void()> restore);

  void save();
  /// Restores everything and returns what could not be, with the reason: "numpy's generator: ...".
  [[nodiscard]] std::vector<std::string> restore();

  /// Generators and buffers at the end of the first pass, to go on from after the re-runs.
  struct End {
    std::map<std::string, at::Tensor> generators;
    std::vector<at::Tensor> buffers;  // copies; undefined for those that nobody has moved
  };
  [[nodiscard]] End end() const;
  /// Buffers that both passes have moved stay as the latest one has left them.
  void go_on_from(const End& end);

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    at::Tensor copy;
    std::optional<std::uint32_t> version;  // of `tensor` when it was equal to `copy`
  };
  struct Entry {
    std::string name;
    std::function<void()> save;
    std::function<void()> restore;
    std::string problem;  // why it could not be saved
  };

  void find_buffers();
  [[nodiscard]] static std::map<std::string, at::Tensor> generator_states();
  static void set_generator_states(const std::map<std::string, at::Tensor>& states);

  std::map<std::string, at::Tensor> generators_;
  std::function<std::vector<NamedTensor>()> buffers_now_;
  std::vector<Buffer> buffers_;
  std::vector<Entry> entries_;
};

}  // namespace nanlocator::inline step_room
