// Births of the re-run among the sources of the first pass. Edges: from a birth to the sources that
// it may have made bad, which it then replaces; and to a birth that came out of an exchange, or out
// of a call that the trace could not follow, from a source before it.
#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/events/events.hpp"
#include "locate/origin_facts.hpp"
#include "locate/rerun_facts.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline locate_room::events {
namespace {

/// Limit on the facts that a birth takes from the sources that it explains.
constexpr std::ptrdiff_t kMostAdopted = 2;

template <typename Set>
bool have_common(const std::vector<int>& ranks, const Set& others) {
  return std::ranges::any_of(
      ranks, [&](int rank) { return std::ranges::find(others, rank) != std::ranges::end(others); });
}

bool may_be_same(const std::set<int>& microbatches, const std::set<int>& others) {
  return microbatches.empty() || others.empty() ||
         std::ranges::any_of(microbatches, [&](int each) { return others.contains(each); });
}

bool is_weight(const Source& source) {
  return source.site == Site::weight;
}

/// What a rank computed, and no unknown event made.
bool is_computed(const Source& source) {
  return source.site == Site::computed && !source.is_open;
}

class Refinement {
 public:
  Refinement(const Incident& incident, std::vector<Source> sources, std::vector<Born> births,
             const RerunOutcome& rerun)
      : incident_(incident),
        sources_(std::move(sources)),
        births_(std::move(births)),
        rerun_(rerun) {}

  std::vector<Origin> run() {
    std::erase_if(births_, [&](Born& each) { return each.is_receipt && is_sent(each); });
    std::erase_if(births_, [&](Born& each) { return each.is_opaque && is_receipt(each); });
    for (Born& each : births_) adopt_neighbours(each.origin);
    const Facts facts = facts_of_rerun(incident_, rerun_);
    std::vector<Origin> left;
    for (Source& source : sources_) {
      const auto birth =
          std::ranges::find_if(births_, [&](const Born& each) { return may_make(each, source); });
      if (birth != births_.end()) {
        adopt(*birth, source);
      } else if (!is_unused(source)) {
        add_rerun(source, facts);
        left.push_back(std::move(source.origin));
      }
    }
    std::vector<Origin> origins;
    for (Born& each : births_) {
      if (is_of_first_pass(each) && is_from_member(each.origin, left)) continue;
      Origin& origin = each.origin;
      if (!is_of_first_pass(each)) {
        origin.facts.insert(origin.facts.end(), facts.begin(), facts.end());
      }
      // What a call gives again on the inputs of the first pass, and what was there before it, is
      // no fault that was gone.
      const bool was_there = origin.cause == Cause::bad_input ||
                             origin.cause == Cause::bad_buffer ||
                             origin.cause == Cause::bad_scalar || origin.cause == Cause::bad_weight;
      const bool is_proven = each.is_first && (was_there || gives_it_again(origin));
      if (rerun_.reproduced == false && !is_proven) mark_as_gone(origin);
      origins.push_back(std::move(origin));
    }
    std::ranges::move(left, std::back_inserter(origins));
    clear_devices(origins);
    std::ranges::stable_sort(origins, {}, &Origin::phase);
    return origins;
  }

 private:
  /// Replicas that were bad at once, each by itself and at the same place, share code and no
  /// device.
  void clear_devices(std::vector<Origin>& origins) const {
    const auto place_of = [](const Origin& each) {
      return std::tuple(each.phase, each.module, each.op, each.parameter);
    };
    const auto is_gone = [](const Origin& each) {
      return each.cause == Cause::not_reproduced && !each.candidates.empty();
    };
    std::map<decltype(place_of(origins.front())), std::set<int>> replicas_at;
    for (const Origin& each : origins) {
      const auto replicas = replicas_of(each.candidates);
      if (is_gone(each) && replicas.size() == 1) {
        replicas_at[place_of(each)].insert(*replicas.begin());
      }
    }
    for (Origin& each : origins) {
      if (is_gone(each) && replicas_at[place_of(each)].size() > 1) each.cause = Cause::unknown;
    }
  }

