// Births of the re-run as events. Edges: from a birth to its descendants on the rank
// (birth_facts.hpp), and the exchange in a collective of the re-run, from what a member sent to
// what another received.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/birth_facts.hpp"
#include "locate/events/events.hpp"
#include "locate/events/fold.hpp"
#include "locate/origin_facts.hpp"
#include "locate/receipts.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline locate_room::events {
namespace {

/// Further bad weights that the evidence names.
constexpr std::size_t kMostNames = 4;

bool is_receipt(const Root& root) {
  return root.birth->kind == BirthKind::collective;
}

bool is_member(const Root& receipt, int rank) {
  const RankList& members = receipt.birth->members;
  return members == RankList() || std::ranges::any_of(members.runs(), [&](const RankRun& run) {
           return run.first <= rank && rank <= run.last && (rank - run.first) % run.step == 0;
         });
}

class Births {
 public:
  Births(const Incident& incident, bool has_crossings)
      : incident_(incident), has_crossings_(has_crossings) {
    for (const RankEvidence& rank : incident.ranks()) {
      for (Root& root : roots_of(rank)) roots_.push_back(std::move(root));
    }
  }

  std::vector<Born> run() {
    std::vector<Root> receipts = take_explained();
    join();
    for (Born& each : born_) judge_sum(each);
    for (const Root& receipt : receipts) add_receiver(receipt);
    fold_weights();
    fold_updates();
    fold_kept();
    fold_repeated();
    leave_out_kept_by_hooks();
    for (Born& each : born_) complete_facts(each);
    return std::move(born_);
  }

 private:
  // ---- the exchange ----

  /// Takes the receipts that something else explains: a birth, the first pass's crossings, or
  /// another member that had something bad to send.
  std::vector<Root> take_explained() {
    std::map<int, Phase> senders;  // the first phase of what they sent bad
    bool has_birth = false;
    for (const Root& root : roots_) {
      has_birth |= !is_receipt(root);
      if (!has_sent(root)) continue;
      auto& phase =
          senders.try_emplace(root.rank->rank(), root.birth->sighting.phase).first->second;
      phase = std::min(phase, root.birth->sighting.phase);
    }
    std::vector<Root> receipts;
    std::erase_if(roots_, [&](const Root& root) {
      if (!is_receipt(root)) return false;
      const bool is_explained =
          has_birth || (has_crossings_ && is_judged_in_first_pass(incident_, root));
      if (is_explained) receipts.push_back(root);
      return is_explained || is_passed_on(root, senders);
    });
    return receipts;
  }

  static bool has_sent(const Root& root) {
    return std::ranges::any_of(reached_by(root), [](const Reached& reached) {
      return reached.kind == ReachedKind::other_ranks;
    });
  }

  /// In an earlier phase, or in the same while this rank sent nothing bad.
  static bool is_passed_on(const Root& receipt, const std::map<int, Phase>& senders) {
    const Phase here = receipt.birth->sighting.phase;
    const bool has_sent_itself = has_sent(receipt);
    return std::ranges::any_of(senders, [&](const auto& sender) {
      return sender.first != receipt.rank->rank() && is_member(receipt, sender.first) &&
             (sender.second < here || (sender.second == here && !has_sent_itself));
    });
  }

  /// A buffer that DistributedDataParallel broadcasts is packed with others and has no name.
  void add_receiver(const Root& receipt) {
    const std::string& name = receipt.birth->sighting.parameter;
    const bool is_broadcast =
        collective_kind_of(receipt.birth->sighting.op) == CollectiveKind::broadcast;
    for (Born& each : born_) {
      const bool is_from = !name.empty() ? name == each.origin.parameter
                                         : (!has_crossings_ || is_broadcast) &&
                                               is_member(receipt, each.origin.candidates.front());
      if (is_from) each.replicas.insert(replica_of(receipt.rank->rank()));
    }
  }

  // ---- one cause ----

  /// One operator's birth on several ranks and in several microbatches is one: 0/0 in one of them
  /// and 1/0 in another are one division by zero.
  void join() {
    using Identity =
        std::tuple<BirthKind, Phase, std::string, std::string, std::string, std::string>;
    std::map<Identity, std::size_t> known;
    for (const Root& root : roots_) {
      const Birth& birth = *root.birth;
      const Sighting& place = birth.sighting;
      const BirthKind kind = birth.kind == BirthKind::inf ? BirthKind::nan : birth.kind;
      const auto [entry, is_new] = known.try_emplace(
          {kind, place.phase, place.module, place.op, place.role.text(), place.parameter},
          born_.size());
      if (is_new) {
        born_.push_back(
            {.origin = origin_of(root),
             .is_receipt = is_receipt(root),
             .is_opaque = birth.kind == BirthKind::opaque || birth.kind == BirthKind::kernel,
             .is_in_hook = birth.is_in_hook,
             .is_first = root.rank->ledger().rerun && root.rank->ledger().rerun->has_first_births});
      }
      Born& each = born_[entry->second];
      const int rank = root.rank->rank();
      if (each.origin.candidates.back() != rank) add_rank(each.origin, *root.rank);
      each.replicas.insert(replica_of(rank));
      if (birth.largest_sent) each.addends.try_emplace(rank, *birth.largest_sent);
      if (place.microbatch) each.microbatches.insert(*place.microbatch);
      if (place.position) each.positions.try_emplace(rank, *place.position);
    }
  }

