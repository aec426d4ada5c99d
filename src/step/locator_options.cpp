#include "step/gradient_locator_impl.hpp"

namespace nanlocator::inline step_room {

void check_options(const LocatorOptions& options) {
  if (options.gather_deadline.count() <= 0) {
    throw UsageError("gather_deadline is " + std::to_string(options.gather_deadline.count()) +
                     " ms; it must be positive.");
  }
  if (options.threads < 1) {
    throw UsageError("threads is " + std::to_string(options.threads) + "; it must be at least 1.");
  }
  if (options.max_incidents < 1) {
    throw UsageError("max_incidents is " + std::to_string(options.max_incidents) +
                     "; it must be at least 1.");
  }
}

std::string_view outcome_of(Policy policy, const RerunOutcome& rerun) noexcept {
  switch (policy) {
    case Policy::report:
      return "reported";
    case Policy::skip:
      return "skipped";
    case Policy::recover:
      return rerun.reproduced == false ? "recovered" : kStopped;
    case Policy::stop:
      break;
  }
  return kStopped;
}

}  // namespace nanlocator::inline step_room
