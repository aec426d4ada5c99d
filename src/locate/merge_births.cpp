#include "locate/merge_births.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "locate/backward_flow.hpp"
#include "locate/origin_facts.hpp"
#include "locate/rerun_facts.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// Limit on facts about crossings that a birth takes from the first pass.
constexpr std::size_t kMostAdopted = 2;

bool have_common(const std::vector<int>& a, const std::vector<int>& b) {
  auto left = a.begin();
  auto right = b.begin();
  while (left != a.end() && right != b.end()) {
    if (*left == *right) return true;
    *left < *right ? ++left : ++right;
  }
  return false;
}

bool may_be_same_microbatch(const std::set<int>& a, const std::set<int>& b) {
  if (a.empty() || b.empty()) return true;
  return std::ranges::any_of(a, [&](int each) { return b.contains(each); });
}

class Merge {
 public:
  Merge(const Incident& incident, std::vector<FoundOrigin> found, std::vector<BornOrigin> born,
        const RerunOutcome& rerun)
      : incident_(incident), found_(std::move(found)), rerun_(rerun) {
    for (BornOrigin& each : born) {
      std::set<int> replicas = replicas_of(each.origin.candidates);
      // Receivers of a buffer that DistributedDataParallel broadcasts.
      replicas.merge(replicas_of(each.receivers));
      born_.push_back({std::move(each), std::move(replicas), 0});
    }
  }

  std::vector<Origin> run() {
    const Facts facts = facts_of_rerun(incident_, rerun_);
    drop_receipts();
    drop_opaque_receipts();
    for (Traced& each : born_) adopt_neighbours(each.born.origin);
    std::vector<Origin> left;
    for (FoundOrigin& found : found_) {
      if (Traced* birth = explanation_of(found)) {
        adopt_evidence(*birth, found);
        continue;
      }
      const bool is_gone = is_gone_in_rerun(found);
      if (is_gone && rerun_.reproduced == true) {
        found.origin.facts.push_back({.kind = FactKind::gone_in_rerun});
      } else {
        append(found.origin.facts, facts);
      }
      if (is_gone) {
        mark_as_gone(found.origin);
        add_unseen_gathers(found);
      }
      add_transfer(found, is_gone);
      left.push_back(std::move(found.origin));
    }
    std::vector<Origin> origins;
    for (Traced& each : born_) {
      append(each.born.origin.facts, facts);
      if (rerun_.reproduced == false) mark_as_gone(each.born.origin);
      origins.push_back(std::move(each.born.origin));
    }
    std::ranges::move(left, std::back_inserter(origins));
    std::ranges::stable_sort(origins, {}, &Origin::phase);
    return origins;
  }

 private:
  struct Traced {
    BornOrigin born;
    std::set<int> replicas;
    std::size_t adopted = 0;
  };

  std::set<int> replicas_of(const std::vector<int>& ranks) const {
    std::set<int> replicas;
    for (const int rank : ranks) {
      if (const Place* place = incident_.place_of(rank)) {
        replicas.insert(incident_.replica_of(*place));
      }
    }
    return replicas;
  }

  /// Drops births that only came out of a collective if the first pass shows a collective that made
  /// something bad from finite inputs, because that finding also has the inputs and the phase. A
  /// weight that was bad before the step is what was gathered.
  void drop_receipts() {
    std::erase_if(born_, [&](const Traced& each) {
      return each.born.is_received && std::ranges::any_of(found_, [&](const FoundOrigin& found) {
               const Cause cause = found.origin.cause;
               if (found.found_in == FoundIn::weight) return true;
               return (cause == Cause::collective_result || cause == Cause::collective_sum) &&
                      have_common(found.origin.candidates, each.born.origin.candidates);
             });
    });
  }

  /// Crossings can prove that this rank sent a bad value although it had received only finite ones.
  /// A birth in a call that the trace could not follow does not disprove that: if it is on further
  /// ranks or behind the crossing, it was received in a way that the trace did not see.
  void drop_opaque_receipts() {
    std::erase_if(born_, [&](const Traced& each) {
      if (!each.born.is_opaque) return false;
      const Origin& born = each.born.origin;
      if (has_bad_weight(born)) return true;
      std::set<int> senders;
      bool is_behind_one = false;
      for (const FoundOrigin& found : found_) {
        if (!may_be_what_was_sent(each.born, found)) continue;
        senders.insert(found.origin.candidates.begin(), found.origin.candidates.end());
        is_behind_one = is_behind_one || is_behind(each.born, found);
      }
      return !senders.empty() &&
             (is_behind_one || !std::ranges::includes(senders, born.candidates));
    });
  }