  int replica_of(int rank) const { return incident_.replica_of(*incident_.place_of(rank)); }

  static void add_rank(Origin& origin, const RankEvidence& rank) {
    origin.candidates.push_back(rank.rank());
    origin.is_on_every_candidate = true;
    origin.coordinates.reset();
    if (origin.data_parallel_replica != rank.coordinates().dp.rank) {
      origin.data_parallel_replica.reset();
    }
  }

  /// After a bad step every weight may be NaN: the first that was read leads.
  void fold_weights() {
    fold_by(
        born_,
        [](const Born& each) {
          return each.origin.cause == Cause::bad_weight ? std::optional(each.origin.candidates)
                                                        : std::nullopt;
        },
        add_weight);
  }

  /// An operator in one line of an optimizer makes one parameter after the other bad.
  void fold_updates() {
    using Line = std::tuple<std::vector<int>, std::string, int, std::string>;
    fold_by(
        born_,
        [](const Born& each) {
          const Origin& origin = each.origin;
          const bool is_update = origin.cause == Cause::optimizer_update && origin.code.has_value();
          return is_update ? std::optional(Line(origin.candidates, origin.code->file,
                                                origin.code->line, origin.op))
                           : std::nullopt;
        },
        add_weight);
    std::vector<Origin*> updates;
    for (Born& each : born_) {
      if (each.origin.cause == Cause::optimizer_update) updates.push_back(&each.origin);
    }
    if (updates.size() == 1) count_updated(*updates.front());
  }

  /// A trace keeps one birth of each operator and line; the scan after the update has all weights.
  void count_updated(Origin& origin) const {
    const RankEvidence* const rank = incident_.find(origin.candidates.front());
    if (rank == nullptr || !rank->scanned(Phase::params_after)) return;
    Fact further{.kind = FactKind::further_weights_bad, .phase = origin.phase, .count = 0};
    for (const BadParameter& bad : rank->bad(Phase::params_after)) {
      if (bad.name == origin.parameter) continue;
      ++*further.count;
      if (further.names.size() < kMostNames) further.names.push_back(bad.name);
    }
    std::erase_if(origin.facts,
                  [](const Fact& fact) { return fact.kind == FactKind::further_weights_bad; });
    if (*further.count > 0) origin.facts.push_back(std::move(further));
  }

  static void add_weight(Born& first, const Born& other) {
    Facts& facts = first.origin.facts;
    if (!has_fact(facts, FactKind::further_weights_bad)) {
      facts.push_back(
          {.kind = FactKind::further_weights_bad, .phase = other.origin.phase, .count = 0});
    }
    ++*facts.back().count;
    if (facts.back().names.size() < kMostNames) {
      facts.back().names.push_back(other.origin.parameter);
    }
  }

  /// What a communication hook keeps between steps (PowerSGD) is bad since the first pass, and a
  /// re-run does not restore it.
  void leave_out_kept_by_hooks() {
    const auto is_kept = [](const Born& each) {
      return each.is_in_hook && each.origin.cause == Cause::bad_input;
    };
    if (std::ranges::all_of(born_, is_kept)) return;
    std::erase_if(born_, is_kept);
  }

  /// The same data that several modules read, and what one line reads of tensors that are kept.
  void fold_kept() {
    using Content = std::tuple<std::vector<int>, std::vector<std::int64_t>, std::string,
                               std::array<std::int64_t, 4>, double>;
    fold_by(
        born_,
        [](const Born& each) {
          const Origin& origin = each.origin;
          if (origin.cause != Cause::bad_input || !origin.tensor) return std::optional<Content>();
          const OriginTensor& data = *origin.tensor;
          return std::optional(
              Content(origin.candidates, data.shape, data.dtype,
                      {data.nan, data.pos_inf, data.neg_inf, data.first_bad.value_or(-1)},
                      data.absmax_finite.value_or(-1)));
        },
        [](Born& first, Born& other) { first.microbatches.merge(other.microbatches); });
    using Line = std::tuple<std::vector<int>, std::string, int>;
    fold_by(
        born_,
        [](const Born& each) {
          const Origin& origin = each.origin;
          const bool is_kept = origin.cause == Cause::bad_buffer && origin.parameter.empty();
          return is_kept && origin.code
                     ? std::optional(Line(origin.candidates, origin.code->file, origin.code->line))
                     : std::nullopt;
        },
        [](Born& first, Born& other) { first.microbatches.merge(other.microbatches); });
  }

