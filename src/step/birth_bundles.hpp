// Births become evidence: each origin is replayed alone and kept as a bundle.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/replay/kernel_replay.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/trace/operator_trace.hpp"

namespace nanlocator::inline step_room {

/// Adds what the integration kept of the module call around a birth.
using AddModuleCall =
    std::function<void(const Birth&, Bundle&, StorageCollector&, BundleContents&)>;

/// What the integration kept of a kernel's call; nullopt where it has none.
using TakeKernelCall = std::function<std::optional<KeptKernelCall>(const Birth&)>;

/// The births that an operator or hook made and nothing but a mask came before: for their bundles
/// the module calls around them are kept.
[[nodiscard]] std::vector<Birth> births_with_calls(const Explanation& explanation);
/// The same of those that a call of a kernel made, or left unwritten: that call is kept.
[[nodiscard]] std::vector<Birth> births_of_kernels(const Explanation& explanation);

/// The births of `explanation`, the replay's conclusion and the bundle's folder filled in for those
/// that nothing but a mask came before. `locator` writes the bundles when the verdict is out; one
/// that cannot be made is a note of it.
[[nodiscard]] std::vector<Birth> keep_births(const Explanation& explanation,
                                             GradientLocator& locator, std::int64_t iteration,
                                             const AddModuleCall& add_module_call,
                                             const TakeKernelCall& take_kernel_call);

}  // namespace nanlocator::inline step_room
