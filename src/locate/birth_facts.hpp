// One rank's births that made its step bad, and what each of them says about its origin: cause,
// detail, facts.
#pragma once

#include <vector>

#include "incident/incident.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// A birth that made the step bad, with the births that descend from it.
struct Root {
  const RankEvidence* rank = nullptr;
  const Birth* birth = nullptr;
  std::vector<const Birth*> descendants;  // in execution order
};

/// In order of birth: of several bad weights, the one read first comes first.
[[nodiscard]] std::vector<Root> roots_of(const RankEvidence& rank);

/// Everything that the birth and its descendants reached.
[[nodiscard]] std::vector<Reached> reached_by(const Root& root);

/// An origin on the birth's rank.
[[nodiscard]] Origin origin_of(const Root& root);

}  // namespace nanlocator::inline locate_room
