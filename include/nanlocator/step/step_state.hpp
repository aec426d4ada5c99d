// State that a step changes and that its re-run needs restored: generators, buffers, and whatever
// the integration registers (Python's and numpy's generators, a loss scaler, a data iterator).
//
// `save` before the step, `restore` before its re-run. Cost of a save: the generators' states (5 kB
// on the CPU, 16 bytes per CUDA device) and a copy of the buffers: small ones always (batch-norm
// statistics), large ones (masks, rotary tables) only if their version counter has moved. Weights
// are not kept, because no re-run happens after the optimizer has stepped. Thread: the training
// thread.
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

  /// Returns the model's current buffers; called by each `save`, which keeps the latest ones alive.
  /// May be empty.
  void set_buffers(std::function<std::vector<NamedTensor>()> buffers);
  /// Registers further state. `save` calls `save`; `restore` restores it, may be called more than
  /// once, and throws if it cannot.
  void add(std::string name, std::function<void()> save, std::function<void()> restore);

  void save();
  /// Restores everything; returns what failed, with the reason: "numpy's generator: ...".
  [[nodiscard]] std::vector<std::string> restore();

  /// Puts back the buffers that are bad now and were finite when saved: a step that is left out
  /// leaves no NaN in running statistics.
  void put_back_bad_buffers();

  /// Generators and buffers at the end of the first pass, to continue from after the re-runs.
  struct End {
    std::map<std::string, at::Tensor> generators;
    std::vector<at::Tensor> buffers;  // copies; undefined for buffers that did not move
  };
  [[nodiscard]] End end() const;
  /// Continues from `end`. Buffers that both passes have moved keep their latest values.
  void go_on_from(const End& end);

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    at::Tensor copy;
    std::optional<std::uint32_t> version;  // of `tensor` when it was copied
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
