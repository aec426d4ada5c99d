// Is it the kernel? Executes the recorded call of a kernel that PyTorch's dispatcher does not see,
// alone, in several ways, and compares.
//
// In: the tensors of the call before and after it, a function that executes it, and references:
// what the kernel should give, in float64. Out: a KernelReplay. Every execution runs on fresh
// copies of all arguments, which lie between guards: what the call reads or writes beside their
// elements is seen. Nothing here depends on Python. Runs on the calling thread, on the current
// streams; waits for the device after each execution.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator::inline replay_room {

struct RecordedKernelCall {
  std::string name;
  std::vector<std::string> names;  // of `before`, by argument: "q", "cu_seqlens[0]"
  std::vector<at::Tensor> before;  // every tensor among the arguments; not changed here
  std::vector<at::Tensor> after;   // the same when the call had ended
  std::vector<Beside> beside;      // of `before`
  std::vector<at::Tensor> results;
  std::map<std::string, std::string> settings;  // see current_settings
  CameFrom came_from;                           // of copies in host memory
};

/// Of a live tensor; scans its whole storage where that is larger. Allocates nothing in proportion
/// to either.
[[nodiscard]] Beside beside_of(const at::Tensor& tensor);

/// Calls the kernel with these tensors in place of its arguments', and returns the tensors of its
/// result. Throws what the kernel throws.
using ExecuteKernel = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// What a kernel of one family computes, by its definition.
struct KernelReference {
  std::string family;  // "silu", "rms_norm backward"
  /// From the arguments' tensors, the floating-point ones converted to one dtype: what outputs may
  /// be, in any order. An entry that has another number of elements than the output that is judged
  /// is passed over. Called once on tensors without memory first, which counts its work. May throw.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> values;
};

/// What one execution of a reference in float64 may compute and take, so that it ends within
/// seconds: at about 5 GFLOP/s on one core, and 500 on a GPU that is slow in float64.
struct ReferenceLimit {
  double flops_on_host = 5e10;
  double flops_on_device = 5e12;
  /// With what the comparison takes. Memory that the host has not free is no limit here, but kept
  /// to as well.
  double bytes = 8e9;
};

struct KernelReplayOptions {
  int repeats = 3;   // as recorded
  std::string role;  // the output to be judged: "of_x", "output[0]"; "": the first bad one
  /// No further execution, of the kernel or of a reference, begins after so many seconds, or where
  /// those before it took so long that all that are needed would not end by then; nullopt: where a
  /// person asks.
  std::optional<double> seconds = 60;
  /// Bytes of arguments and results beyond which nothing is executed; as above. Memory that is not
  /// free is no limit here, but kept to as well.
  std::optional<std::uint64_t> bytes = std::uint64_t{4} << 30;
  /// References beyond it are left out; as above.
  std::optional<ReferenceLimit> reference_limit = ReferenceLimit{};
};

/// The rules are in docs/replay.md. A call that raises, is too large or takes too long is
/// `not_replayed`, with the problem. Generators of this thread are used up by what the kernel
/// draws; other threads should not compute meanwhile: settings, and the filling of new memory, are
/// the process's. Throws UsageError for fewer than one repeat.
[[nodiscard]] KernelReplay replay_kernel(const RecordedKernelCall& call,
                                         const ExecuteKernel& execute,
                                         const std::vector<KernelReference>& references,
                                         const KernelReplayOptions& options = {});

/// A kernel call that was kept in this process, with the live kernel.
struct KeptKernelCall {
  RecordedKernelCall recorded;
  ExecuteKernel execute;
  std::vector<KernelReference> references;
  std::string why_not_replayed;  // "" where it can be executed
  std::function<void(Bundle&, StorageCollector&, BundleContents&)> add_to_bundle;
};

}  // namespace nanlocator::inline replay_room