  std::set<int> replicas_of(const std::vector<int>& ranks) const {
    std::set<int> replicas;
    for (const int rank : ranks) {
      if (const Place* place = incident_.place_of(rank)) {
        replicas.insert(incident_.replica_of(*place));
      }
    }
    return replicas;
  }

  // ---- what a collective brought in the first pass, and the re-run took again ----

  static bool is_of_first_pass(const Born& each) {
    return each.is_receipt && each.origin.cause == Cause::unknown;
  }

  /// True if another member was bad in the first pass, whether or not it was again.
  static bool is_from_member(const Origin& receipt, const std::vector<Origin>& left) {
    const auto& members = receipt.facts.front().peers;
    return std::ranges::any_of(left, [&](const Origin& other) {
      return std::ranges::any_of(other.candidates, [&](int rank) {
        return std::ranges::count(receipt.candidates, rank) == 0 &&
               (members.empty() || std::ranges::count(members, rank) > 0);
      });
    });
  }

  // ---- from a source to a birth ----

  /// What came out of a collective, if a source shows the collective that made it of finite parts,
  /// or the weight that was gathered.
  bool is_sent(const Born& each) const {
    return std::ranges::any_of(sources_, [&](const Source& source) {
      const bool is_of_collective = source.origin.cause == Cause::collective_result ||
                                    source.origin.cause == Cause::collective_sum;
      return is_weight(source) ||
             (is_of_collective && have_common(each.origin.candidates, source.origin.candidates));
    });
  }

  /// A call that the trace could not follow made it, of an input that the trace did not see: if a
  /// weight of its module was bad, or if one of its ranks had something bad before, in what it sent
  /// or from another rank. Ranks make one call at one time, so what is a receipt on one of them is
  /// none's birth.
  bool is_receipt(const Born& each) const {
    const Origin& born = each.origin;
    std::set<int> makers;
    for (const Source& source : sources_) {
      if (is_weight(source) && is_weight_of(source.origin, born)) return true;
      const bool may_be_it = is_computed(source) && born.direction == source.origin.direction &&
                             may_be_same(each.microbatches, source.microbatches) &&
                             have_common(born.candidates, source.origin.candidates);
      if (!may_be_it) continue;
      for (const int rank : source.origin.candidates) {
        if (is_after(each, rank, source).value_or(true)) return true;
        makers.insert(rank);
      }
    }
    return !makers.empty() && !std::ranges::includes(makers, born.candidates);
  }

  /// A gather for several modules has the weights of all of them.
  static bool is_weight_of(const Origin& weight, const Origin& born) {
    const bool is_gathered = std::ranges::any_of(born.facts, [](const Fact& fact) {
      return fact.kind == FactKind::allocated_not_written &&
             collective_kind_of(fact.op) == CollectiveKind::all_gather;
    });
    return (is_gathered ||
            (!born.module.empty() && weight.parameter.starts_with(born.module + "."))) &&
           have_common(born.candidates, weight.candidates);
  }

  /// Whether the rank issued a crossing between the source and the birth, where both positions are
  /// known.
  static std::optional<bool> is_after(const Born& birth, int rank, const Source& source) {
    const auto position = birth.positions.find(rank);
    if (!source.position || position == birth.positions.end()) return std::nullopt;
    return position->second > *source.position;
  }

  /// A weight that was bad, and that nothing which the re-run traced has read: a row of an
  /// embedding that no token selects, a frozen mask. The step is bad for another reason.
  bool is_unused(const Source& source) const {
    if (!is_weight(source) || rerun_.reproduced != true) return false;
    const auto may_have_read = [](const Born& each) {
      return each.is_opaque || each.is_receipt || each.origin.cause == Cause::bad_weight;
    };
    return std::ranges::none_of(births_, may_have_read) &&
           std::ranges::all_of(source.origin.candidates, [&](int rank) {
             return std::ranges::any_of(births_, [&](const Born& each) {
               return std::ranges::count(each.origin.candidates, rank) > 0;
             });
           });
  }

