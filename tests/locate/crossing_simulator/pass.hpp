// A pipelined training step in which only one thing is computed: which tokens are NaN on which
// rank, and what of it crosses from rank to rank.
//
// It plants faults, lets them flow through the microbatches of a tp x pp (x chunks) x dp x ep job
// as a transformer's operators do, in a random order that pipeline dependencies allow, and writes
// what an observer of the crossings and of the gradients would have seen. It knows nothing of the
// rules in src/locate: its truth is what it planted. tests/locate/recorded holds it to what
// Megatron-Core's own steps left in their ledgers.
//
// fault -> strikes -> replica (forward and backward on tokens, by way of exchange) -> reduction;
// what observer and births write of it goes into the ledgers here.
#pragma once

#include <cstdint>
#include <vector>

#include "locate/crossing_simulator/fault.hpp"
#include "locate/crossing_simulator/observer.hpp"
#include "locate/crossing_simulator/parameters.hpp"
#include "locate/crossing_simulator/reduction.hpp"
#include "locate/crossing_simulator/strikes.hpp"
#include "locate/simulated_job.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

/// One pass over forward and backward, and the step to its end.
///
/// Until the data-parallel reduction a replica computes alone, so that only replicas with a fault
/// are simulated, and the first one: what the others scanned, and found finite, is a copy of its.
class Pass {
 public:
  /// `seed`: of the order in which stages run. Throws std::invalid_argument where a replica has
  /// more than 64 (tp, ep) ranks.
  Pass(const Layout& layout, std::vector<Fault> faults, unsigned seed);

  [[nodiscard]] bool has_bad_loss_or_gradient() const;
  /// Something bad went to or came from another rank, or into a loss, in forward or backward.
  [[nodiscard]] bool has_crossed(int rank) const { return observer_.has_crossed(rank); }
  /// Whether the fault did what it was planted for (an expert's may have met no token).
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
  /// What a trace of this pass would tell: each operator's birth, and on other ranks receipts.
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

/// The ledgers of a step that was repeated with its operators traced: only repeated faults are in
/// the second pass.
[[nodiscard]] std::vector<Ledger> ledgers_with_repeat(const Layout& layout,
                                                      const std::vector<Fault>& faults,
                                                      unsigned seed);

}  // namespace nanlocator::pipeline
