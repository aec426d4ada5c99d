#include "locate/crossing_simulator/pass.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "locate/crossing_simulator/births.hpp"
#include "locate/crossing_simulator/replica.hpp"

namespace nanlocator::pipeline {

using namespace simulator;

namespace {

/// The first replica and those with a fault, by first dp rank.
std::set<int> simulated_replicas(const Layout& layout, const std::vector<Fault>& faults) {
  std::set<int> replicas = {0};
  for (const Fault& fault : faults) {
    if (!fault.is_in_pass()) continue;
    for (int dp = 0; dp < layout.dp; ++dp) {
      if (fault.is_of_dp(dp)) replicas.insert(dp / layout.ep * layout.ep);
    }
  }
  return replicas;
}

/// The largest gradient of six steps: climbing to `last`, or jumping to it.
HistorySummary history_of(bool is_climb, double last) {
  HistorySummary history;
  for (int step = 2; step <= 7; ++step) {
    history.iterations.push_back(step);
    const double climbed = std::pow(last, (step - 1) / 6.0);
    const double value = is_climb || step == 7 ? climbed : 1.0;
    history.absmax.push_back(static_cast<float>(value));
    history.norm.push_back(static_cast<float>(2 * value));
  }
  return history;
}

}  // namespace

Pass::Pass(const Layout& layout, std::vector<Fault> faults, unsigned seed)
    : layout_(layout),
      faults_(std::move(faults)),
      orders_(backward_orders(layout)),
      strikes_(faults_),
      observer_(layout) {
  BadByRank local;
  for (const int first_dp : simulated_replicas(layout_, faults_)) {
    local.merge(Replica(layout_, first_dp, strikes_, observer_).run(seed));
  }
  for (const Fault& fault : faults_) {
    if (fault.plant != Plant::gradient) continue;
    add_bad(local[rank_of(layout_, fault)], gradient_of(layout_, fault),
            element_of(layout_, fault));
  }
  gradients_ = reduce(layout_, orders_, faults_, std::move(local), observer_);
}

bool Pass::has_bad_loss_or_gradient() const {
  return observer_.has_bad_loss() || !gradients_.local.empty() || !gradients_.reduced.empty();
}

std::vector<std::int64_t> Pass::bad_ids_on(int rank) const {
  std::vector<std::int64_t> ids;
  for (const ParameterRecord& each : order_on(rank)) {
    if (bad_on(rank).contains(each.name)) ids.push_back(each.id);
  }
  std::ranges::sort(ids);
  return ids;
}

const std::vector<ParameterRecord>& Pass::order_on(int rank) const {
  return orders_[static_cast<std::size_t>(layout_.coordinates_of(rank).pp.rank)];
}

// ---- ledgers ----

std::vector<Ledger> Pass::ledgers() const {
  std::vector<Ledger> ledgers;
  ledgers.reserve(static_cast<std::size_t>(layout_.world()));
  for (int rank = 0; rank < layout_.world(); ++rank) ledgers.push_back(ledger_of(rank));
  return ledgers;
}

Ledger Pass::ledger_of(int rank) const {
  Ledger ledger = make_ledger(layout_, rank);
  const RankCoordinates& at = ledger.coordinates;
  ledger.level = "boundaries";
  ledger.backward_order = order_on(rank);
  if (layout_.has_distributed_optimizer) {
    for (ParameterRecord& each : ledger.backward_order) each.shard = shard_of(layout_, at.dp.rank);
  }
  ledger.crossings = observer_.crossings_on(rank);
  ledger.sightings = observer_.sightings_on(rank);
  tell_norm(ledger);
  add_phase(ledger, Phase::params_before, bad_weights(at));
  add_phase(ledger, Phase::grad_local, bad_on(rank));
  add_phase(ledger, Phase::grad_reduced, found_or_empty(gradients_.reduced, rank));
  mark_overflow(ledger);
  add_phase(ledger, Phase::grad_norm, found_or_empty(gradients_.read, rank));
  if (std::ranges::count(faults_, Plant::update, &Fault::plant) > 0) {
    add_phase(ledger, Phase::params_after, bad_updates(at));
  }
  return ledger;
}

BadParameters Pass::bad_weights(const RankCoordinates& at) const {
  BadParameters bad;
  for (const Fault& fault : faults_) {
    if (fault.plant != Plant::weight || !fault.is_on(at)) continue;
    add_bad(bad, weight_of(layout_, fault), element_of(layout_, fault));
  }
  return bad;
}

BadParameters Pass::bad_updates(const RankCoordinates& at) const {
  BadParameters bad;
  for (const Fault& fault : faults_) {
    // The owner's update reaches the others by the all-gather of parameters.
    const bool is_gathered = layout_.has_distributed_optimizer && fault.is_of_part(at);
    if (fault.plant != Plant::update || (!fault.is_on(at) && !is_gathered)) continue;
    add_bad(bad, gradient_of(layout_, fault), element_of(layout_, fault));
  }
  return bad;
}

void Pass::tell_norm(Ledger& ledger) const {
  for (const Fault& fault : faults_) {
    if (fault.plant != Plant::norm_value) continue;
    const bool is_here = fault.is_on(ledger.coordinates);
    ledger.gradient_norm = std::numeric_limits<double>::infinity();
    ledger.absmax = is_here ? 1e25 : 1.0;
    ledger.absmax_parameter = is_here ? gradient_of(layout_, fault) : ledger.backward_order[0].name;
    ledger.history = history_of(is_here && fault.is_climb, *ledger.absmax);
  }
}

void Pass::mark_overflow(Ledger& ledger) const {
  for (const Fault& fault : faults_) {
    if (fault.plant != Plant::reduced_everywhere || !fault.is_overflow ||
        !fault.is_of_part(ledger.coordinates)) {
      continue;
    }
    for (Sighting& sighting : ledger.sightings) {
      const bool is_sum = sighting.phase == Phase::grad_reduced &&
                          sighting.parameter == gradient_of(layout_, fault);
      if (is_sum && sighting.stats.nan > 0) turn_into_overflow(sighting);
    }
  }
}

// ---- the re-run ----

std::vector<Birth> Pass::births_on(int rank) const {
  std::vector<Birth> births;
  for (const Fault& fault : faults_) {
    if (!has_struck(fault)) continue;
    std::ranges::move(births_of(layout_, fault, strikes_, rank), std::back_inserter(births));
  }
  if (births.empty() && has_crossed(rank)) {
    births.push_back(receipt(observer_.sightings_on(rank).front()));
  }
  return births;
}

std::vector<Ledger> ledgers_with_repeat(const Layout& layout, const std::vector<Fault>& faults,
                                        unsigned seed) {
  std::vector<Ledger> ledgers = Pass(layout, faults, seed).ledgers();
  std::vector<Fault> repeated = faults;
  std::erase_if(repeated, [](const Fault& fault) { return !fault.is_repeated; });
  const Pass repeat(layout, repeated, seed);
  for (Ledger& ledger : ledgers) {
    const int rank = ledger.coordinates.rank;
    ledger.births = repeat.births_on(rank);
    Rerun rerun;
    rerun.reproduced = repeat.has_bad_loss_or_gradient();
    rerun.bad_parameters = repeat.bad_ids_on(rank);
    rerun.gradients = 4;
    ledger.rerun = std::move(rerun);
  }
  return ledgers;
}

}  // namespace nanlocator::pipeline