  // ---- from a birth to a source ----

  /// True if the birth lies between the last finite and the first bad event, on a rank where
  /// unknown events do, too.
  bool may_make(const Born& each, const Source& source) const {
    const Origin &born = each.origin, &seen = source.origin;
    const bool is_of_weight = born.cause == Cause::bad_weight;
    if (is_weight(source)) {
      return is_of_weight && (have_common(born.candidates, seen.candidates) ||
                              is_held_by(seen, born.parameter, born.candidates));
    }
    if (!source.since) return false;
    if (source.site == Site::gradient && is_bad_again(source) == false) return false;
    const Part part = part_of(born.phase);
    const bool is_in_time = *source.since <= part && part <= last_part_before(source) &&
                            may_be_same(each.microbatches, source.microbatches);
    // A weight may be read in any microbatch; a hook may run after the gradient was scanned.
    const bool may_be_between = (is_of_weight && *source.since == Part::forward) ||
                                (each.is_in_hook && seen.phase == Phase::grad_reduced);
    if (!is_in_time && !may_be_between) return false;
    if (is_computed(source)) {
      return std::ranges::any_of(born.candidates, [&](int rank) {
        return std::ranges::count(seen.candidates, rank) > 0 &&
               !is_after(each, rank, source).value_or(false);
      });
    }
    if (have_common(born.candidates, seen.candidates)) return true;
    // Within a replica, it may have come by ways that nobody scanned.
    if (!source.is_open && seen.phase != Phase::grad_local) return false;
    return is_in_replica_of(each, source);
  }

  /// Without a rank to reduce with, gradients are scanned where they are used: after what the
  /// program does with them.
  Part last_part_before(const Source& source) const {
    const Origin& seen = source.origin;
    const bool is_reduced = std::ranges::any_of(seen.candidates, [&](int rank) {
      const RankEvidence* const evidence = incident_.find(rank);
      if (evidence == nullptr) return true;
      const auto& at = evidence->coordinates();
      return at.dp.size * at.cp.size > 1;
    });
    return seen.phase == Phase::grad_local && !is_reduced ? Part::late : part_of(seen.phase);
  }

  /// True if the weight is `parameter`, and these ranks have the bad elements from others, or may
  /// have.
  static bool is_held_by(const Origin& weight, const std::string& parameter,
                         const std::vector<int>& ranks) {
    if (weight.parameter != parameter) return false;
    std::set<int> holders(weight.candidates.begin(), weight.candidates.end());
    for (const Fact& fact : weight.facts) {
      if (fact.kind == FactKind::parameter_bad_before || fact.kind == FactKind::silent_here) {
        holders.insert(fact.ranks.begin(), fact.ranks.end());
      } else if (fact.kind == FactKind::gathered_from_owner) {
        holders.insert(fact.peers.begin(), fact.peers.end());
      }
    }
    return std::ranges::includes(holders, ranks);
  }

  bool is_in_replica_of(const Born& each, const Source& source) const {
    return std::ranges::any_of(replicas_of(source.origin.candidates),
                               [&](int replica) { return each.replicas.contains(replica); });
  }

  /// Only the first pass shows the finite parameters around a fault, and the first gradient that it
  /// made bad.
  void adopt_neighbours(Origin& born) const {
    for (const Source& source : sources_) {
      const Origin& seen = source.origin;
      if (!std::ranges::binary_search(seen.candidates, born.candidates.front())) continue;
      const std::string& first =
          seen.parameter.empty() ? source.first_bad_gradient : seen.parameter;
      if (first.empty() && seen.clean_before.empty() && seen.clean_after.empty()) continue;
      if (born.parameter.empty() && born.direction != Direction::forward) born.parameter = first;
      born.clean_before = seen.clean_before;
      born.clean_after = seen.clean_after;
      return;
    }
  }

