#include "replay/conclusion.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

namespace nanlocator {
namespace {

/// The largest finite value of a dtype's (real) elements; infinity for what is not known.
double largest_of(std::string_view dtype) {
  constexpr std::array<std::pair<std::string_view, double>, 9> kLargest = {{
      {"float64", std::numeric_limits<double>::max()},
      {"complex128", std::numeric_limits<double>::max()},
      {"float32", std::numeric_limits<float>::max()},
      {"complex64", std::numeric_limits<float>::max()},
      {"bfloat16", 0x1.FEp127},
      {"float16", 65504},
      {"complex32", 65504},
      {"float8_e4m3fn", 448},
      {"float8_e5m2", 57344},
  }};
  for (const auto& [name, largest] : kLargest) {
    if (name == dtype) return largest;
  }
  return std::numeric_limits<double>::infinity();
}

std::string text_of(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g", value);
  return text.data();
}

bool is_bad(const ReplayedOutput& output) {
  return !output.stats.is_finite();
}
bool is_bad(const std::vector<ReplayedOutput>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(), [](const auto& o) { return is_bad(o); });
}

/// The same bad elements, as far as the stats tell.
bool are_bad_alike(const std::vector<ReplayedOutput>& a, const std::vector<ReplayedOutput>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const ReplayedOutput& x, const ReplayedOutput& y) {
        return x.stats.nan == y.stats.nan && x.stats.pos_inf == y.stats.pos_inf &&
               x.stats.neg_inf == y.stats.neg_inf && x.stats.first_bad == y.stats.first_bad;
      });
}

bool has_recorded_bits(const ReplayRun& run) {
  return run.problem.empty() &&
         std::none_of(run.outputs.begin(), run.outputs.end(), [](const ReplayedOutput& output) {
           return output.equals_recorded.has_value() && !*output.equals_recorded;
         });
}

class Conclusion {
 public:
  Conclusion(ReplayReport& report, const ConclusionEvidence& evidence)
      : report_(report), evidence_(evidence) {
    for (const auto& run : report.runs) {
      if (run.variant == ReplayVariant::recorded) recorded_runs_.push_back(&run);
    }
  }

  void draw() {
    report_.conclusion = ReplayConclusion::not_replayed;
    const auto failed = std::find_if(recorded_runs_.begin(), recorded_runs_.end(),
                                     [](const ReplayRun* run) { return !run->problem.empty(); });
    if (failed != recorded_runs_.end()) {
      say("It could not be executed as recorded: " + (*failed)->problem);
      return;
    }
    report_.is_bit_exact =
        std::all_of(recorded_runs_.begin(), recorded_runs_.end(),
                    [](const ReplayRun* run) { return has_recorded_bits(*run); });
    if (!repeats()) {
      report_.conclusion = ReplayConclusion::varies;
      return;
    }
    if (reads_unwritten_memory()) {
      report_.conclusion = ReplayConclusion::varies;
      return;
    }
    if (!is_bad(report_.recorded)) {
      say("Nothing bad was recorded and nothing bad came out: there is no fault to conclude on.");
      return;
    }
    report_.conclusion = of_deterministic();
  }

 private:
  void say(std::string sentence) { report_.sentences.push_back(std::move(sentence)); }

  std::string times() const {
    const auto n = recorded_runs_.size();
    return n == 1 ? "once" : std::to_string(n) + " times";
  }

  /// Every recorded run has the recorded bad elements.
  bool repeats() {
    const auto alike = static_cast<std::size_t>(std::count_if(
        recorded_runs_.begin(), recorded_runs_.end(),
        [&](const ReplayRun* run) { return are_bad_alike(run->outputs, report_.recorded); }));
    const bool was_bad = is_bad(report_.recorded);
    if (alike == recorded_runs_.size()) {
      std::string sentence = "Executed " + times() + " as recorded: ";
      sentence += was_bad ? "bad at the same elements every time" : "finite every time";
      say(sentence + (report_.is_bit_exact ? ", with the recorded bits."
                                           : ", but not with the recorded bits everywhere: another "
                                             "device or thread count, or an order of addition "
                                             "that changes from call to call."));
      return true;
    }
    const auto bad = std::count_if(recorded_runs_.begin(), recorded_runs_.end(),
                                   [](const ReplayRun* run) { return is_bad(run->outputs); });
    const auto of_runs = std::to_string(bad) + " of " + std::to_string(recorded_runs_.size());
    if (!was_bad) {
      say("Recorded finite, but bad in " + of_runs + " executions of the same inputs.");
    } else if (bad == 0) {
      say("Recorded bad, but finite " + times() +
          " when executed again from the same inputs: they do not explain it.");
    } else {
      say("Recorded bad; executed again from the same inputs it is bad in " + of_runs +
          " runs, not at the same elements in all of them.");
    }
    say("What is left is hardware, a race with another stream or thread, or memory that was read "
        "before it was written.");
    reads_unwritten_memory();
    return false;
  }

  const ReplayRun* run(ReplayVariant variant) const {
    for (const auto& run : report_.runs) {
      if (run.variant == variant) return &run;
    }
    return nullptr;
  }
  /// The run of a variant that was executed.
  const ReplayRun* good_run(ReplayVariant variant) const {
    const auto* found = run(variant);
    return found != nullptr && found->problem.empty() ? found : nullptr;
  }

