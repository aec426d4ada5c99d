#include <algorithm>
#include <limits>

#include "files/text.hpp"
#include "nanlocator/scan/dtype.hpp"
#include "replay/conclusion.hpp"

namespace nanlocator::inline replay_room {
namespace {

class Words {
 public:
  explicit Words(const ReplayReport& report) : report_(report) {
    for (const auto& run : report.runs) {
      if (run.variant == ReplayVariant::recorded) runs_.push_back(&run);
    }
  }

  [[nodiscard]] std::string of(ReplayEvidence evidence) const {
    using enum ReplayEvidence;
    switch (evidence) {
      case not_executed:
        return "It could not be executed as recorded: " + first_problem();
      case repeated:
        return "Executed " + times() + " as recorded: " +
               (is_bad(report_.recorded) ? "bad at the same elements every time"
                                         : "finite every time") +
               (report_.is_bit_exact ? ", with the recorded bits."
                                     : ", but not with the recorded bits everywhere: another "
                                       "device or thread count, or an order of addition "
                                       "that changes from call to call.");
      case not_repeated:
        return what_varies();
      case reads_unwritten_memory:
        return "If new memory is first filled with NaN, the result differs: the operator reads "
               "memory that was never written.";
      case nothing_bad:
        return "Neither the recording nor any execution is bad: there is no fault to explain.";
      case no_float64:
        return "It could not be executed in float64: " +
               find_run(report_, ReplayVariant::float64)->problem;
      case exceeds_dtype:
        return wide() + " the result is finite and reaches " + reached() + ", more than " +
               dtype() + "'s largest value, " +
               number_text(
                   largest_finite(dtype()).value_or(std::numeric_limits<double>::infinity())) +
               ": it overflowed.";
      case finite_on_cpu:
        return report_.wider
                   ? wide() + " the result is finite (at most " + reached() +
                         "), also in the same dtype on the CPU: the device's kernel is at fault."
                   : "The CPU's kernel gives a finite result in the same dtype: the device's "
                     "kernel is at fault.";
      case overflows_inside:
        return wide() + " the result is finite (at most " + reached() + ") and would fit " +
               dtype() +
               ", but products or sums of these inputs do not: an intermediate value overflowed.";
      case wrong_for_dtype:
        return wide() + " the result is finite (at most " + reached() + ") and fits " + dtype() +
               ", and the inputs are far from its range: the kernel for this dtype is at fault.";
      case input_not_finite:
        return "An input is already not finite.";
      case custom:
        return everywhere() +
               " the result is not finite. The operator is not PyTorch's: whether its mathematics "
               "or its code causes this, only its authors know.";
      case undefined:
        return everywhere() + " the result is NaN: it is " +
               (report_.wider || dtype() == "float64"
                    ? "undefined for these inputs, whatever the precision."
                    : "undefined for them, or an intermediate value overflowed: no wider "
                      "dtype was tried.");
      case infinite:
        return everywhere() + " the result is infinite.";
      case infinite_at_pole:
        return everywhere() + " the result is infinite, and " +
               (std::ranges::count(report_.inputs_at_first_bad, 0.0, &ReplayedInput::value) > 0
                    ? "an input is an exact zero"
                    : "no input is large") +
               ": a pole of the function.";
      case exceeds_range:
        return everywhere() +
               " the result is infinite for finite inputs away from zero: it exceeds " +
               (report_.wider ? std::string(name_of(*report_.wider)) : dtype()) + "'s range.";
    }
    return "";
  }

 private:
  [[nodiscard]] std::string times() const {
    return runs_.size() == 1 ? "once" : std::to_string(runs_.size()) + " times";
  }
  [[nodiscard]] std::string first_problem() const {
    const auto failed =
        std::ranges::find_if(runs_, [](const ReplayRun* run) { return !run->problem.empty(); });
    return failed == runs_.end() ? "" : (*failed)->problem;
  }

  [[nodiscard]] std::string what_varies() const {
    const auto bad =
        std::ranges::count_if(runs_, [](const ReplayRun* run) { return is_bad(run->outputs); });
    const auto of_runs = std::to_string(bad) + " of " + std::to_string(runs_.size());
    if (!is_bad(report_.recorded)) {
      return "Recorded finite, but bad in " + of_runs + " executions of the same inputs.";
    }
    if (bad == 0) {
      return "Recorded bad, but finite " + times() +
             " when executed again from the same inputs, which do not explain it.";
    }
    return "Recorded bad; executed again from the same inputs it is bad in " + of_runs +
           " runs, not at the same elements in all of them.";
  }

  [[nodiscard]] std::string wide() const { return "In " + std::string(name_of(*report_.wider)); }
  [[nodiscard]] std::string everywhere() const {
    return report_.wider ? wide() + " too" : "In the recorded dtype";
  }
  [[nodiscard]] std::string reached() const {
    return number_text(find_run(report_, *report_.wider)->outputs[report_.judged].stats.absmax);
  }
  [[nodiscard]] const std::string& dtype() const { return report_.recorded[report_.judged].dtype; }

  const ReplayReport& report_;
  std::vector<const ReplayRun*> runs_;  // as recorded
};

}  // namespace

std::vector<std::string> sentences_of(const ReplayReport& report) {
  const Words words(report);
  std::vector<std::string> sentences;
  for (const auto evidence : report.evidence) {
    sentences.push_back(words.of(evidence));
    if (evidence == ReplayEvidence::not_repeated) {
      sentences.emplace_back(
          "Remaining causes: hardware, a race with another stream or thread, or memory that was "
          "read before it was written.");
    }
  }
  return sentences;
}

}  // namespace nanlocator::inline replay_room
