#include "locate/judges.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace nanlocator::inline locate_room {
namespace {

/// The earlier step, if it left bad gradients on each of the ranks.
std::optional<std::int64_t> step_that_left_them(const Incident& incident,
                                                const std::vector<int>& ranks) {
  std::optional<std::int64_t> step;
  for (const int each : ranks) {
    const RankEvidence* const rank = incident.find(each);
    if (rank == nullptr || !rank->ledger().gradients_left_by) return std::nullopt;
    step = rank->ledger().gradients_left_by;
  }
  return step;
}

/// What the earlier gradients alone would show: bad gradients, or a backward that adds to them.
bool may_be_left(const Origin& origin) {
  const bool is_in_gradients = origin.cause == Cause::unknown &&
                               origin.phase >= Phase::grad_local &&
                               origin.phase <= Phase::grad_norm;
  return is_in_gradients || (origin.cause == Cause::bad_input && origin.phase == Phase::backward);
}

}  // namespace

void judge_left_gradients(const Incident& incident, std::vector<Origin>& origins) {
  std::vector<Origin> judged;
  bool is_told = false;
  for (Origin& origin : origins) {
    const auto step =
        may_be_left(origin) ? step_that_left_them(incident, origin.candidates) : std::nullopt;
    if (step && is_told) continue;
    if (step) {
      is_told = true;
      origin.cause = Cause::left_gradients;
      origin.phase = Phase::grad_local;
      origin.direction = Direction::none;
      origin.op.clear();
      origin.facts = {{.kind = FactKind::gradients_left, .step = step}};
    }
    judged.push_back(std::move(origin));
  }
  origins = std::move(judged);
}

}  // namespace nanlocator::inline locate_room