  /// A broken kernel fails in every layer that uses it, and so does a group's collective. A line of
  /// the program that several layers execute fails in one of them on one rank and in another on the
  /// next, as their data have it.
  void fold_repeated() {
    using Code = std::tuple<FactKind, std::string, std::string, Cause, std::vector<int>>;
    fold_by(
        born_,
        [](const Born& each) -> std::optional<Code> {
          const Origin& origin = each.origin;
          const auto kind = elsewhere_of(origin);
          if (!kind) return std::nullopt;
          if (*kind == FactKind::same_line_elsewhere) {
            return Code(*kind, origin.op, line_of(origin), origin.cause, {});
          }
          return Code(*kind, origin.op, origin.facts.front().group, origin.cause,
                      origin.candidates);
        },
        [](Born& first, Born& other) {
          const FactKind kind = *elsewhere_of(first.origin);
          const std::string ranks = kind == FactKind::same_line_elsewhere
                                        ? " on " + ranks_text(other.origin.candidates)
                                        : "";
          add_elsewhere(first.origin, kind, place_of(other.origin) + ranks);
          first.microbatches.merge(other.microbatches);
          first.replicas.merge(other.replicas);
        });
  }

  /// "train.py:12 in forward".
  static std::string line_of(const Origin& origin) {
    return origin.code->file + ":" + std::to_string(origin.code->line) + " in " +
           std::string(name_of(origin.phase));
  }

  static std::optional<FactKind> elsewhere_of(const Origin& origin) {
    const bool is_of_kernel = has_fact(origin.facts, FactKind::made_by_kernel) ||
                              has_fact(origin.facts, FactKind::left_unwritten);
    if (is_of_kernel && !origin.op.empty()) return FactKind::same_kernel_elsewhere;
    if (has_fact(origin.facts, FactKind::came_from_collective)) {
      return FactKind::same_collective_elsewhere;
    }
    const bool is_of_operator =
        origin.cause == Cause::operator_overflow || origin.cause == Cause::operator_undefined;
    if (is_of_operator && origin.code && !origin.op.empty()) return FactKind::same_line_elsewhere;
    return std::nullopt;
  }

  // ---- facts about several ranks ----

  /// A reduction that returned Inf overflowed if the members' largest addends allow it.
  static void judge_sum(Born& each) {
    Origin& origin = each.origin;
    const Fact& received = origin.facts.front();
    const bool is_inf = received.kind == FactKind::came_from_collective && origin.tensor &&
                        origin.tensor->nan == 0 && !received.peers.empty();
    if (!is_inf) return;
    std::vector<double> known;  // of the members; other replicas have a sum of their own
    for (const auto& [rank, largest] : each.addends) {
      if (std::ranges::count(received.peers, rank) > 0) known.push_back(largest);
    }
    const auto sum = sum_of_addends(known, received.peers.size(), received.op);
    if (!sum) return;
    auto overflow = sum_beyond_range(*sum, received.peers.size(), origin.tensor->dtype);
    if (!overflow) return;
    origin.cause = Cause::collective_sum;
    origin.facts.push_back(*std::move(overflow));
  }

  void complete_facts(Born& each) const {
    Origin& origin = each.origin;
    if (!each.microbatches.empty()) origin.microbatch = *each.microbatches.begin();
    if (each.microbatches.size() > 1) {
      origin.facts.push_back({.kind = FactKind::same_in_microbatches,
                              .count = static_cast<std::int64_t>(each.microbatches.size())});
    }
    add_peers(origin);
    if (origin.candidates.size() > 1) {
      origin.facts.push_back({.kind = FactKind::same_on_ranks, .ranks = origin.candidates});
    }
  }

  /// The tensor-parallel peers, which make the same call on the same tensor or on other parts of
  /// it, that were finite.
  void add_peers(Origin& origin) const {
    if (origin.op.empty() || !has_fact(origin.facts, FactKind::made_from_finite)) return;
    const Place& own = *incident_.place_of(origin.candidates.front());
    Fact finite{.kind = FactKind::peers_finite, .module = origin.module, .op = origin.op};
    for (const Place& place : incident_.places()) {
      const bool is_peer = place.pp == own.pp && place.dp == own.dp && place.cp == own.cp &&
                           std::ranges::count(origin.candidates, place.rank) == 0;
      if (!is_peer || place.evidence == nullptr) continue;
      const Ledger& ledger = place.evidence->ledger();
      const bool was_traced = ledger.is_complete && ledger.rerun && ledger.rerun->reproduced;
      const bool has_it = std::ranges::any_of(ledger.births, [&](const Birth& birth) {
        const Sighting& at = birth.sighting;
        return at.op == origin.op && at.module == origin.module && at.phase == origin.phase;
      });
      if (was_traced && !has_it) finite.peers.push_back(place.rank);
    }
    if (!finite.peers.empty()) origin.facts.push_back(std::move(finite));
  }

  const Incident& incident_;
  bool has_crossings_;
  std::vector<Root> roots_;
  std::vector<Born> born_;
};

}  // namespace

std::vector<Born> births_of(const Incident& incident, bool has_crossings) {
  return Births(incident, has_crossings).run();
}

}  // namespace nanlocator::inline locate_room::events