  /// True if a bad weight of the birth's module was among the call's inputs, even if the trace does
  /// not know its memory (wrapper subclasses). A gather for several modules holds weights of all of
  /// them.
  bool has_bad_weight(const Origin& born) const {
    const bool is_gathered = std::ranges::any_of(born.facts, [](const Fact& fact) {
      return fact.kind == FactKind::allocated_not_written &&
             collective_kind_of(fact.op) == CollectiveKind::all_gather;
    });
    return std::ranges::any_of(found_, [&](const FoundOrigin& found) {
      return found.found_in == FoundIn::weight &&
             (is_gathered ||
              (!born.module.empty() && found.origin.parameter.starts_with(born.module + "."))) &&
             have_common(found.origin.candidates, born.candidates);
    });
  }

  static bool may_be_what_was_sent(const BornOrigin& birth, const FoundOrigin& found) {
    return found.found_in == FoundIn::sent && birth.origin.direction == found.origin.direction &&
           may_be_same_microbatch(birth.microbatches, found.microbatches) &&
           have_common(birth.origin.candidates, found.origin.candidates);
  }

  /// True if the bad value had been sent before the birth; false if unknown.
  static bool is_behind(const BornOrigin& birth, const FoundOrigin& sent) {
    for (const auto& [rank, position] : birth.positions) {
      if (!sent.position || !std::ranges::binary_search(sent.origin.candidates, rank)) continue;
      return position > *sent.position;
    }
    return is_in_later_layer(birth.origin, sent.origin);
  }

  /// For ledgers without positions. Later: in the order of forward or of backward.
  static bool is_in_later_layer(const Origin& born, const Origin& seen) {
    const auto at = number_of_layer(born.module), crossed_at = number_of_layer(seen.module);
    if (!at || !crossed_at) return false;
    return born.direction == Direction::backward ? *at < *crossed_at : *at > *crossed_at;
  }

  static std::optional<int> number_of_layer(std::string_view module) {
    const std::string_view layer = layer_of(module);
    int number = 0;
    const char* const begin = layer.data() + layer.rfind('.') + 1;  // 0 if there is no dot
    const auto [end, error] = std::from_chars(begin, layer.data() + layer.size(), number);
    if (layer.empty() || error != std::errc{}) return std::nullopt;
    return number;
  }

  // ---- what a birth explains ----

  Traced* explanation_of(const FoundOrigin& found) {
    const std::set<int> replicas = replicas_of(found.origin.candidates);
    for (Traced& each : born_) {
      if (explains(each, found, replicas)) return &each;
    }
    return nullptr;
  }

  bool explains(const Traced& birth, const FoundOrigin& found,
                const std::set<int>& replicas) const {
    const Origin& born = birth.born.origin;
    const Origin& seen = found.origin;
    const bool has_common_rank = have_common(born.candidates, seen.candidates);
    const auto has_common_replica = [&] {
      return std::ranges::any_of(replicas, [&](int each) { return birth.replicas.contains(each); });
    };
    // A forward birth may first be sent in backward: if it recurs in the recomputed forward, or if
    // only gradients depend on its result (an auxiliary loss).
    const bool may_reach =
        born.direction == seen.direction ||
        (born.direction == Direction::forward && seen.direction == Direction::backward);
    const auto is_same_pass = [&] {
      return may_reach && may_be_same_microbatch(birth.born.microbatches, found.microbatches);
    };
    switch (found.found_in) {
      case FoundIn::weight:
        return has_common_rank && born.cause == Cause::bad_weight;
      case FoundIn::sent:
        return has_common_rank && (is_same_pass() || born.cause == Cause::bad_weight);
      case FoundIn::unseen:
        return has_common_replica() && (is_same_pass() || born.cause == Cause::bad_weight);
      case FoundIn::received:
        return false;  // later computations do not matter: what was sent was finite
      case FoundIn::flow:
        return seen.phase == Phase::grad_local ? has_common_replica() : has_common_rank;
      case FoundIn::isolated:
        if (seen.phase != Phase::grad_local) return has_common_rank;
        if (is_bad_in_rerun(found) == false) return false;
        return has_common_rank || has_common_replica() ||
               birth.born.reached.contains(seen.parameter);
      case FoundIn::late:
        return has_common_rank && born.phase > Phase::backward;
      case FoundIn::other:
        return has_common_rank;
    }
    return false;
  }