  bool reads_unwritten_memory() {
    const auto* poisoned = good_run(ReplayVariant::poisoned);
    if (poisoned == nullptr || are_bad_alike(poisoned->outputs, recorded_runs_[0]->outputs)) {
      return false;
    }
    say("With new memory filled with NaN first the result is another: the operator reads memory "
        "that nobody has written.");
    return true;
  }

  ReplayConclusion of_deterministic() {
    const auto bad = static_cast<std::size_t>(
        std::find_if(report_.recorded.begin(), report_.recorded.end(),
                     [](const ReplayedOutput& output) { return is_bad(output); }) -
        report_.recorded.begin());
    const auto& recorded = report_.recorded[bad];
    const auto* wide = good_run(ReplayVariant::float64);
    const char* wide_name = "float64";
    if (wide == nullptr && run(ReplayVariant::float64) != nullptr) {
      say("It could not be executed in float64: " + run(ReplayVariant::float64)->problem);
      wide = good_run(ReplayVariant::float32);
      wide_name = "float32";
    }
    // Another output may be bad in wide precision only where this one is; one is judged, the first.
    const auto* wide_output =
        wide != nullptr && bad < wide->outputs.size() ? &wide->outputs[bad] : nullptr;
    if (wide_output != nullptr && !is_bad(*wide_output)) {
      return of_finite_in(wide_name, *wide_output, recorded);
    }
    if (const auto* host = good_run(ReplayVariant::on_cpu);
        host != nullptr && bad < host->outputs.size() && !is_bad(host->outputs[bad])) {
      say("The CPU's kernel gives a finite result in the same dtype: it is the device's kernel.");
      return ReplayConclusion::deterministic_kernel;
    }
    return of_bad_everywhere(wide_output != nullptr ? *wide_output : recorded,
                             wide_output != nullptr ? wide_name : "");
  }

  ReplayConclusion of_finite_in(const std::string& wide_name, const ReplayedOutput& wide,
                                const ReplayedOutput& recorded) {
    const auto largest = largest_of(recorded.dtype);
    const auto reached = text_of(wide.stats.absmax);
    if (wide.stats.absmax > largest) {
      say("In " + wide_name + " the result is finite and reaches " + reached + ", more than " +
          recorded.dtype + "'s largest value, " + text_of(largest) + ": it overflowed.");
      return ReplayConclusion::deterministic_overflow;
    }
    if (const auto* host = good_run(ReplayVariant::on_cpu);
        host != nullptr && !is_bad(host->outputs)) {
      say("In " + wide_name + " the result is finite (at most " + reached +
          ") and so it is in the same dtype on the CPU: it is the device's kernel.");
      return ReplayConclusion::deterministic_kernel;
    }
    if (may_overflow_inside(recorded.dtype)) {
      say("In " + wide_name + " the result is finite (at most " + reached + ") and would fit " +
          recorded.dtype +
          ", but products or sums of these inputs do not: an intermediate value overflowed.");
      return ReplayConclusion::deterministic_overflow;
    }
    say("In " + wide_name + " the result is finite (at most " + reached + ") and fits " +
        recorded.dtype +
        ", and the inputs are far from its range: the kernel for this dtype makes it bad.");
    return ReplayConclusion::deterministic_kernel;
  }

  /// A product of input elements, summed over all of them, may not fit. Squares of a norm and
  /// matrix products multiply two; the derivative of a layer norm multiplies six, the gradient, the
  /// weight, the input and the cube of rstd (aten/src/ATen/native/cpu/layer_norm_kernel.cpp). A
  /// kernel is accused only where not even these come near. Kernels for 16-bit types accumulate in
  /// float32, but may store in between.
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

  ReplayConclusion of_bad_everywhere(const ReplayedOutput& output, const std::string& wide_name) {
    const std::string where =
        wide_name.empty() ? "In the recorded dtype" : "In " + wide_name + " too";
    const bool have_bad_input =
        std::any_of(evidence_.inputs.begin(), evidence_.inputs.end(),
                    [](const TensorStats& input) { return !input.is_finite(); });
    if (have_bad_input) say("An input is not finite already.");
    if (evidence_.is_custom) {
      say(where +
          " the result is not finite. The operator is not PyTorch's: whether its mathematics "
          "or its code makes it so, only its authors know.");
      return ReplayConclusion::deterministic_custom;
    }
    if (output.stats.nan > 0) {
      say(where + " the result is NaN: it is the mathematics of these inputs.");
      return ReplayConclusion::deterministic_undefined;
    }
    if (have_bad_input || is_at_pole()) {
      say(where + " the result is infinite" +
          (have_bad_input ? "." : ", and an input is an exact zero: a pole of the function."));
      return ReplayConclusion::deterministic_undefined;
    }
    say(where + " the result is infinite, of finite inputs away from zero: it exceeds " +
        (wide_name.empty() ? output.dtype : wide_name) + "'s range.");
    return ReplayConclusion::deterministic_overflow;
  }

  /// log 0, 1/0, rsqrt 0, 0 to a negative power: of pointwise functions the poles that training
  /// meets are at zero (others, atanh 1, are taken for an overflow).
  bool is_at_pole() const {
    return evidence_.is_pointwise &&
           std::any_of(report_.inputs_at_first_bad.begin(), report_.inputs_at_first_bad.end(),
                       [](const ReplayedInput& input) { return input.value == 0; });
  }

  ReplayReport& report_;
  const ConclusionEvidence& evidence_;
  std::vector<const ReplayRun*> recorded_runs_;
};

}  // namespace

void conclude(ReplayReport& report, const ConclusionEvidence& evidence) {
  Conclusion(report, evidence).draw();
}

}  // namespace nanlocator
