// The options of a StepDriver, one field each.
//
// kOptionFields lists each field by name. run.json, the ranks' agreement and the values from Python
// come from that list. In Python an option is a row of nanlocator/engine/options.py with its type,
// variable, flag and help, which fills the field of the same name; the default is here.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline step_room {

/// The reaction to a bad step, the same on every rank.
enum class Policy {
  report,   // print and write the verdict, continue
  stop,     // raise NonFiniteGradientError on every rank, before the optimizer steps
  skip,     // skip the optimizer's step on every rank, continue with the next
  recover,  // continue with the gradients of a clean re-run; else stop
};
[[nodiscard]] constexpr auto names_of(Policy) {
  return std::to_array<std::string_view>({"report", "stop", "skip", "recover"});
}

/// What is scanned in every step; see docs/concepts.md.
enum class Level {
  grads,       // gradients
  boundaries,  // also exchanges between ranks: collectives, pipeline transfers, the loss
  modules,     // also every module's inputs and outputs, forward and backward
  operators,   // also every operator, synchronously
};
[[nodiscard]] constexpr auto names_of(Level) {
  return std::to_array<std::string_view>({"grads", "boundaries", "modules", "operators"});
}

/// When a step that can be executed again is re-run with operators traced.
enum class RerunPolicy {
  never,
  on_bad,  // if its gradients are bad
  always,  // every step: also finds steps whose re-run differs in any bit
};
[[nodiscard]] constexpr auto names_of(RerunPolicy) {
  return std::to_array<std::string_view>({"never", "on_bad", "always"});
}

struct LocatorOptions {
  Policy on_bad = Policy::stop;
  Level level = Level::grads;
  RerunPolicy rerun = RerunPolicy::on_bad;
  std::filesystem::path output_dir = "nanlocator_run";
  /// Where the training saves its checkpoints, named by steps as `begin_step` counts them; empty:
  /// not known.
  std::filesystem::path checkpoint_dir{};
  bool check_params = false;  // also scan parameters before and after the step
  std::chrono::milliseconds gather_deadline{30'000};  // for ranks that do not answer
  int threads = 1;                                    // for gradients in host memory
  /// After this many findings, under a policy that continues, the ranks only count further ones: a
  /// run with NaN weights would otherwise gather at every step.
  int max_incidents = 16;
  std::uint64_t bundle_bytes = BundleBudget{}.bytes;  // per rank
  int bundle_count = BundleBudget{}.count;            // per rank
  /// Limit of a StepRecorder's memory for operators outside modules; its owner passes it on.
  std::uint64_t recorded_bytes = std::uint64_t{256} << 20;

  /// Called on rank 0 with verdict.json, once the files of a finding are on disk and before any
  /// rank ends; bounds itself and throws nothing. Not called on the guard's thread, nor for a
  /// verdict of one rank alone. In no file: it has no text.
  std::function<void(const std::filesystem::path& verdict)> on_finding{};

  /// Called on rank 0 of a job that stops, with the checkpoints in question one after the other:
  /// reads `path` for at most `limit`, sets `is_finite` and `found`. Throws nothing. In no file.
  std::function<void(const std::filesystem::path& path, std::chrono::milliseconds limit,
                     CheckpointFile& file)>
      read_checkpoint{};

  std::string integration = "pytorch";  // for run.json: "pytorch", "megatron", "cpp"
  std::vector<std::string>
      not_covered;  // for run.json: what this configuration cannot see, sentences
};

template <typename Value>
struct OptionField {
  const char* name;
  Value LocatorOptions::*field;
  bool is_agreed;  // must be the same on all ranks, or nanlocator does not start
};

inline constexpr std::tuple kOptionFields{
    OptionField{"on_bad", &LocatorOptions::on_bad, true},
    OptionField{"level", &LocatorOptions::level, true},
    OptionField{"rerun", &LocatorOptions::rerun, true},
    OptionField{"output_dir", &LocatorOptions::output_dir, true},
    OptionField{"checkpoint_dir", &LocatorOptions::checkpoint_dir, false},
    OptionField{"check_params", &LocatorOptions::check_params, true},
    OptionField{"gather_deadline", &LocatorOptions::gather_deadline, false},
    OptionField{"threads", &LocatorOptions::threads, false},
    OptionField{"max_incidents", &LocatorOptions::max_incidents, true},
    OptionField{"bundle_bytes", &LocatorOptions::bundle_bytes, false},
    OptionField{"bundle_count", &LocatorOptions::bundle_count, false},
    OptionField{"recorded_bytes", &LocatorOptions::recorded_bytes, false},
};

/// Calls `use` for each OptionField, in the order of kOptionFields.
template <typename Use>
void for_each_option(const Use& use) {
  std::apply([&](const auto&... option) { (use(option), ...); }, kOptionFields);
}

/// The consequence of a finding under a policy: "stopped", "reported", "skipped" or "recovered"
/// (under `recover` if the re-run was clean on all ranks; else "stopped").
[[nodiscard]] std::string_view outcome_of(Policy policy, const RerunOutcome& rerun) noexcept;

}  // namespace nanlocator::inline step_room