  /// Takes the clean parameters around the fault and the first gradient that it made bad, which
  /// only the first pass shows.
  void adopt_neighbours(Origin& born) const {
    for (const FoundOrigin& found : found_) {
      const Origin& seen = found.origin;
      if (!std::ranges::binary_search(seen.candidates, born.candidates.front())) continue;
      const std::string& first_bad =
          seen.parameter.empty() ? found.first_bad_gradient : seen.parameter;
      if (first_bad.empty() && seen.clean_before.empty() && seen.clean_after.empty()) continue;
      // In backward, the parameter is that of the first gradient that the birth made bad; a forward
      // birth has none.
      if (born.parameter.empty() && born.direction != Direction::forward) {
        born.parameter = first_bad;
      }
      born.clean_before = seen.clean_before;
      born.clean_after = seen.clean_after;
      return;
    }
  }

  /// The trace sees a division of zero by zero; only the loss shows that no label was counted.
  static void adopt_empty_loss(Origin& born, const Origin& seen) {
    const bool is_quotient = born.phase == Phase::loss || born.op.starts_with("aten::div");
    const bool is_open = born.cause == Cause::unknown || born.cause == Cause::operator_undefined;
    if (seen.cause != Cause::empty_loss_mask || !is_quotient || !is_open) return;
    born.cause = seen.cause;
  }

  static void adopt_evidence(Traced& birth, const FoundOrigin& found) {
    Origin& born = birth.born.origin;
    adopt_empty_loss(born, found.origin);
    if (found.found_in == FoundIn::weight) adopt_copies(born, found.origin);
    if (found.found_in != FoundIn::sent || birth.adopted == kMostAdopted) return;
    ++birth.adopted;
    Fact seen = found.origin.facts.front();
    seen.source = FactSource::first_pass;
    born.facts.push_back(std::move(seen));
  }

  /// One rank updates a weight's bad elements; the other ranks read what it sent them.
  static void leave_to_owners(Origin& born, const Origin& seen) {
    if (!std::ranges::includes(born.candidates, seen.candidates)) return;
    born.candidates = seen.candidates;
    born.coordinates = seen.coordinates;
    born.is_on_every_candidate = seen.is_on_every_candidate;
    born.data_parallel_replica = seen.data_parallel_replica;
    std::erase_if(born.facts, [](const Fact& fact) {
      return fact.kind == FactKind::same_on_ranks || fact.kind == FactKind::every_copy_bad;
    });
  }

  /// Takes facts about other copies of a weight, which only the scan of all parameters has.
  static void adopt_copies(Origin& born, const Origin& seen) {
    if (born.parameter != seen.parameter) return;
    // For a shard, the trace knows only its own elements.
    if (seen.tensor && born.tensor && born.tensor->shape != seen.tensor->shape) {
      born.tensor = seen.tensor;
    }
    if (has_fact(seen.facts, FactKind::owner_is_left)) leave_to_owners(born, seen);
    for (const Fact& fact : seen.facts) {
      const bool is_of_copies =
          fact.kind == FactKind::copies_clean || fact.kind == FactKind::every_copy_bad ||
          fact.kind == FactKind::no_copy_elsewhere || fact.kind == FactKind::gathered_from_owner ||
          fact.kind == FactKind::owner_is_left;
      if (is_of_copies && !has_fact(born.facts, fact.kind)) born.facts.push_back(fact);
    }
  }

  // ---- the re-run ----

  const Rerun* finished_rerun_of(int rank) const {
    const RankEvidence* evidence = incident_.find(rank);
    if (evidence == nullptr || !evidence->ledger().is_complete) return nullptr;
    const auto& rerun = evidence->ledger().rerun;
    return rerun && rerun->reproduced ? &*rerun : nullptr;
  }

  /// Whether the gradient, or any of the candidates' gradients, was bad in the re-run, too; empty
  /// if a candidate cannot say, or if the first pass made none bad.
  std::optional<bool> is_bad_in_rerun(const FoundOrigin& found) const {
    if (found.origin.phase > Phase::grad_local || !had_bad_gradients(found)) return std::nullopt;
    const std::string& parameter = found.origin.parameter;
    for (const int rank : found.origin.candidates) {
      const Rerun* rerun = finished_rerun_of(rank);
      if (rerun == nullptr) return std::nullopt;
      if (found.found_in != FoundIn::isolated) {
        if (!rerun->bad_parameters.empty()) return true;
        continue;
      }
      const RankEvidence& evidence = *incident_.find(rank);
      const auto position = evidence.position_of(std::string_view(parameter));
      if (!position) return std::nullopt;
      const std::int64_t id = evidence.parameter(*position).id;
      if (std::ranges::find(rerun->bad_parameters, id) != rerun->bad_parameters.end()) return true;
    }
    return false;
  }

