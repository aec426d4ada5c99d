// Simulates a pipelined training step by computing only which tokens are NaN on which rank, and
// which of them cross between ranks.
//
// It plants faults and propagates them through the microbatches of a tp x pp (x chunks) x dp x ep
// job as a transformer's operators would, in a random order that pipeline dependencies allow. Then
// it writes what observers of the crossings and of the gradients would have seen. It does not use
// the rules in src/locate: the truth is what it planted. tests/locate/recorded compares it with
// ledgers of real Megatron-Core steps.
//
// fault -> strikes -> replica (forward and backward on tokens, through exchange) -> reduction; the
// records of observer and births go into the ledgers here.
#pragma once

#include <cstdint>
#include <vector>

#include "incident/simulated_job.hpp"
#include "locate/crossing_simulator/fault.hpp"
#include "locate/crossing_simulator/observer.hpp"
#include "locate/crossing_simulator/parameters.hpp"
#include "locate/crossing_simulator/reduction.hpp"
#include "locate/crossing_simulator/strikes.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

/// One pass of forward and backward, and the rest of the step.
///
/// Until the data-parallel reduction replicas compute independently, so only the first one and
/// those with a fault are simulated. The others scanned the same as the first one, and found it
/// finite.
class Pass {
 public:
  /// `seed` sets the order in which stages run. Throws std::invalid_argument if a replica has more
  /// than 64 (tp, ep) ranks.
  Pass(const Layout& layout, std::vector<Fault> faults, unsigned seed);

  [[nodiscard]] bool has_bad_loss_or_gradient() const;
  /// True if something bad was sent to or received from another rank, or reached a loss, in forward
  /// or backward.
  [[nodiscard]] bool has_crossed(int rank) const { return observer_.has_crossed(rank); }
  /// True if the fault had an effect (an expert's may have met no token).
  [[nodiscard]] bool has_struck(const Fault& fault) const {
    return fault.plant >= Plant::gradient || strikes_.have_come_of(fault);
  }
  /// Gradients after backward.
  [[nodiscard]] const simulator::BadParameters& bad_on(int rank) const {
    return simulator::found_or_empty(gradients_.local, rank);
  }
  [[nodiscard]] std::vector<std::int64_t> bad_ids_on(int rank) const;

  [[nodiscard]] std::vector<Ledger> ledgers() const;
  [[nodiscard]] Ledger ledger_of(int rank) const;
  /// The births that a trace of this pass would record: one per operator, and receipts on other
  /// ranks.
  [[nodiscard]] std::vector<Birth> births_on(int rank) const;

 private:
  [[nodiscard]] const std::vector<ParameterRecord>& order_on(int rank) const;
  /// Before the step, and after the optimizer's update.
  [[nodiscard]] simulator::BadParameters bad_weights(const RankCoordinates& at) const;
  [[nodiscard]] simulator::BadParameters bad_updates(const RankCoordinates& at) const;
  void tell_norm(Ledger& ledger) const;
  void mark_overflow(Ledger& ledger) const;

  Layout layout_;
  std::vector<Fault> faults_;
  BackwardOrders orders_;
  Strikes strikes_;
  Observer observer_;
  BadGradients gradients_;
};

/// The ledgers of a step that was re-run with its operators traced; the second pass has only the
/// repeated faults.
[[nodiscard]] std::vector<Ledger> ledgers_with_repeat(const Layout& layout,
                                                      const std::vector<Fault>& faults,
                                                      unsigned seed);

}  // namespace nanlocator::pipeline
