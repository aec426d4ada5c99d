#include "locate/judges.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

bool is_known(const Origin& origin) {
  return has_fact(origin.facts, FactKind::copies_clean) ||
         has_fact(origin.facts, FactKind::every_copy_bad) ||
         has_fact(origin.facts, FactKind::no_copy_elsewhere) ||
         has_fact(origin.facts, FactKind::owner_is_left);
}

Fact fact_of_copies(const Findings& findings, const RankEvidence& rank, const Origin& origin,
                    std::size_t position) {
  BadParameter bad;
  bad.name = origin.parameter;
  bad.position = position;
  Fact clean{.kind = FactKind::copies_clean, .ranks = origin.candidates};
  Fact same{.kind = FactKind::every_copy_bad, .ranks = origin.candidates};
  Fact unknown{.kind = FactKind::copies_not_scanned};
  for (const Place* place : findings.holders_of(key_of(rank, bad))) {
    if (std::ranges::binary_search(origin.candidates, place->rank)) continue;
    switch (place->evidence == nullptr
                ? Status::unknown
                : place->evidence->status(Phase::params_before, origin.parameter)) {
      case Status::clean:
        clean.peers.push_back(place->rank);
        break;
      case Status::bad:
        same.ranks.push_back(place->rank);
        break;
      case Status::unknown:
        unknown.ranks.push_back(place->rank);
        break;
    }
  }
  if (!clean.peers.empty()) return clean;
  std::ranges::sort(same.ranks);
  if (same.ranks.size() > 1) return same;
  return unknown.ranks.empty() ? Fact{.kind = FactKind::no_copy_elsewhere} : unknown;
}

void add_copies(const Findings& findings, Origin& origin) {
  if (is_known(origin)) return;
  const RankEvidence* const rank = findings.incident().find(origin.candidates.front());
  const auto position = rank == nullptr ? std::nullopt : rank->position_of(origin.parameter);
  // For a sharded parameter, the other ranks hold other elements.
  if (!position || rank->parameter(*position).shard) return;
  origin.facts.push_back(fact_of_copies(findings, *rank, origin, *position));
}

/// Whether two ranks hold different values of it: shards or experts of one name, a personal head.
/// Damaged copies have equal elements beside the bad ones.
bool are_unlike(const RankEvidence& one, const RankEvidence& other, const std::string& parameter) {
  for (const WeightValue& here : one.ledger().weight_values) {
    for (const WeightValue& there : other.ledger().weight_values) {
      const bool is_same = here.parameter == parameter && there.parameter == parameter &&
                           here.element == there.element;
      if (is_same && std::isfinite(here.value) && std::isfinite(there.value) &&
          here.value != there.value) {
        return true;
      }
    }
  }
  return false;
}

void leave_out_unlike_copies(const Incident& incident, Origin& origin) {
  std::set<int> unlike;
  const auto is_unlike = [&](int peer) {
    const RankEvidence* const other = incident.find(peer);
    const bool is_other =
        other != nullptr && std::ranges::any_of(origin.candidates, [&](int candidate) {
          const RankEvidence* const own = incident.find(candidate);
          return own != nullptr && are_unlike(*own, *other, origin.parameter);
        });
    if (is_other) unlike.insert(peer);
    return is_other;
  };
  for (Fact& fact : origin.facts) {
    if (fact.kind == FactKind::copies_clean) std::erase_if(fact.peers, is_unlike);
  }
  if (unlike.empty()) return;
  const auto is_empty = [](const Fact& fact) {
    return fact.kind == FactKind::copies_clean && fact.peers.empty();
  };
  if (std::erase_if(origin.facts, is_empty) > 0) {
    origin.facts.push_back(
        {.kind = FactKind::no_copy_elsewhere, .peers = {unlike.begin(), unlike.end()}});
  }
}

/// Adds the values of the clean copies at the bad element, if ranks were asked for them in a
/// re-run.
void add_value_of_copies(const Incident& incident, Origin& origin) {
  const Fact* const clean = find_fact(origin.facts, FactKind::copies_clean);
  if (clean == nullptr || !origin.tensor || !origin.tensor->first_bad) return;
  Fact fact{.kind = FactKind::copies_value, .ranks = origin.candidates};
  for (const int peer : clean->peers) {
    const RankEvidence* const rank = incident.find(peer);
    if (rank == nullptr) continue;
    for (const WeightValue& each : rank->ledger().weight_values) {
      if (each.parameter != origin.parameter || each.element != origin.tensor->first_bad) continue;
      fact.peers.push_back(peer);
      fact.values.emplace_back(std::to_string(peer), each.value);
      break;
    }
  }
  if (!fact.peers.empty()) origin.facts.push_back(std::move(fact));
}