  bool had_bad_gradients(const FoundOrigin& found) const {
    return std::ranges::any_of(found.origin.candidates, [&](int rank) {
      const RankEvidence* evidence = incident_.find(rank);
      return evidence != nullptr && !evidence->bad(Phase::grad_local).empty();
    });
  }

  /// True if a birth explains the bad values in the replica's re-run.
  bool has_birth_in_replica(const FoundOrigin& found) const {
    const std::set<int> replicas = replicas_of(found.origin.candidates);
    return std::ranges::any_of(born_, [&](const Traced& each) {
      return std::ranges::any_of(replicas,
                                 [&](int replica) { return each.replicas.contains(replica); });
    });
  }

  bool has_finished_everywhere(const std::vector<int>& ranks) const {
    return std::ranges::all_of(ranks, [&](int rank) { return finished_rerun_of(rank) != nullptr; });
  }

  /// True if the fault did not recur. `found` has no birth that explains it; the step as a whole
  /// may have been bad again.
  bool is_gone_in_rerun(const FoundOrigin& found) const {
    if (rerun_.reproduced == false) return true;
    if (rerun_.reproduced != true) return false;
    switch (found.found_in) {
      case FoundIn::flow:
      case FoundIn::isolated:
        return is_bad_in_rerun(found) == false;
      case FoundIn::sent:
      case FoundIn::received:
        // Gradients that were bad again are no evidence about it if another birth made them bad.
        return has_finished_everywhere(found.origin.candidates) &&
               (is_bad_in_rerun(found) == false || has_birth_in_replica(found));
      default:
        return false;
    }
  }

  /// A fault in a gather of weights is in everything computed from them.
  void add_unseen_gathers(FoundOrigin& found) const {
    Facts& facts = found.origin.facts;
    if (found.found_in != FoundIn::flow || has_fact(facts, FactKind::weights_gathered_unseen))
      return;
    if (auto fact = weights_gathered_unseen(incident_, found.origin.candidates)) {
      facts.push_back(*std::move(fact));
    }
  }

  /// Finite when sent and bad on arrival: known without a re-run. The re-run computes an overflowed
  /// sum again, except that of the data-parallel reduction.
  static bool is_witnessed(const Origin& origin) {
    return origin.cause == Cause::pipeline_transfer || origin.cause == Cause::collective_result ||
           (origin.cause == Cause::collective_sum && origin.phase > Phase::backward);
  }

  void mark_as_gone(Origin& origin) const {
    if (is_witnessed(origin)) {
      const bool depends_on_timing = std::ranges::any_of(incident_.ranks(), [](const auto& rank) {
        const auto& rerun = rank.ledger().rerun;
        return rerun && rerun->control_reproduced == true;
      });
      if (rerun_.reproduced == false && !depends_on_timing) {
        origin.facts.push_back({.kind = FactKind::happened_once});
      }
      return;
    }
    // A different outcome from a different state is no evidence against a machine.
    if (rerun_.not_restored.empty()) origin.cause = Cause::not_reproduced;
    origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
  }

  /// Adds whether the re-run repeated the bad transfer, and its outcome. The re-run ends with
  /// backward, so gradients are not reduced again.
  void add_transfer(FoundOrigin& found, bool is_gone) const {
    const bool is_transfer = found.found_in == FoundIn::received ||
                             found.origin.cause == Cause::collective_result ||
                             found.origin.cause == Cause::collective_sum;
    if (!is_transfer || !rerun_.reproduced || is_gone) return;
    if (found.origin.phase > Phase::backward) {
      found.origin.facts.push_back({.kind = FactKind::transfer_not_run_again});
    } else if (is_bad_in_rerun(found) == true) {
      found.origin.facts.push_back({.kind = FactKind::transfer_bad_again});
    }
  }

  static void append(Facts& facts, const Facts& further) {
    facts.insert(facts.end(), further.begin(), further.end());
  }

  const Incident& incident_;
  std::vector<FoundOrigin> found_;
  std::vector<Traced> born_;
  const RerunOutcome& rerun_;
};

}  // namespace

std::vector<Origin> merge_births(const Incident& incident, std::vector<FoundOrigin> found,
                                 std::vector<BornOrigin> born, const RerunOutcome& rerun) {
  return Merge(incident, std::move(found), std::move(born), rerun).run();
}

}  // namespace nanlocator::inline locate_room
