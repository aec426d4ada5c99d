// The always-on `modules` level: every module's inputs and outputs, forward and backward, scanned
// into slots and joined when the step ends.
//
// Python (or a C++ program) reports each module's entry and exit with its tensors. C++ hooks on the
// call's autograd nodes observe gradients without the GIL. `enter`, `leave` and the hooks enqueue
// on the current stream and never wait; `collect` waits. A tensor passed from one module to the
// next is scanned once. Keeps no tensor alive beyond the scan. Threads: `enter` and `leave` on one
// at a time, hooks on autograd's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/tensor/named_tensor.hpp"
#include "nanlocator/watch/module_scope.hpp"

namespace nanlocator::inline watch_room {

/// Identifies one call of one module within a step.
using ModuleCallId = std::int64_t;

class ModuleWatch {
 public:
  explicit ModuleWatch(int threads = 1);
  ~ModuleWatch();
  ModuleWatch(const ModuleWatch&) = delete;  // hooks hold its state
  ModuleWatch& operator=(const ModuleWatch&) = delete;

  /// Forgets the previous step.
  void begin_step();

  /// A module call begins. `inputs`: role ("input[0]", "input[attention_mask]",
  /// "input[0].hidden_states") and tensor; tensors without floating point are ignored.
  [[nodiscard]] ModuleCallId enter(ModulePath path, std::span<const NamedTensor> inputs);
  /// The call has returned `outputs` ("output[0]", "output.logits"). Hooks its autograd nodes: the
  /// gradients of its outputs, and its own contributions to the gradients of its inputs.
  void leave(ModuleCallId call, std::span<const NamedTensor> outputs);
  /// The call has raised. Calls entered after it and not left are abandoned, too.
  void abandon(ModuleCallId call);

  struct Collected {
    std::vector<Sighting> sightings;  // bad ones, in execution order; phase forward or backward
    /// Calls that made a bad output from finite inputs and weights (forward), or a bad grad_input
    /// from finite grad_outputs (backward); innermost module only. op is empty.
    std::vector<Birth> births;
  };
  /// Waits for the devices. `parameters` and `buffers` (name and tensor) are scanned if a birth's
  /// module owns them: a bad one is a birth of kind weight or buffer and replaces the module's.
  [[nodiscard]] Collected collect(std::int64_t iteration, std::span<const NamedTensor> parameters,
                                  std::span<const NamedTensor> buffers);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline watch_room
