#include "locate/judges.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace nanlocator::inline locate_room {
namespace {

// docs/causes.md, "Divergence", derives these numbers.
constexpr std::size_t kFewestSteps = 5;         // for a climb
constexpr double kLeastGrowth = 1e3;            // over all its steps
constexpr double kLeastGrowthBesideJump = 1e2;  // without its largest rise
constexpr double kLeastTop = 1.0;
constexpr std::int64_t kLargestGap = 4;  // steps between the last recorded one and the finding
/// fp32 cannot hold the sum of squares of gradients this large; step_rules.cpp derives the limit.
constexpr double kTooLarge = 1e15;

struct Maximum {
  std::int64_t iteration = 0;
  double value = 0;
};

/// A rise of a rank's largest gradient.
struct Climb {
  const RankEvidence* rank = nullptr;
  Maximum first;
  Maximum last;
  std::size_t rises = 0;
  std::size_t steps = 0;
  [[nodiscard]] double growth() const { return last.value / first.value; }
};

/// True if this step's own gradients belong to its history: none was bad on the rank.
bool is_finite_step(const RankEvidence& rank) {
  return rank.bad(Phase::grad_local).empty() && rank.bad(Phase::grad_reduced).empty() &&
         rank.bad(Phase::grad_norm).empty();
}

/// Maxima up to the step before the finding, or including it if its gradients are finite. Steps
/// whose gradients were all zero are skipped.
std::vector<Maximum> maxima_of(const RankEvidence& rank) {
  std::vector<Maximum> maxima;
  const auto& ledger = rank.ledger();
  if (!ledger.history) return maxima;
  const std::int64_t end = ledger.iteration + (is_finite_step(rank) ? 1 : 0);
  for (std::size_t i = 0; i < ledger.history->iterations.size(); ++i) {
    const Maximum maximum{ledger.history->iterations[i], ledger.history->absmax[i]};
    if (maximum.iteration < end && maximum.value > 0) maxima.push_back(maximum);
  }
  return maxima;
}

bool tells_of_steps_before(const RankEvidence& rank, const std::vector<Maximum>& maxima) {
  return maxima.size() >= kFewestSteps &&
         maxima.back().iteration + kLargestGap >= rank.ledger().iteration;
}

/// The steepest stretch that ends at the last step.
std::optional<Climb> climb_of(const RankEvidence& rank) {
  const auto maxima = maxima_of(rank);
  if (!tells_of_steps_before(rank, maxima) || maxima.back().value < kLeastTop) return std::nullopt;
  const Maximum& last = maxima.back();
  std::optional<Climb> steepest;
  std::size_t rises = 0;
  double largest_step = 1;
  for (std::size_t steps = 1; steps < maxima.size(); ++steps) {
    const Maximum& first = maxima[maxima.size() - 1 - steps];
    const double step = maxima[maxima.size() - steps].value / first.value;
    if (step >= 1) ++rises;
    largest_step = std::max(largest_step, step);
    if (steps + 1 < kFewestSteps) continue;
    if (4 * rises < 3 * steps) {
      if (steps + 1 == kFewestSteps) return std::nullopt;  // the climb ended before the finding
      continue;
    }
    const Climb climb{&rank, first, last, rises, steps};
    const double growth = climb.growth();
    if (growth < kLeastGrowth || growth / largest_step < kLeastGrowthBesideJump) continue;
    if (!steepest || growth > steepest->growth()) steepest = climb;
  }
  return steepest;
}

class DivergenceRule {
 public:
  explicit DivergenceRule(const Incident& incident) : incident_(incident) {
    for (const RankEvidence& rank : incident.ranks()) {
      if (!tells_of_steps_before(rank, maxima_of(rank))) continue;
      known_.insert(rank.rank());
      if (auto climb = climb_of(rank)) climbs_.push_back(*climb);
    }
  }

  void judge(Origin& origin) const {
    if (!may_be_overflow(origin)) return;
    const Climb* const climb = climb_before(origin);
    if (climb == nullptr) {
      if (is_overflow(origin)) add_jump(origin);
      return;
    }
    const bool has_reached_the_limit = climb->last.value >= kTooLarge;
    if (!is_overflow(origin) && !has_reached_the_limit) return;
    origin.cause = Cause::divergence;
    origin.facts.push_back(fact_of(*climb));
  }