/// Adds the largest magnitude of the clean copies and that of the bad copy's finite elements.
void add_magnitude_of_copies(const Incident& incident, Origin& origin) {
  const Fact* const clean = find_fact(origin.facts, FactKind::copies_clean);
  if (clean == nullptr) return;
  Fact fact{.kind = FactKind::copies_magnitude, .ranks = origin.candidates};
  for (const int peer : clean->peers) {
    const RankEvidence* const rank = incident.find(peer);
    const auto absmax =
        rank == nullptr ? std::nullopt : rank->absmax(Phase::params_before, origin.parameter);
    if (!absmax) continue;
    fact.peers.push_back(peer);
    fact.value = std::max(*absmax, fact.value.value_or(0));
  }
  if (fact.peers.empty()) return;
  if (origin.tensor) fact.last_value = origin.tensor->absmax_finite;
  origin.facts.push_back(std::move(fact));
}

/// The candidates' optimizer states for the weight: bad ones, finite moments, and finite copies
/// from which the weight was made.
struct Kept {
  struct Of {
    std::set<int> ranks;
    std::set<std::string> names;
  };
  Of bad, finite_moments, finite_copies;
  std::optional<Fact> undefined;  // a learning rate or epsilon of which any update makes NaN

  Of& of(const OptimizerState& state) {
    if (!state.stats.is_finite()) return bad;
    const bool is_copy = state.name == "main_param" || state.name == "master_param";
    return is_copy ? finite_copies : finite_moments;
  }
};

/// Names among the optimizer's states, whose values say nothing.
constexpr std::string_view kWrittenByProgram = "written_by_program", kBadAtStart = "bad_at_start",
                           kLoadedLast = "loaded_last";

bool has_mark(const RankEvidence& rank, std::int64_t parameter, std::string_view mark) {
  return std::ranges::any_of(rank.ledger().optimizer_states, [&](const OptimizerState& state) {
    return state.parameter == parameter && state.name == mark;
  });
}

/// A learning rate that is not finite; an epsilon of 0, where a second moment is 0.
std::optional<Fact> undefined_update(const RankEvidence& rank, std::int64_t parameter) {
  const auto find = [&](std::string_view name) -> const TensorStats* {
    for (const OptimizerState& state : rank.ledger().optimizer_states) {
      if (state.parameter == parameter && state.name == name) return &state.stats;
    }
    return nullptr;
  };
  Fact fact{.kind = FactKind::update_undefined, .ranks = {rank.rank()}};
  const TensorStats *rate = find("lr"), *epsilon = find("eps"), *moment = find("exp_avg_sq");
  if (rate != nullptr && !rate->is_finite()) {
    fact.op = "lr";
    fact.bad = bad_count(*rate);
    return fact;
  }
  const bool is_zero_over_zero =
      epsilon != nullptr && epsilon->zeros > 0 && moment != nullptr && moment->zeros > 0;
  if (!is_zero_over_zero) return std::nullopt;
  fact.op = "eps";
  return fact;
}

/// The step before was finite in this process, in which every element of the weight is bad now: the
/// update of that step made it, on all of its copies alike.
std::optional<Fact> whole_update(const Findings& findings, const Origin& origin) {
  if (!origin.tensor) return std::nullopt;
  const OriginTensor& weight = *origin.tensor;
  const std::int64_t elements = numel_of(weight.shape);
  const bool is_whole = elements > 0 && weight.nan + weight.pos_inf + weight.neg_inf == elements;
  // One element may be damaged; what made four of four did so on purpose.
  constexpr std::int64_t kFew = 4;
  const bool is_of_all = has_fact(origin.facts, FactKind::every_copy_bad) ||
                         (has_fact(origin.facts, FactKind::no_copy_elsewhere) && elements >= kFew);
  if (!is_whole || !is_of_all) return std::nullopt;
  for (const int candidate : origin.candidates) {
    const Ledger& ledger = findings.incident().find(candidate)->ledger();
    if (!ledger.history ||
        std::ranges::count(ledger.history->iterations, ledger.iteration - 1) == 0) {
      return std::nullopt;
    }
  }
  return Fact{
      .kind = FactKind::update_undefined, .ranks = origin.candidates, .step = origin.iteration - 1};
}

void add_kept(const RankEvidence& rank, const ParameterRecord& parameter, const TensorStats& weight,
              Kept& kept) {
  // A shard says nothing about elements outside it.
  if (parameter.shard && !parameter.shard->contains(weight.first_bad)) return;
  for (const OptimizerState& state : rank.ledger().optimizer_states) {
    const bool is_number = state.name == "lr" || state.name == "eps" ||
                           state.name == kWrittenByProgram || state.name == kBadAtStart ||
                           state.name == kLoadedLast;
    if (state.parameter != parameter.id || is_number) continue;
    auto& kind = kept.of(state);
    kind.names.insert(state.name);
    kind.ranks.insert(rank.rank());
  }
}

void add_fact(FactKind kind, const Kept::Of& of, Origin& origin) {
  if (of.names.empty()) return;
  origin.facts.push_back({.kind = kind,
                          .ranks = {of.ranks.begin(), of.ranks.end()},
                          .names = {of.names.begin(), of.names.end()}});
}

