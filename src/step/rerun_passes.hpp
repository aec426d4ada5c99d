// Passes of a re-run: each restores the start of a step, executes its forward and backward again
// and scans what it left. Which passes a bad step gets is in rerun_experiments.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/gradients/gradient_scanner.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/step/framework.hpp"
#include "nanlocator/step/gradient_locator.hpp"
#include "nanlocator/step/step_state.hpp"
#include "nanlocator/watch/boundary_watch.hpp"

namespace nanlocator::inline step_room {

/// Of a re-run's scans.
constexpr std::uint64_t kOnlyGroup = 0;

/// What one execution of the step left.
struct Pass {
  std::vector<NamedTensor> losses;
  std::vector<GradientScanner::Scanned> scanned;
  std::vector<std::int64_t> bad_parameters;  // with bad local gradients
  bool is_bad = false;
  bool has_first_positions = false;  // its positions mean the same places as the first pass's
  std::string problem;               // error that ended it early
  std::exception_ptr error;          // the same
  bool is_failure_own = false;       // not caused by a peer's end
};

/// A pass under its own operator trace.
struct TracedPass {
  Pass pass;
  std::optional<Explanation> explanation;  // if it was bad
  std::vector<UnorderedAccess> unordered;
  bool has_overlap = false;            // operators ran during transfers between ranks
  std::vector<Concurrent> concurrent;  // with bad tensors of the first pass
  std::vector<ThreadOrder> thread_orders;
};

/// Number of gradients in `second` whose bits differ from those in `first`.
[[nodiscard]] std::int64_t count_changed(const std::vector<GradientScanner::Scanned>& first,
                                         const std::vector<GradientScanner::Scanned>& second);

/// True if the norms of two re-runs' gradients differ by more than what kernels that add up in any
/// order make of it: the program did not compute the same.
[[nodiscard]] bool have_other_norms(const std::vector<GradientScanner::Scanned>& first,
                                    const std::vector<GradientScanner::Scanned>& second);

/// A step that can be executed again, and what its passes are scanned into. Training thread.
class RerunPasses {
 public:
  /// `locator` must outlive it.
  explicit RerunPasses(GradientLocator& locator_);
  ~RerunPasses();
  RerunPasses(const RerunPasses&) = delete;  // one step has one owner
  RerunPasses& operator=(const RerunPasses&) = delete;

  using ForwardBackward = std::function<std::vector<NamedTensor>(StepPass&)>;
  /// Executes the step again from its start, then calls `then` unless it has ended early. Does
  /// not throw errors of the step or of a device.
  Pass run(const ForwardBackward& forward_backward,
           const std::function<void(const Pass&)>& then = {});
  /// One pass under its own trace, explained. `fresh_memory`: as in TraceOptions.
  TracedPass run_traced(std::optional<double> fresh_memory = {});
  /// True on all ranks if the pass ended early on one. Then the gradients have been cleared, as
  /// those of an incomplete pass must not be used.
  bool has_ended_early(const Pass& pass);

  /// Null, with a note, if another optimizer of this process traces all its steps.
  std::unique_ptr<OperatorTrace> make_trace(TraceOptions options = {});
  void trace_from_now_on();
  void stop_tracing() noexcept;

  [[nodiscard]] std::vector<NamedTensor> named(const std::vector<GradientView>& views) const;

  GradientLocator& locator;
  int threads;
  std::shared_ptr<Framework> framework;
  std::shared_ptr<StepPass> step;             // the pass to execute again
  std::shared_ptr<BoundaryWatch> boundaries;  // for its crossings; may be null
  StepState state;
  std::vector<GradientScanner::Scanned> first_pass;  // gradients of the step itself

  // Of the latest pass.
  std::unique_ptr<GradientScanner> scanner;  // while it runs
  std::set<Phase> scanned_by_owner;
  bool are_gradients_changed = false;  // since they were scanned
  std::optional<double> gradient_norm;
  std::vector<std::string> not_restored;
  std::exception_ptr own_error;  // ended it on this rank, and no peer's failure caused it

  // Traces steps that cannot be executed again.
  std::unique_ptr<OperatorTrace> standing;
  int traced_steps = 0;  // number since it began

 private:
  void scan_results(Pass& pass);
  [[nodiscard]] std::vector<std::int64_t> bad_local_gradients();
  [[nodiscard]] std::string changed_data() const;
  [[nodiscard]] std::string changed_data_after_failure() const noexcept;
  void clear_gradients();
};

}  // namespace nanlocator::inline step_room
