#include "locate/make_origin.hpp"

#include <optional>

#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

std::optional<int> shared_replica(const Incident& incident, const std::vector<int>& candidates) {
  std::optional<int> replica;
  for (const int rank : candidates) {
    const Place* place = incident.place_of(rank);
    if (place == nullptr || (replica && *replica != place->dp)) return std::nullopt;
    replica = place->dp;
  }
  return replica;
}

}  // namespace

Origin make_origin(const Incident& incident, Phase phase, Cause cause, Confidence confidence,
                   const std::vector<int>& candidates) {
  Origin origin;
  origin.phase = phase;
  origin.iteration = incident.ranks().front().ledger().iteration;
  origin.cause = cause;
  origin.place_confidence = confidence;
  set_candidates(origin, incident, candidates);
  return origin;
}

void set_candidates(Origin& origin, const Incident& incident, const std::vector<int>& candidates) {
  origin.candidates = candidates;
  origin.coordinates.reset();
  if (candidates.size() == 1) {
    if (const auto* rank = incident.find(candidates.front())) {
      origin.coordinates = rank->coordinates();
    }
  }
  origin.data_parallel_replica = shared_replica(incident, candidates);
}

void set_parameter(Origin& origin, const std::string& name, const Sighting& sighting) {
  origin.parameter = name;
  origin.chunk = sighting.chunk;
  origin.tensor = tensor_of(sighting);
}

}  // namespace nanlocator::inline locate_room