/// The weight is as the step's first one, or a load, has given it to the program. One rank of
/// several may have loaded or initialised its copy alone: a finite one elsewhere is no proof of
/// damage.
void add_bad_beginning(FactKind kind, Origin& origin) {
  Fact fact{.kind = kind, .ranks = origin.candidates};
  if (const Fact* const clean = find_fact(origin.facts, FactKind::copies_clean)) {
    fact.peers = clean->peers;
  }
  std::erase_if(origin.facts, [](const Fact& each) { return each.kind == FactKind::copies_clean; });
  origin.facts.push_back(std::move(fact));
}

void add_update(const Findings& findings, Origin& origin) {
  Kept kept;
  bool was_finite = false, is_written = false, is_of_start = true, is_loaded = true;
  std::optional<std::int64_t> finite_after;
  for (const int candidate : origin.candidates) {
    const RankEvidence* const rank = findings.incident().find(candidate);
    const auto position = rank == nullptr ? std::nullopt : rank->position_of(origin.parameter);
    const BadParameter* const bad =
        position ? rank->find_bad(Phase::params_before, *position) : nullptr;
    is_of_start &= bad != nullptr, is_loaded &= bad != nullptr;
    if (bad == nullptr) continue;
    add_kept(*rank, rank->parameter(*position), bad->sighting->stats, kept);
    is_written |= has_mark(*rank, rank->parameter(*position).id, kWrittenByProgram);
    is_of_start &= has_mark(*rank, rank->parameter(*position).id, kBadAtStart);
    is_loaded &= has_mark(*rank, rank->parameter(*position).id, kLoadedLast);
    if (!kept.undefined) kept.undefined = undefined_update(*rank, rank->parameter(*position).id);
    finite_after = rank->ledger().weights_finite_after;  // the same on all ranks
    was_finite = finite_after && *finite_after + 1 == rank->ledger().iteration;
  }
  if (is_of_start || is_loaded) {
    add_bad_beginning(is_loaded ? FactKind::loaded_last : FactKind::bad_at_start, origin);
    return;
  }
  const bool is_of_update = kept.bad.names.empty() && !was_finite && !is_written;
  if (is_written && !kept.undefined && origin.detail != Detail::made_earlier) {
    origin.is_on_every_candidate |= has_fact(origin.facts, FactKind::every_copy_bad);
    origin.facts.push_back({.kind = FactKind::written_by_program, .ranks = origin.candidates});
  }
  const auto whole = is_of_update ? whole_update(findings, origin) : std::nullopt;
  if (!kept.undefined) kept.undefined = whole;
  if (kept.undefined) {
    kept.undefined->dtype = origin.tensor ? origin.tensor->dtype : "";
    const RankEvidence* const rank = findings.incident().find(origin.candidates.front());
    const bool was_good_before = rank != nullptr && rank->ledger().on_bad == "stop";
    if (origin.iteration == 2 && was_good_before) kept.undefined->step = 1;  // there was no other
    if (whole) kept.undefined->step = whole->step;
    origin.facts.push_back(*std::move(kept.undefined));
  }
  add_fact(FactKind::optimizer_state_bad, kept.bad, origin);
  add_fact(FactKind::optimizer_copy_finite, kept.finite_copies, origin);
  if (kept.bad.names.empty()) {
    add_fact(FactKind::optimizer_state_finite, kept.finite_moments, origin);
  }
  if (was_finite) {
    origin.facts.push_back({.kind = FactKind::finite_after_update, .step = finite_after});
  }
}

/// The program's code writes to several weights at once: the first leads.
void fold_written(std::vector<Origin>& origins) {
  const auto is_written = [](const Origin& origin) {
    return has_fact(origin.facts, FactKind::written_by_program);
  };
  const auto first = std::ranges::find_if(origins, is_written);
  if (first == origins.end()) return;
  constexpr std::size_t kMostNames = 4;
  Fact further{.kind = FactKind::further_weights_bad, .phase = first->phase, .count = 0};
  origins.erase(std::remove_if(std::next(first), origins.end(),
                               [&](const Origin& other) {
                                 const bool is_same =
                                     is_written(other) && other.candidates == first->candidates;
                                 if (!is_same) return false;
                                 ++*further.count;
                                 if (further.names.size() < kMostNames) {
                                   further.names.push_back(other.parameter);
                                 }
                                 return true;
                               }),
                origins.end());
  if (*further.count > 0) first->facts.push_back(std::move(further));
}

}  // namespace

void judge_bad_weights(const Findings& findings, std::vector<Origin>& origins) {
  for (Origin& origin : origins) {
    if (origin.cause != Cause::bad_weight || origin.candidates.empty()) continue;
    add_copies(findings, origin);
    leave_out_unlike_copies(findings.incident(), origin);
    add_value_of_copies(findings.incident(), origin);
    add_magnitude_of_copies(findings.incident(), origin);
    add_update(findings, origin);
  }
  fold_written(origins);
}

}  // namespace nanlocator::inline locate_room
