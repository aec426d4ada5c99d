// Replays the recorded call of a kernel that PyTorch's dispatcher does not see, alone, in several
// ways, and compares the results: is the kernel at fault?
//
// In: the tensors of the call before and after it, a function that executes it, and references that
// compute the expected result in float64. Out: a KernelReplay. Every execution runs on fresh copies
// of all arguments between guard zones, which reveal reads and writes outside the arguments'
// elements. Nothing here depends on Python. Runs on the calling thread, on the current streams;
// waits for the device after each execution.
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
  std::vector<at::Tensor> before;  // every tensor among the arguments; not modified
  std::vector<at::Tensor> after;   // the same tensors after the call
  std::vector<Beside> beside;      // for `before`
  std::vector<at::Tensor> results;
  std::map<std::string, std::string> settings;  // see current_settings
  CameFrom came_from;                           // origin of copies in host memory
};

/// For a live tensor; scans its whole storage if that is larger. Its memory does not grow with
/// either.
[[nodiscard]] Beside beside_of(const at::Tensor& tensor);

/// Calls the kernel with these tensors in place of its arguments', and returns the tensors of its
/// result. Throws the kernel's errors.
using ExecuteKernel = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// The definition of what a family of kernels computes.
struct KernelReference {
  std::string family;  // "silu", "rms_norm backward"
  /// Computes the possible outputs, in any order, from the arguments' tensors, the floating-point
  /// ones converted to one dtype. Entries whose number of elements differs from the judged output's
  /// are skipped. First called once on tensors without memory, to count its work. May throw.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> values;
};

/// The most that one execution of a reference in float64 may compute and allocate, so that it ends
/// within seconds: at about 5 GFLOP/s on one core, and 500 on a GPU that is slow in float64.
struct ReferenceLimit {
  double flops_on_host = 5e10;
  double flops_on_device = 5e12;
  /// Includes the comparison. The host's free memory is a further limit.
  double bytes = 8e9;
};

struct KernelReplayOptions {
  int repeats = 3;   // as recorded
  std::string role;  // the output to be judged: "of_x", "output[0]"; "": the first bad one
  /// After this many seconds no further execution of the kernel or a reference begins, nor if
  /// earlier ones were so slow that the planned ones would not finish in time. nullopt for a user's
  /// request.
  std::optional<double> seconds = 60;
  /// The largest size of arguments and results that is executed; nullopt as above. The free memory
  /// is a further limit.
  std::optional<std::uint64_t> bytes = std::uint64_t{4} << 30;
  /// References beyond it are skipped; nullopt as above.
  std::optional<ReferenceLimit> reference_limit = ReferenceLimit{};
};

/// docs/replay.md has the rules. A call that raises, is too large or takes too long is
/// `not_replayed`, with the problem. The kernel advances this thread's generators. Other threads
/// should not compute meanwhile: settings, and the filling of new memory, apply to the process.
/// Throws UsageError for fewer than one repeat.
[[nodiscard]] KernelReplay replay_kernel(const RecordedKernelCall& call,
                                         const ExecuteKernel& execute,
                                         const std::vector<KernelReference>& references,
                                         const KernelReplayOptions& options = {});

/// A kernel call kept in this process, with the live kernel.
struct KeptKernelCall {
  RecordedKernelCall recorded;
  ExecuteKernel execute;
  std::vector<KernelReference> references;
  std::string why_not_replayed;  // "" if it can be executed
  std::function<void(Bundle&, StorageCollector&, BundleContents&)> add_to_bundle;
};

}  // namespace nanlocator::inline replay_room
