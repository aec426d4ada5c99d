// Replays one recorded operator call, alone, in several ways, and compares: does the fault occur
// again?
//
// In: a call with its inputs and the outputs that were seen. Out: a table of variants and a
// conclusion: the mathematics of these inputs, the precision, the kernel, or none of these
// (hardware, a race, uninitialised memory). Every variant runs on fresh copies of the tensors that
// the operator writes. Runs on the calling thread, on the current streams; waits.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline replay_room {

/// The most that one execution on the CPU may compute and read, so that all of them together end
/// within seconds on one core: about 10 GFLOP/s and 1 GB/s. The host's free memory is a further
/// limit.
struct CpuWorkLimit {
  double flops = 2e10;
  double bytes = 2e9;  // of arguments and outputs
};

struct ReplayOptions {
  int repeats = 3;            // of the recorded call
  bool other_devices = true;  // also on the CPU if it was recorded on CUDA
  /// Executions beyond it are skipped; nullopt: no limit, for a user's request.
  std::optional<CpuWorkLimit> cpu_limit = CpuWorkLimit{};
};

enum class ReplayVariant : std::uint8_t {
  recorded,  // the recorded dtype, device and settings
  poisoned,  // the same, with new memory first filled with NaN, to reveal reads of it
  float32,   // floating-point arguments converted, if the recorded dtype is narrower
  float64,
  on_cpu,  // the recorded dtype with the CPU's kernel, if it was recorded on CUDA
};
[[nodiscard]] constexpr auto names_of(ReplayVariant) {
  return std::to_array<std::string_view>({"recorded", "poisoned", "float32", "float64", "on_cpu"});
}

struct ReplayedOutput {
  std::string name;  // "output[0]"; "running_mean after" if it is written and not returned
  std::string dtype;
  std::vector<std::int64_t> shape;
  TensorStats stats;
  std::optional<bool> equals_recorded;  // bit for bit; empty if dtypes differ
};

struct ReplayRun {
  ReplayVariant variant = ReplayVariant::recorded;
  int repeat = 0;
  std::vector<ReplayedOutput> outputs;
  std::string problem;  // why it could not run, such as no kernel for this dtype; "" if it ran
};

/// For a pointwise operator: the input elements that broadcast to the first bad output element. For
/// others: the first non-finite element of each input that has one.
struct ReplayedInput {
  std::string name;  // the schema's: "self"
  std::string dtype;
  std::vector<std::int64_t> index;
  double value = 0;
};

/// Findings of a replay, for its conclusion.
enum class ReplayEvidence : std::uint8_t {
  not_executed,  // as recorded
  repeated,      // every recorded run has the recorded bad elements, or none
  not_repeated,  // at least one run has others
  reads_unwritten_memory,
  nothing_bad,  // neither in the recording nor in a run
  no_float64,   // it could not be executed in float64
  // About the first bad output. Finite in wider precision:
  exceeds_dtype,     // it is larger there than its dtype's largest value
  overflows_inside,  // it would fit, but an intermediate value would not
  finite_on_cpu,     // in its own dtype
  wrong_for_dtype,   // it fits, and these inputs are far from the dtype's range
  // Not finite in any execution:
  input_not_finite,
  custom,            // an operator that is not PyTorch's
  undefined,         // NaN
  infinite,          // and an input is not finite
  infinite_at_pole,  // of zero, or of inputs that cannot make a result exceed the range
  exceeds_range,     // with finite inputs, away from a pole
};

struct ReplayReport {
  std::string op;
  std::vector<ReplayedOutput> recorded;  // the outputs in the bundle
  std::vector<ReplayRun> runs;
  std::vector<ReplayedInput> inputs_at_first_bad;
  /// Also not_replayed if neither the recording nor a run is bad, or if it is too large for the CPU
  /// or the original device; a sentence says which.
  ReplayConclusion conclusion = ReplayConclusion::not_replayed;
  bool is_bit_exact = false;  // every `recorded` run gave the recorded bits
  std::vector<ReplayEvidence> evidence;
  std::size_t judged = 0;                // index of the output that the conclusion is about
  std::optional<ReplayVariant> wider{};  // the execution in wider precision that decides
  std::vector<std::string> sentences;    // the evidence as text
};

/// Throws UnsupportedError if the operator is not registered, UsageError for fewer than one repeat.
/// A call that raises is reported in ReplayRun::problem and concludes nothing. Restores this
/// thread's generators and settings. Other threads should not compute meanwhile: settings, and the
/// filling of new memory, apply to the process.
[[nodiscard]] ReplayReport replay(const OperatorCall& call, const ReplayOptions& options = {});

[[nodiscard]] std::string to_json(const ReplayReport& report);
struct ReplayTextStyle {
  int width = 100;
  bool colour = false;
};
[[nodiscard]] std::string format_replay(const ReplayReport& report,
                                        const ReplayTextStyle& style = {});

}  // namespace nanlocator::inline replay_room