 private:
  /// False if no size of gradients could cause the origin: parameters that are bad before or after
  /// the step have rules of their own.
  static bool may_be_overflow(const Origin& origin) {
    if (origin.cause == Cause::operator_overflow) return true;
    return origin.cause == Cause::unknown && origin.phase >= Phase::forward &&
           origin.phase <= Phase::grad_norm;
  }

  /// True for an Inf, or for a non-finite norm of finite gradients of which one is so large that
  /// the sum of squares overflowed.
  bool is_overflow(const Origin& origin) const {
    if (origin.cause == Cause::operator_overflow) return true;
    if (origin.tensor) return origin.tensor->pos_inf + origin.tensor->neg_inf > 0;
    return origin.phase == Phase::grad_norm &&
           std::ranges::any_of(origin.candidates, [&](int rank) {
             const RankEvidence* const evidence = incident_.find(rank);
             return evidence != nullptr && evidence->ledger().absmax > kTooLarge;
           });
  }

  /// The steepest climb of the candidates. If no candidate left a history, the steepest of the
  /// other ranks, if most of them climbed.
  const Climb* climb_before(const Origin& origin) const {
    const bool is_of_candidates = has_known_candidate(origin);
    if (!is_of_candidates && 2 * climbs_.size() <= known_.size()) return nullptr;
    const Climb* steepest = nullptr;
    for (const Climb& climb : climbs_) {
      if (is_of_candidates && !is_candidate(origin, climb.rank->rank())) continue;
      if (steepest == nullptr || climb.growth() > steepest->growth()) steepest = &climb;
    }
    return steepest;
  }

  static bool is_candidate(const Origin& origin, int rank) {
    return std::ranges::binary_search(origin.candidates, rank);
  }

  bool has_known_candidate(const Origin& origin) const {
    return std::ranges::any_of(origin.candidates, [&](int rank) { return known_.contains(rank); });
  }

  Fact fact_of(const Climb& climb) const {
    return {.kind = FactKind::climbed,
            .ranks = {climb.rank->rank()},
            .step = climb.first.iteration,
            .last_step = climb.last.iteration,
            .count = static_cast<std::int64_t>(climb.rises),
            .of = static_cast<std::int64_t>(climb.steps),
            .climbed_on = static_cast<std::int64_t>(climbs_.size()),
            .histories = static_cast<std::int64_t>(known_.size()),
            .value = climb.first.value,
            .last_value = climb.last.value,
            .parameter = climb.rank->ledger().history->parameter};
  }

  /// Adds the evidence against a divergence.
  void add_jump(Origin& origin) const {
    if (!has_known_candidate(origin)) return;
    const RankEvidence* largest = nullptr;
    Maximum top;
    std::vector<Maximum> shown;
    for (const int rank : origin.candidates) {
      if (!known_.contains(rank)) continue;
      const RankEvidence* const evidence = incident_.find(rank);
      auto maxima = maxima_of(*evidence);
      if (maxima.back().iteration == evidence->ledger().iteration) maxima.pop_back();
      const auto& highest = *std::ranges::max_element(maxima, {}, &Maximum::value);
      if (largest != nullptr && highest.value <= top.value) continue;
      largest = evidence;
      top = highest;
      shown = std::move(maxima);
    }
    origin.facts.push_back({.kind = FactKind::did_not_climb,
                            .ranks = {largest->rank()},
                            .step = shown.front().iteration,
                            .last_step = shown.back().iteration,
                            .value = top.value});
  }

  const Incident& incident_;
  std::set<int> known_;  // ranks with a history of the steps before
  std::vector<Climb> climbs_;
};

}  // namespace

void judge_divergence(const Incident& incident, std::vector<Origin>& origins) {
  if (origins.empty()) return;
  const DivergenceRule rule(incident);
  for (Origin& origin : origins) rule.judge(origin);
}

}  // namespace nanlocator::inline locate_room
