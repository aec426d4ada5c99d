#include "locate/step_rules.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "locate/origin_text.hpp"

namespace nanlocator {
namespace {

class StepRules {
 public:
  explicit StepRules(Findings& findings) : findings_(findings) {}

  void judge_weights() {
    for (const auto& [key, bad] :
         findings_.in_backward_order(findings_.bad(Phase::params_before))) {
      if (findings_.is_full(Phase::params_before)) continue;
      const std::set<int> ranks = ranks_of(*bad);
      const std::set<int> blind = findings_.blind_holders(*key, Phase::params_before);
      const std::set<int> owners = owners_of(*bad);
      std::set<int> candidates = owners.empty() ? ranks : owners;
      candidates.insert(blind.begin(), blind.end());
      std::set<int> clean;
      for (const Place* place : findings_.holders_of(*key)) {
        if (place->evidence == nullptr) continue;
        if (place->evidence->status(Phase::params_before, bad->front().bad->name) ==
            Status::clean) {
          clean.insert(place->rank);
        }
      }
      Origin origin = findings_.make_origin(Phase::params_before, Cause::bad_weight,
                                            blind.empty() && candidates.size() >= ranks.size()
                                                ? Confidence::high
                                                : Confidence::medium,
                                            sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      origin.evidence.push_back("the parameter held " +
                                describe_bad(bad->front().bad->sighting->stats) + " on " +
                                describe_rank_count(ranks) + " before this step's forward");
      add_gathered_evidence(origin, owners, ranks);
      if (candidates.size() < ranks.size()) {
        origin.evidence.push_back("left are the memory of " + describe_rank_count(owners) +
                                  ", its update in the step before, and the checkpoint");
        origin.action = "check the memory of " + describe_rank_count(owners) +
                        ", its optimizer's state, and the checkpoint that was loaded";
      } else if (clean.empty()) {
        origin.evidence.push_back(
            ranks.size() > 1
                ? "every rank that holds it and looked has it: it came from the checkpoint or from "
                  "the step before, not from a fault of one device"
                : "no other rank that looked holds a copy");
        origin.action =
            "check the checkpoint that was loaded, and the optimizer step before this one";
      } else {
        origin.evidence.push_back(
            "the copies on " + describe_rank_count(clean) +
            " are clean: only this copy was damaged, after the last update or "
            "in its parameter all-gather");
        origin.action = "check the memory and the links of " + describe_rank_count(ranks) +
                        "; restore the parameter from a clean copy or a checkpoint";
      }
      add_blind_evidence(origin, blind);
      findings_.add_origin(std::move(origin), FoundIn::weight);
    }
  }

  void judge_updates() {
    if (findings_.bad(Phase::params_after).empty() || findings_.is_any_gradient_bad()) return;
    if (rank_with_bad_norm() != nullptr) return;  // the norm explains it; judge_norm_value names it
    const std::set<int> unseen = ranks_without_gradients();
    for (const auto& [key, bad] : findings_.in_backward_order(findings_.bad(Phase::params_after))) {
      if (findings_.is_full(Phase::params_after)) continue;
      const std::set<int> ranks = ranks_of(*bad);
      const std::set<int> owners = owners_of(*bad);
      std::set<int> candidates = owners.empty() ? ranks : owners;
      candidates.insert(unseen.begin(), unseen.end());
      Origin origin = findings_.make_origin(
          Phase::params_after, unseen.empty() ? Cause::optimizer_update : Cause::unknown,
          unseen.empty() ? Confidence::high : Confidence::low, sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      origin.evidence.push_back(describe_bad(bad->front().bad->sighting->stats) +
                                " in the parameter after the optimizer step on " +
                                describe_rank_count(ranks) +
                                ", though every gradient that was seen is finite");
      if (!unseen.empty()) {
        origin.evidence.push_back("the gradients of " + describe_rank_count(unseen) +
                                  " were not seen: theirs may have been bad");
      }
      add_gathered_evidence(origin, owners, ranks);
      origin.evidence.push_back(
          owners.empty() ? "left are the update itself, the optimizer's state, and the all-gather "
                           "of updated parameters (distributed optimizer)"
                         : "left are the update itself and the optimizer's state");
      origin.action = "look at the optimizer's state of this parameter (second moment, epsilon)";
      findings_.add_origin(std::move(origin));
    }
  }

  void judge_norm_value() {
    const RankEvidence* const witness = rank_with_bad_norm();
    if (witness == nullptr || findings_.is_any_gradient_bad()) return;
    double largest = -1;
    std::set<int> ranks;
    std::string parameter;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const auto& absmax = rank.ledger().absmax;
      if (!absmax || !std::isfinite(*absmax) || *absmax < largest) continue;
      if (*absmax > largest) {
        ranks.clear();
        parameter = rank.ledger().absmax_parameter;
      }
      largest = *absmax;
      ranks.insert(rank.rank());
    }
    std::set<int> candidates = ranks;
    const std::set<int> unseen = ranks_without_gradients();
    candidates.insert(unseen.begin(), unseen.end());
    // The square of one fp32 number above sqrt(FLT_MAX) = 1.8e19 overflows; with many elements
    // smaller ones do, but not below 1e15: FLT_MAX / 1e30 is 3e8 elements of that size.
    const bool can_overflow = largest > 1e15;
    Origin origin = findings_.make_origin(Phase::grad_norm, Cause::unknown, Confidence::low,
                                          sorted(candidates));
    origin.direction = Direction::none;
    if (largest >= 0) origin.parameter = parameter;
    origin.evidence.push_back(
        "the framework's gradient norm is " +
        std::string(std::isnan(*witness->ledger().gradient_norm) ? "NaN" : "Inf") +
        ", though every gradient that was seen is finite");
    if (can_overflow) {
      origin.evidence.push_back("the largest gradient is " + short_number(largest) +
                                ": the sum of squares overflows fp32 (sqrt of its largest number: "
                                "1.8e19)");
      if (!has_history(candidates)) {
        origin.evidence.push_back(
            "missing for the cause: the history of this maximum over the steps before");
      }
    } else if (largest >= 0) {
      origin.evidence.push_back("the largest gradient is " + short_number(largest) +
                                ", too small for its square to overflow: the norm's own reduction, "
                                "or a gradient that was not scanned");
    } else {
      origin.evidence.push_back("missing for the cause: no rank reported its largest gradient");
    }
    if (!unseen.empty()) {
      origin.evidence.push_back("the gradients of " + describe_rank_count(unseen) +
                                " were not seen: theirs may be bad");
    }
    origin.action =
        "look at the history of the gradient norm; lower the learning rate or check this layer's "
        "scale";
    findings_.add_origin(std::move(origin));
  }

  /// A loss that is bad though no gradient is: zero times NaN on a masked token, a mean over no
  /// labels, whose derivative autograd takes as zero.
  void judge_losses() {
    if (findings_.is_any_gradient_bad() || !findings_.found().empty()) return;
    std::set<int> ranks;
    const Sighting* first = nullptr;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      for (const Sighting& sighting : rank.ledger().sightings) {
        if (sighting.phase != Phase::loss || sighting.crossing || sighting.stats.is_finite()) {
          continue;
        }
        ranks.insert(rank.rank());
        if (first == nullptr) first = &sighting;
      }
    }
    if (first == nullptr) return;
    Origin origin =
        findings_.make_origin(Phase::loss, Cause::unknown, Confidence::medium, sorted(ranks));
    origin.direction = Direction::forward;
    origin.tensor = tensor_of(*first);
    origin.evidence.push_back("the loss holds " + describe_bad(first->stats) + " on " +
                              describe_rank_count(ranks) +
                              ", though every gradient that was seen is finite");
    origin.action = "look at the labels and the mask of this batch, and at the loss's reduction";
    findings_.add_origin(std::move(origin));
  }