  static void adopt(Born& each, const Source& source) {
    Origin& born = each.origin;
    const Origin& seen = source.origin;
    // The trace sees zero over zero; only the loss shows that no label was counted.
    const bool is_quotient = born.phase == Phase::loss || born.op.starts_with("aten::div");
    const bool is_undefined =
        born.cause == Cause::unknown || born.cause == Cause::operator_undefined;
    if (seen.cause == Cause::empty_loss_mask && is_quotient && is_undefined)
      born.cause = seen.cause;
    if (is_weight(source)) adopt_copies(born, seen);
    const auto adopted = std::ranges::count(born.facts, FactSource::first_pass, &Fact::source);
    if (!is_computed(source) || adopted == kMostAdopted) return;
    born.facts.push_back(seen.facts.front());
    born.facts.back().source = FactSource::first_pass;
  }

  /// The scan of all parameters shows other copies of a weight, and which rank updates its bad
  /// elements.
  static void adopt_copies(Origin& born, const Origin& seen) {
    if (born.parameter != seen.parameter) return;
    if (seen.tensor && born.tensor && born.tensor->shape != seen.tensor->shape) {
      born.tensor = seen.tensor;
    }
    if (has_fact(seen.facts, FactKind::owner_is_left)) {
      born.candidates = seen.candidates;
      born.coordinates = seen.coordinates;
      born.is_on_every_candidate = seen.is_on_every_candidate;
      born.data_parallel_replica = seen.data_parallel_replica;
      std::erase_if(born.facts, [](const Fact& fact) {
        return fact.kind == FactKind::same_on_ranks || fact.kind == FactKind::every_copy_bad;
      });
    }
    if (has_fact(seen.facts, FactKind::silent_here)) {  // it may have come from one of these
      born.candidates = seen.candidates;
      born.coordinates.reset();
      born.place_confidence = std::min(born.place_confidence, seen.place_confidence);
    }
    for (const Fact& fact : seen.facts) {
      const bool is_of_copies =
          fact.kind == FactKind::copies_clean || fact.kind == FactKind::every_copy_bad ||
          fact.kind == FactKind::no_copy_elsewhere || fact.kind == FactKind::gathered_from_owner ||
          fact.kind == FactKind::owner_is_left || fact.kind == FactKind::silent_here;
      if (is_of_copies && !has_fact(born.facts, fact.kind)) born.facts.push_back(fact);
    }
  }

  // ---- sources that no birth explains: was it there again? ----

  const Rerun* finished_rerun_of(int rank) const {
    const RankEvidence* const evidence = incident_.find(rank);
    if (evidence == nullptr || !evidence->ledger().is_complete) return nullptr;
    const auto& rerun = evidence->ledger().rerun;
    return rerun && rerun->reproduced ? &*rerun : nullptr;
  }

  /// Whether the gradient, or any gradient of the candidates, was bad in the re-run; empty if a
  /// candidate cannot say, or had no bad one in the first pass either.
  std::optional<bool> is_bad_again(const Source& source) const {
    const Origin& seen = source.origin;
    const bool had_bad = std::ranges::any_of(seen.candidates, [&](int rank) {
      const RankEvidence* const evidence = incident_.find(rank);
      return evidence != nullptr && !evidence->bad(Phase::grad_local).empty();
    });
    if (seen.phase > Phase::grad_local || !had_bad) return std::nullopt;
    for (const int rank : seen.candidates) {
      const Rerun* const rerun = finished_rerun_of(rank);
      if (rerun == nullptr) return std::nullopt;
      if (source.site != Site::gradient) {
        if (!rerun->bad_parameters.empty()) return true;
        continue;
      }
      const RankEvidence& evidence = *incident_.find(rank);
      const auto position = evidence.position_of(std::string_view(seen.parameter));
      if (!position) return std::nullopt;
      const std::int64_t id = evidence.parameter(*position).id;
      if (std::ranges::count(rerun->bad_parameters, id) > 0) return true;
    }
    return false;
  }

