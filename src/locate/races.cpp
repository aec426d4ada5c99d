#include "locate/judges.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "verdict/unordered_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

constexpr std::size_t kMostAccesses = 4;  // facts of one origin

struct Access {
  int rank = 0;
  const UnorderedAccess* seen = nullptr;
};

bool is_same_code(const UnorderedAccess& a, const UnorderedAccess& b) {
  return a.is_write == b.is_write && a.transfer == b.transfer && a.op == b.op && a.code == b.code;
}

std::vector<Access> accesses_of(const Incident& incident) {
  std::vector<Access> accesses;
  for (const RankEvidence& rank : incident.ranks()) {
    if (!rank.ledger().rerun) continue;
    for (const auto& access : rank.ledger().rerun->unordered) {
      accesses.push_back({rank.rank(), &access});
    }
  }
  return accesses;
}

std::vector<Access> with(const std::vector<Access>& accesses, Concurrent other) {
  std::vector<Access> some;
  std::ranges::copy_if(accesses, std::back_inserter(some),
                       [&](const Access& access) { return access.seen->other == other; });
  return some;
}

/// One fact per place in the program, with its ranks.
Facts facts_of(const std::vector<Access>& accesses) {
  Facts facts;
  std::vector<const UnorderedAccess*> known;
  for (const auto& [rank, access] : accesses) {
    const auto same = std::ranges::find_if(
        known, [&](const UnorderedAccess* each) { return is_same_code(*each, *access); });
    if (same != known.end()) {
      auto& ranks = facts[static_cast<std::size_t>(same - known.begin())].ranks;
      if (ranks.back() != rank) ranks.push_back(rank);
      continue;
    }
    if (known.size() == kMostAccesses) continue;
    known.push_back(access);
    facts.push_back({.kind = unordered_kind(access->other, access->is_write),
                     .ranks = {rank},
                     .phase = access->phase,
                     .microbatch = access->microbatch,
                     .count = access->count,
                     .parameter = access->parameter,
                     .module = access->module,
                     .op = access->op,
                     .transfer = access->transfer,
                     .transfer_code = access->transfer_code,
                     .code = access->code});
  }
  return facts;
}

bool is_of(const Origin& origin, const UnorderedAccess& access) {
  return origin.op == access.transfer || origin.op == access.op ||
         (!access.parameter.empty() && origin.parameter == access.parameter);
}

std::vector<Access> of(const Origin& origin, const std::vector<Access>& accesses) {
  std::vector<Access> own;
  std::ranges::copy_if(accesses, std::back_inserter(own),
                       [&](const Access& access) { return is_of(origin, *access.seen); });
  return own;
}

/// Adds concurrent work that the candidates saw. A transfer that used a gradient's memory cannot
/// have caused anything earlier.
void add_concurrent(const Incident& incident, Origin& origin) {
  std::set<Concurrent> concurrent;
  for (const RankEvidence& rank : incident.ranks()) {
    const auto& rerun = rank.ledger().rerun;
    if (!rerun || std::ranges::find(origin.candidates, rank.rank()) == origin.candidates.end()) {
      continue;
    }
    concurrent.insert(rerun->concurrent.begin(), rerun->concurrent.end());
  }
  if (origin.phase < Phase::grad_local) concurrent.erase(Concurrent::transfer);
  if (concurrent.empty()) return;
  Fact& beside = origin.facts.emplace_back(Fact{.kind = FactKind::ran_beside});
  for (const auto each : concurrent) beside.names.emplace_back(name_of(each));
}

/// True if the cause may be a race as well as a machine fault.
bool is_open(const Origin& origin) {
  return origin.cause == Cause::not_reproduced || origin.cause == Cause::memory_corruption ||
         origin.cause == Cause::collective_result || origin.cause == Cause::pipeline_transfer;
}

/// Replaces the candidates by the ranks that used the memory too early, unless some are candidates
/// already.
void narrow_to(const std::vector<Access>& accesses, Origin& origin) {
  std::vector<int> ranks;
  for (const auto& access : accesses) ranks.push_back(access.rank);
  ranks.erase(std::ranges::unique(ranks).begin(), ranks.end());
  std::vector<int> common;
  std::ranges::set_intersection(ranks, origin.candidates, std::back_inserter(common));
  if (!common.empty() || ranks.empty()) return;  // the observed ranks remain
  origin.is_on_every_candidate = true;
  origin.coordinates.reset();
  origin.data_parallel_replica.reset();
  origin.candidates = std::move(ranks);
}

void make_race(Origin& origin, const std::vector<Access>& accesses) {
  origin.cause = Cause::race;
  origin.detail = Detail::none;
  origin.place_confidence = Confidence::medium;
  narrow_to(accesses, origin);
  if (!accesses.empty() && accesses.front().seen->code) {
    origin.code = accesses.front().seen->code;
  }
}

bool is_finite_serialised(const RerunOutcome& rerun) {
  const auto count = [&](bool is_bad) {
    return std::ranges::count(rerun.variants, VariantOutcome{RerunVariant::serialised, is_bad});
  };
  return count(false) > 0 && count(true) == 0;
}

}  // namespace

void judge_races(const Incident& incident, const RerunOutcome& rerun,
                 std::vector<Origin>& origins) {
  const auto accesses = accesses_of(incident);
  // Accesses of threads are recorded only if their order decides the outcome.
  const auto of_threads = with(accesses, Concurrent::thread);
  const auto of_transfers = with(accesses, Concurrent::transfer);
  const auto of_streams = with(accesses, Concurrent::stream);
  const bool is_gone = rerun.reproduced == false;
  for (Origin& origin : origins) {
    std::vector<Access> own = of(origin, of_transfers);
    std::ranges::copy(of(origin, of_streams), std::back_inserter(own));
    const bool is_touched = !own.empty();
    if (!is_touched) own = of_transfers.empty() ? of_streams : of_transfers;
    if (!of_threads.empty()) {
      own = of_threads;
      make_race(origin, own);
    } else if (is_finite_serialised(rerun)) {
      make_race(origin, own);
    } else if (!is_open(origin)) {
      continue;
    } else if (is_gone && is_touched) {
      make_race(origin, own);
    }
    Facts facts = facts_of(own);
    origin.facts.insert(origin.facts.begin(), std::make_move_iterator(facts.begin()),
                        std::make_move_iterator(facts.end()));
    if (origin.cause == Cause::not_reproduced && is_gone) add_concurrent(incident, origin);
  }
}

}  // namespace nanlocator::inline locate_room
