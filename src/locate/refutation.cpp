#include "locate/refutation.hpp"

namespace nanlocator {
namespace {

std::string these_ranks(const Origin& origin) {
  return origin.candidates.size() == 1 ? "this rank" : "these ranks";
}

std::string refutation_of_unknown(const Origin& origin) {
  switch (origin.phase) {
    case Phase::forward:
    case Phase::loss:
    case Phase::backward:
      return "something bad that " + these_ranks(origin) +
             " received before it, by a way that is not watched (docs/causes.md lists them)";
    case Phase::grad_local:
      return "a bad activation or loss of an earlier place in the same step, which gradients alone "
             "do not show: level boundaries or a repeat would";
    default:
      return "a bad value in an earlier phase of the step that was not looked at";
  }
}

}  // namespace

std::string refutation_of(const Origin& origin) {
  switch (origin.cause) {
    case Cause::bad_weight:
      return "the same parameter finite in the checkpoint and after the update of the step before";
    case Cause::bad_buffer:
      return "the buffer finite at the end of the step before: then something wrote it in between";
    case Cause::bad_input:
      return "the same samples finite when they are read again: then they were damaged on the way";
    case Cause::empty_loss_mask:
      return "the same batch with a finite loss in a repeat, or a valid label in it";
    case Cause::operator_overflow:
      return "the call executed from its bundle stays finite, or is not finite in float64 either";
    case Cause::operator_undefined:
      return "the call executed from its bundle in float64 comes out finite";
    case Cause::operator_bug:
      return "the call on the same inputs not finite in another implementation, or in float64";
    case Cause::memory_corruption:
      return "a kernel off the dispatcher that writes to this memory, or the same bad element in a "
             "repeat of the step";
    case Cause::not_reproduced:
      return "the same element bad in a further repeat with the same data, weights and random "
             "numbers: then it is not the machine";
    case Cause::collective_result:
      return "a member's part that was not finite when the collective read it: it was written "
             "between the look and the transfer";
    case Cause::collective_sum:
      return "the sum of the members' parts finite in float64 and within the range of the dtype: "
             "then the collective is at fault";
    case Cause::pipeline_transfer:
      return "the sender's buffer changed between the look and the transfer (freed or written too "
             "early): then the program is at fault, not the link";
    case Cause::recompute_mismatch:
      return "the first forward not finite at the same place";
    case Cause::optimizer_update:
      return "a state of the optimizer (a second moment, a master weight) bad before the step";
    case Cause::optimizer_state:
      return "the same state finite at the end of the step before: then something wrote it since";
    case Cause::divergence:
      return "the maxima of the steps before not growing when the run is repeated from the last "
             "checkpoint";
    case Cause::user_hook:
      return "the gradient bad before the hook ran";
    case Cause::loss_scale:
      return "the same overflow again at the smallest loss scale";
    case Cause::unknown:
      return refutation_of_unknown(origin);
  }
  return {};
}

}  // namespace nanlocator