 private:
  bool has_history(const std::set<int>& ranks) const {
    return std::ranges::any_of(ranks, [&](int rank) {
      const RankEvidence* const evidence = findings_.incident().find(rank);
      return evidence != nullptr && evidence->ledger().history;
    });
  }

  const RankEvidence* rank_with_bad_norm() const {
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const auto& norm = rank.ledger().gradient_norm;
      if (norm && !std::isfinite(*norm)) return &rank;
    }
    return nullptr;
  }

  /// Ranks whose gradients were not seen at any phase: theirs may have been bad, and through the
  /// norm every rank's parameters would be.
  std::set<int> ranks_without_gradients() const {
    std::set<int> ranks(findings_.incident().silent().begin(), findings_.incident().silent().end());
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (!rank.looked_at(Phase::grad_local) && !rank.looked_at(Phase::grad_reduced) &&
          !rank.looked_at(Phase::grad_norm)) {
        ranks.insert(rank.rank());
      }
    }
    return ranks;
  }

  Findings& findings_;
};

}  // namespace

void judge_weights(Findings& findings) {
  StepRules(findings).judge_weights();
}

void judge_updated_parameters(Findings& findings) {
  StepRules(findings).judge_updates();
}

void judge_norm_value(Findings& findings) {
  StepRules(findings).judge_norm_value();
}

void judge_losses(Findings& findings) {
  StepRules(findings).judge_losses();
}

}  // namespace nanlocator
