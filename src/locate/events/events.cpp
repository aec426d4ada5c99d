#include "locate/events/events.hpp"

#include <utility>

namespace nanlocator::inline locate_room::events {

void Sources::add(Source source) {
  if (++counts_[source.origin.phase] <= kMostPerPhase) all_.push_back(std::move(source));
}

bool Sources::is_full(Phase phase) {
  auto& count = counts_[phase];
  if (count < kMostPerPhase) return false;
  ++count;
  return true;
}

EventOrigins origins_of_events(const Findings& seen, const RerunOutcome& rerun) {
  Sources sources;
  add_weights(seen, sources);
  const Crossed crossed = add_crossings(seen, sources);
  add_gradients(seen, crossed, sources);
  add_reductions(seen, crossed, sources);
  add_updates(seen, sources);
  EventOrigins found;
  found.facts = sources.facts();
  for (const auto& [phase, count] : sources.counts()) {
    if (count <= Sources::kMostPerPhase) continue;
    found.facts.push_back({.kind = FactKind::origins_not_listed,
                           .phase = phase,
                           .count = static_cast<std::int64_t>(count - Sources::kMostPerPhase)});
  }
  const bool has_crossings = !seen.crossings().events().empty();
  found.origins = refine(seen.incident(), std::move(sources.all()),
                         births_of(seen.incident(), has_crossings), rerun);
  return found;
}

}  // namespace nanlocator::inline locate_room::events
