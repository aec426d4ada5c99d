#include "replay/conclusion.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline replay_room {
namespace {

double largest_of(const std::string& dtype) {
  return largest_finite(dtype).value_or(std::numeric_limits<double>::infinity());
}

/// The same bad elements, as far as the stats show.
bool are_bad_alike(const ReplayedOutput& a, const ReplayedOutput& b) {
  return a.stats.nan == b.stats.nan && a.stats.pos_inf == b.stats.pos_inf &&
         a.stats.neg_inf == b.stats.neg_inf && a.stats.first_bad == b.stats.first_bad;
}

class Conclusion {
  using enum ReplayEvidence;

 public:
  Conclusion(ReplayReport& report, const ConclusionEvidence& evidence)
      : report_(report), evidence_(evidence) {
    for (const auto& run : report.runs) {
      if (run.variant == ReplayVariant::recorded) recorded_runs_.push_back(&run);
    }
  }

  void draw() {
    report_.conclusion = ReplayConclusion::not_replayed;
    if (std::ranges::any_of(recorded_runs_,
                            [](const auto* run) { return !run->problem.empty(); })) {
      add(not_executed);
      return;
    }
    report_.is_bit_exact = std::ranges::all_of(
        recorded_runs_, [&](const ReplayRun* run) { return has_recorded_bits(*run); });
    const bool is_repeated = std::ranges::all_of(recorded_runs_, [&](const ReplayRun* run) {
      return are_as(run->outputs, report_.recorded);
    });
    add(is_repeated ? repeated : not_repeated);
    const auto* poisoned = good_run(ReplayVariant::poisoned);
    const bool reads_unwritten =
        poisoned != nullptr && !are_as(poisoned->outputs, recorded_runs_[0]->outputs);
    if (reads_unwritten) add(reads_unwritten_memory);
    if (!is_repeated || reads_unwritten) {
      report_.conclusion = ReplayConclusion::varies;
    } else if (!is_bad(report_.recorded)) {
      add(nothing_bad);
    } else {
      report_.conclusion = of_deterministic();
    }
  }

 private:
  /// The first bad output; none if all are finite. Others may have parts that the operator leaves
  /// unwritten (the alphas that a CTC loss keeps for its derivative).
  std::optional<std::size_t> first_bad() const {
    const auto bad = std::ranges::find_if(report_.recorded,
                                          [](const ReplayedOutput& each) { return is_bad(each); });
    if (bad == report_.recorded.end()) return std::nullopt;
    return static_cast<std::size_t>(bad - report_.recorded.begin());
  }

  bool are_as(const std::vector<ReplayedOutput>& outputs,
              const std::vector<ReplayedOutput>& others) const {
    const auto bad = first_bad();
    if (bad && *bad < outputs.size() && *bad < others.size()) {
      return are_bad_alike(outputs[*bad], others[*bad]);
    }
    return std::ranges::equal(outputs, others, are_bad_alike);
  }

  bool has_recorded_bits(const ReplayRun& run) const {
    const auto is_other = [](const ReplayedOutput& output) {
      return output.equals_recorded == false;
    };
    const auto bad = first_bad();
    if (bad && *bad < run.outputs.size())
      return run.problem.empty() && !is_other(run.outputs[*bad]);
    return run.problem.empty() && std::ranges::none_of(run.outputs, is_other);
  }

  void add(ReplayEvidence evidence) { report_.evidence.push_back(evidence); }

  /// The run of a variant, if it was executed.
  const ReplayRun* good_run(ReplayVariant variant) const {
    const auto* found = find_run(report_, variant);
    return found != nullptr && found->problem.empty() ? found : nullptr;
  }

  ReplayConclusion of_deterministic() {
    const std::size_t bad = first_bad().value();
    const auto& recorded = report_.recorded[bad];
    report_.judged = bad;
    const auto* wide = good_run(ReplayVariant::float64);
    if (wide == nullptr && find_run(report_, ReplayVariant::float64) != nullptr) {
      add(no_float64);
      wide = good_run(ReplayVariant::float32);
    }
    // Another output may be bad in wide precision only where this one is; the first one is judged.
    const auto* wide_output =
        wide != nullptr && bad < wide->outputs.size() ? &wide->outputs[bad] : nullptr;
    if (wide_output != nullptr) report_.wider = wide->variant;
    if (wide_output != nullptr && !is_bad(*wide_output)) {
      return of_finite_in(*wide_output, recorded);
    }
    if (const auto* host = good_run(ReplayVariant::on_cpu);
        host != nullptr && bad < host->outputs.size() && !is_bad(host->outputs[bad])) {
      report_.wider.reset();
      add(finite_on_cpu);
      return ReplayConclusion::deterministic_kernel;
    }
    return of_bad_everywhere(wide_output != nullptr ? *wide_output : recorded);
  }