  /// The call alone, executed again on its recorded inputs.
  static bool gives_it_again(const Origin& origin) {
    const Fact* const replayed = find_fact(origin.facts, FactKind::replayed);
    return replayed != nullptr && replayed->conclusion.starts_with("deterministic");
  }

  bool is_gone(const Source& source) const {
    if (rerun_.reproduced != true) return rerun_.reproduced == false;
    if (source.is_open) return false;
    switch (source.site) {
      case Site::flow:
      case Site::gradient:
        return is_bad_again(source) == false;
      case Site::computed:
      case Site::received: {
        const bool has_finished = std::ranges::all_of(
            source.origin.candidates, [&](int rank) { return finished_rerun_of(rank) != nullptr; });
        if (!has_finished) return false;
        if (is_bad_again(source) == false) return true;
        // A birth in the replica made the gradients bad again: they say nothing about this.
        return std::ranges::any_of(
            births_, [&](const Born& each) { return is_in_replica_of(each, source); });
      }
      default:
        return false;
    }
  }

  void add_rerun(Source& source, const Facts& facts) const {
    Origin& origin = source.origin;
    const bool gone = is_gone(source);
    if (gone && rerun_.reproduced == true) {
      origin.facts.push_back({.kind = FactKind::gone_in_rerun});
    } else {
      origin.facts.insert(origin.facts.end(), facts.begin(), facts.end());
    }
    if (gone) {
      mark_as_gone(origin);
      if (source.site != Site::flow || has_fact(origin.facts, FactKind::weights_gathered_unseen))
        return;
      // A fault in a gather of weights is in everything computed from them.
      auto gathered = weights_gathered_unseen(incident_, origin.candidates);
      if (gathered) origin.facts.push_back(*std::move(gathered));
      return;
    }
    const bool is_transfer = (source.site == Site::received && !source.is_open) ||
                             origin.cause == Cause::collective_result ||
                             origin.cause == Cause::collective_sum;
    if (!is_transfer || !rerun_.reproduced) return;
    // The re-run ends with backward.
    if (origin.phase > Phase::backward) {
      origin.facts.push_back({.kind = FactKind::transfer_not_run_again});
    } else if (is_bad_again(source) == true) {
      origin.facts.push_back({.kind = FactKind::transfer_bad_again});
    }
  }

  void mark_as_gone(Origin& origin) const {
    // Finite when sent and bad on arrival is known without a re-run, and so is a sum that it does
    // not compute again.
    const bool is_witnessed =
        origin.cause == Cause::pipeline_transfer || origin.cause == Cause::collective_result ||
        (origin.cause == Cause::collective_sum && origin.phase > Phase::backward);
    if (!is_witnessed) {
      // A different outcome from a different state is no evidence against a machine; a call that
      // is executed alone, and then is finite, may lack the same state.
      const bool is_restored = rerun_.not_restored.empty();
      if (is_restored) origin.cause = Cause::not_reproduced;
      if (!is_restored && origin.cause == Cause::not_reproduced) origin.cause = Cause::unknown;
      origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
      return;
    }
    const bool depends_on_timing = std::ranges::any_of(incident_.ranks(), [](const auto& rank) {
      const auto& rerun = rank.ledger().rerun;
      return rerun && rerun->control_reproduced == true;
    });
    const bool is_repeated = std::ranges::none_of(incident_.ranks(), [](const auto& rank) {
      return rank.ledger().rerun && rank.ledger().rerun->without_reduction;
    });
    if (rerun_.reproduced == false && !depends_on_timing && is_repeated) {
      origin.facts.push_back({.kind = FactKind::happened_once});
    }
  }

  const Incident& incident_;
  std::vector<Source> sources_;
  std::vector<Born> births_;
  const RerunOutcome& rerun_;
};

}  // namespace

std::vector<Origin> refine(const Incident& incident, std::vector<Source> sources,
                           std::vector<Born> born, const RerunOutcome& rerun) {
  return Refinement(incident, std::move(sources), std::move(born), rerun).run();
}

}  // namespace nanlocator::inline locate_room::events
