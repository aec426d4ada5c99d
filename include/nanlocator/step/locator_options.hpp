// What a program can choose about a StepDriver, a field for each option.
//
// kOptionFields has each field by its name; from it come run.json, what the ranks must agree on,
// and what Python fills. In Python an option is a row of nanlocator/engine/options.py, which fills
// the field of its name: type, variable, flag and help stand there, the default here.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/locate/verdict.hpp"
#include "nanlocator/record/bundle.hpp"

namespace nanlocator::inline step_room {

/// What to do on a bad step, the same on every rank.
enum class Policy {
  report,   // print and write the verdict, go on
  stop,     // raise NonFiniteGradientError on every rank, before the optimizer steps
  skip,     // no optimizer step on any rank, go on with the next
  recover,  // where the re-run of the step is clean, go on with its gradients; else stop
};
[[nodiscard]] constexpr auto names_of(Policy) {
  return std::to_array<std::string_view>({"report", "stop", "skip", "recover"});
}

/// What is watched in every step; see docs/concepts.md.
enum class Level {
  grads,       // gradients
  boundaries,  // and what ranks hand to each other: collectives, pipeline transfers, the loss
  modules,     // and every module's inputs and outputs, forward and backward
  operators,   // and every operator, synchronously
};
[[nodiscard]] constexpr auto names_of(Level) {
  return std::to_array<std::string_view>({"grads", "boundaries", "modules", "operators"});
}

/// When a step whose forward and backward can be executed again is re-run, operators traced.
enum class RerunPolicy {
  never,
  on_bad,  // where its gradients are bad
  always,  // every step: also finds a step whose re-run has other bits
};
[[nodiscard]] constexpr auto names_of(RerunPolicy) {
  return std::to_array<std::string_view>({"never", "on_bad", "always"});
}

struct LocatorOptions {
  Policy on_bad = Policy::stop;
  Level level = Level::grads;
  RerunPolicy rerun = RerunPolicy::on_bad;
  std::filesystem::path output_dir = "nanlocator_run";
  bool check_params = false;  // also scan parameters before and after the step
  std::chrono::milliseconds gather_deadline{30'000};  // for ranks that do not answer
  int threads = 1;                                    // for gradients in host memory
  /// After this many findings under a policy that goes on the ranks count on, but gather no more: a
  /// run whose weights are NaN would otherwise gather at every step.
  int max_incidents = 16;
  std::uint64_t bundle_bytes = BundleBudget{}.bytes;  // of this rank
  int bundle_count = BundleBudget{}.count;            // of this rank
  /// What a StepRecorder may keep for operators outside of modules; its owner's to pass on.
  std::uint64_t recorded_bytes = std::uint64_t{256} << 20;

  std::string integration = "pytorch";  // for run.json: "pytorch", "megatron", "cpp"
  std::vector<std::string>
      not_covered;  // for run.json: what this configuration cannot see, sentences
};

template <typename Value>
struct OptionField {
  const char* name;
  Value LocatorOptions::*field;
  bool is_agreed;  // the same on all ranks, else nanlocator does not begin
};

inline constexpr std::tuple kOptionFields{
    OptionField{"on_bad", &LocatorOptions::on_bad, true},
    OptionField{"level", &LocatorOptions::level, true},
    OptionField{"rerun", &LocatorOptions::rerun, true},
    OptionField{"output_dir", &LocatorOptions::output_dir, true},
    OptionField{"check_params", &LocatorOptions::check_params, true},
    OptionField{"gather_deadline", &LocatorOptions::gather_deadline, false},
    OptionField{"threads", &LocatorOptions::threads, false},
    OptionField{"max_incidents", &LocatorOptions::max_incidents, true},
    OptionField{"bundle_bytes", &LocatorOptions::bundle_bytes, false},
    OptionField{"bundle_count", &LocatorOptions::bundle_count, false},
    OptionField{"recorded_bytes", &LocatorOptions::recorded_bytes, false},
};

/// `use` of each OptionField, in the order of kOptionFields.
template <typename Use>
void for_each_option(const Use& use) {
  std::apply([&](const auto&... option) { (use(option), ...); }, kOptionFields);
}

/// What a finding leads to under a policy: "stopped", "reported", "skipped" or "recovered" (under
/// `recover` where the re-run of the step was clean on all ranks; else "stopped").
[[nodiscard]] std::string_view outcome_of(Policy policy, const RerunOutcome& rerun) noexcept;

}  // namespace nanlocator::inline step_room