  ReplayConclusion of_finite_in(const ReplayedOutput& wide, const ReplayedOutput& recorded) {
    if (wide.stats.absmax > largest_of(recorded.dtype)) {
      add(exceeds_dtype);
      return ReplayConclusion::deterministic_overflow;
    }
    if (const auto* host = good_run(ReplayVariant::on_cpu);
        host != nullptr && !is_bad(host->outputs)) {
      add(finite_on_cpu);
      return ReplayConclusion::deterministic_kernel;
    }
    if (may_overflow_inside(recorded.dtype)) {
      add(overflows_inside);
      return ReplayConclusion::deterministic_overflow;
    }
    add(wrong_for_dtype);
    return ReplayConclusion::deterministic_kernel;
  }

  /// Whether a product of input elements, summed over all of them, may not fit. Squares of a norm
  /// and matrix products multiply two; the derivative of a layer norm multiplies six: the gradient,
  /// the weight, the input and the cube of rstd (aten/src/ATen/native/cpu/layer_norm_kernel.cpp). A
  /// kernel is blamed only if not even these come near. Kernels for 16-bit types accumulate in
  /// float32, but may store intermediate values in 16 bits.
  bool may_overflow_inside(const std::string& dtype) const {
    constexpr double kMostFactors = 6;
    double absmax = 0;
    double count = 1;
    for (const auto& input : evidence_.inputs) {
      absmax = std::max(absmax, input.absmax);
      count = std::max(count, static_cast<double>(input.numel));
    }
    return std::pow(absmax, kMostFactors) * count > largest_of(dtype);
  }

  ReplayConclusion of_bad_everywhere(const ReplayedOutput& output) {
    const bool have_bad_input = std::ranges::any_of(
        evidence_.inputs, [](const TensorStats& input) { return !input.is_finite(); });
    if (have_bad_input) add(input_not_finite);
    if (evidence_.is_custom) {
      add(custom);
      return ReplayConclusion::deterministic_custom;
    }
    if (output.stats.nan > 0 || have_bad_input || is_at_pole()) {
      add(output.stats.nan > 0 ? undefined : have_bad_input ? infinite : infinite_at_pole);
      return ReplayConclusion::deterministic_undefined;
    }
    add(exceeds_range);
    return ReplayConclusion::deterministic_overflow;
  }

  /// log 0, 1/0, rsqrt 0, 0 to a negative power; atanh 1, log1p -1, erfinv 1: the poles of
  /// pointwise functions that training meets are at zero, or at numbers of ordinary size. Others
  /// return infinity for what is impossible: a CTC loss for labels that do not fit.
  bool is_at_pole() const {
    if (!evidence_.is_pointwise) return are_inputs_too_small_for_float64();
    const auto& inputs = report_.inputs_at_first_bad;
    if (inputs.empty()) return false;
    const auto is_zero = [](const ReplayedInput& input) { return input.value == 0; };
    return std::ranges::any_of(inputs, is_zero) || are_values_too_small_for_float64();
  }

  /// Of such numbers, even exp(100) and 100 to the power of 100 are finite in float64.
  static constexpr double kSmallest = 1e-3, kLargest = 100;

  bool was_wide() const {
    return report_.wider == ReplayVariant::float64 ||
           report_.recorded[report_.judged].dtype == "float64";
  }

  bool are_values_too_small_for_float64() const {
    return was_wide() && evidence_.largest_number <= kLargest &&
           std::ranges::all_of(report_.inputs_at_first_bad, [&](const ReplayedInput& input) {
             return std::abs(input.value) >= kSmallest && std::abs(input.value) <= kLargest;
           });
  }

  /// Neither do sums of any number of their products.
  bool are_inputs_too_small_for_float64() const {
    return was_wide() && !evidence_.has_powers && !evidence_.inputs.empty() &&
           std::ranges::all_of(evidence_.inputs,
                               [&](const TensorStats& input) { return input.absmax <= kLargest; });
  }

  ReplayReport& report_;
  const ConclusionEvidence& evidence_;
  std::vector<const ReplayRun*> recorded_runs_;
};

}  // namespace

void conclude(ReplayReport& report, const ConclusionEvidence& evidence) {
  Conclusion(report, evidence).draw();
}

}  // namespace nanlocator::inline replay_room
