#include "incident/incident.hpp"

#include <algorithm>
#include <unordered_set>

#include "map/coordinates_json.hpp"
#include "map/rank_order.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline incident_room {

namespace {

/// True as far as the first bad element and the count of bad elements show.
bool is_within(const TensorStats& stats, const std::optional<ElementRange>& shard) {
  return shard && shard->contains(stats.first_bad) &&
         (shard->row > 0 || stats.nonfinite() <= shard->end - stats.first_bad);
}

}  // namespace

RankEvidence::RankEvidence(const Ledger& ledger) : ledger_(&ledger) {
  std::map<Phase, std::unordered_set<std::string>> seen;
  for (const Sighting& sighting : ledger.sightings) {
    if (sighting.stats.is_finite() || sighting.crossing) continue;  // crossings.hpp handles those
    if (sighting.phase == Phase::loss) bad_losses_.push_back(&sighting);
    BadParameter bad;
    bad.position = position_of(sighting);
    bad.sighting = &sighting;
    if (bad.position) {
      bad.name = parameter(*bad.position).name;
      bad.is_owned = is_within(sighting.stats, parameter(*bad.position).shard);
    } else if (!sighting.parameter.empty()) {
      bad.name = sighting.parameter;
    } else if (sighting.parameter_id) {
      bad.name = "parameter " + std::to_string(*sighting.parameter_id);
    } else {
      continue;  // not a parameter: no rule of this level uses it
    }
    if (!seen[sighting.phase].insert(bad.name).second) continue;
    auto& list = bad_[sighting.phase];
    if (bad.position) bad_by_position_[sighting.phase][*bad.position] = list.size();
    list.push_back(std::move(bad));
  }
}

void RankEvidence::index_positions() const {
  if (is_indexed_) return;
  is_indexed_ = true;
  for (std::size_t position = 0; position < size(); ++position) {
    position_by_name_.try_emplace(parameter(position).name, position);
    position_by_id_.try_emplace(parameter(position).id, position);
  }
}

std::optional<std::size_t> RankEvidence::position_of(std::string_view name) const {
  index_positions();
  const auto found = position_by_name_.find(name);
  if (found == position_by_name_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::size_t> RankEvidence::position_of(const Sighting& sighting) const {
  if (!sighting.parameter.empty()) return position_of(std::string_view(sighting.parameter));
  index_positions();
  if (!sighting.parameter_id) return std::nullopt;
  const auto found = position_by_id_.find(*sighting.parameter_id);
  if (found == position_by_id_.end()) return std::nullopt;
  return found->second;
}

/// Null if the phase was not scanned.
const Coverage* RankEvidence::coverage_of(Phase phase) const noexcept {
  const auto found = std::ranges::find(ledger_->coverage, phase, &Coverage::phase);
  return found != ledger_->coverage.end() ? &*found : nullptr;
}

bool RankEvidence::scanned(Phase phase) const noexcept {
  return ledger_->is_complete && coverage_of(phase) != nullptr;
}

Status RankEvidence::status(Phase phase, std::size_t position) const {
  if (find_bad(phase, position) != nullptr) return Status::bad;
  if (!ledger_->is_complete) return Status::unknown;
  const Coverage* const coverage = coverage_of(phase);
  const bool is_covered = coverage != nullptr &&
                          std::ranges::binary_search(coverage->parameters, parameter(position).id);
  return is_covered ? Status::clean : Status::unknown;
}

std::size_t RankEvidence::scanned_count(Phase phase) const {
  const Coverage* const coverage = coverage_of(phase);
  return coverage != nullptr ? coverage->parameters.size() : 0;
}

Status RankEvidence::status(Phase phase, std::string_view name) const {
  const auto position = position_of(name);
  return position ? status(phase, *position) : Status::unknown;
}

std::optional<double> RankEvidence::absmax(Phase phase, std::string_view name) const {
  const auto position = position_of(name);
  return position ? absmax(phase, *position) : std::nullopt;
}

std::optional<double> RankEvidence::absmax(Phase phase, std::size_t position) const {
  const Coverage* const coverage = coverage_of(phase);
  if (coverage == nullptr) return std::nullopt;
  const auto& ids = coverage->parameters;
  const auto found = std::ranges::lower_bound(ids, parameter(position).id);
  const auto place = static_cast<std::size_t>(found - ids.begin());
  const bool is_known =
      found != ids.end() && *found == parameter(position).id && place < coverage->absmax.size();
  return is_known ? std::optional<double>(coverage->absmax[place]) : std::nullopt;
}

std::optional<double> RankEvidence::absmax(Phase phase) const {
  const Coverage* const coverage = coverage_of(phase);
  if (coverage == nullptr || coverage->absmax.empty()) return std::nullopt;
  return std::ranges::max(coverage->absmax);
}

std::span<const BadParameter> RankEvidence::bad(Phase phase) const {
  const auto found = bad_.find(phase);
  if (found == bad_.end()) return {};
  return found->second;
}

const BadParameter* RankEvidence::find_bad(Phase phase, std::size_t position) const {
  const auto positions = bad_by_position_.find(phase);
  if (positions == bad_by_position_.end()) return nullptr;
  const auto found = positions->second.find(position);
  return found == positions->second.end() ? nullptr : &bad_.at(phase)[found->second];
}

Incident::Incident(std::span<const Ledger> ledgers, int world_size) : world_size_(world_size) {
  std::vector<const Ledger*> ordered;
  for (const Ledger& ledger : ledgers) ordered.push_back(&ledger);
  std::ranges::stable_sort(ordered, {}, [](const Ledger* each) { return each->coordinates.rank; });

  ranks_.reserve(ordered.size());  // places point to its elements
  for (const Ledger* ledger : ordered) {
    const auto& coordinates = ledger->coordinates;
    const std::string name = "the ledger of rank " + std::to_string(coordinates.rank);
    try {
      check_coordinates(coordinates);
    } catch (const UsageError& error) {
      throw UsageError(name + ": " + error.what());
    }
    if (coordinates.rank < 0 || coordinates.rank >= world_size) {
      throw UsageError(name + ": expected a rank from 0 to " + std::to_string(world_size - 1) +
                       ", as the world has " + std::to_string(world_size) + " ranks");
    }
    if (!ranks_.empty() && ranks_.back().rank() == coordinates.rank) {
      throw UsageError(name + " came twice: pass one ledger per rank, all of one iteration");
    }
    const Ledger& first = *ordered.front();
    const auto& layout = first.coordinates;
    if (ledger->iteration != first.iteration || ledger->run_id != first.run_id) {
      throw AgreementError(name + " is of run \"" + ledger->run_id + "\", iteration " +
                           std::to_string(ledger->iteration) + "; that of rank " +
                           std::to_string(layout.rank) + " is of run \"" + first.run_id +
                           "\", iteration " + std::to_string(first.iteration) +
                           ": pass ledgers of one iteration of one run");
    }
    if (coordinates.tp.size != layout.tp.size || coordinates.pp.size != layout.pp.size ||
        coordinates.dp.size != layout.dp.size || coordinates.cp.size != layout.cp.size ||
        coordinates.ep.size != layout.ep.size) {
      throw AgreementError(name + " has other parallel sizes than that of rank " +
                           std::to_string(layout.rank) + ": pass ledgers of one job");
    }
    has_cut_off_ledgers_ |= !ledger->is_complete;
    is_order_observed_ &= ledger->is_backward_order_observed;
    ranks_.emplace_back(*ledger);
    layout_ = layout;
  }
  for (const RankEvidence& each : ranks_) {
    const auto& at = each.coordinates();
    places_.push_back({each.rank(), at.tp.rank, at.pp.rank, at.dp.rank, at.cp.rank, &each});
  }
  std::size_t next = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    if (next < ranks_.size() && ranks_[next].rank() == rank) {
      ++next;
    } else {
      silent_.push_back(rank);
    }
  }
  if (!silent_.empty()) place_silent_ranks(world_size);
}

/// Places silent ranks by the numbering of those that answered, if that is unambiguous
/// (map/rank_order.hpp).
void Incident::place_silent_ranks(int world_size) {
  std::vector<RankCoordinates> known;
  for (const RankEvidence& rank : ranks_) known.push_back(rank.coordinates());
  const RankOrder order(layout_, known.empty() ? 0 : world_size, known);
  for (const int rank : silent_) {
    if (const auto place = order.place_of(rank)) {
      places_.push_back(
          {rank, place->tp.rank, place->pp.rank, place->dp.rank, place->cp.rank, nullptr});
    } else {
      unplaced_.push_back(rank);
    }
  }
  std::ranges::sort(places_, {}, &Place::rank);
}

/// Expert-parallel groups are consecutive blocks of `ep` ranks of the data-parallel group with its
/// context-parallel ranks (parallel_state.py, RankGenerator). A replica holds the whole dp ranks of
/// one block. If ep does not divide evenly, it holds all of them: too large a replica costs
/// precision, too small a one would blame the wrong rank.
int Incident::replica_of(const Place& place) const noexcept {
  const int ep = layout_.ep.size, cp = layout_.cp.size;
  if (ep <= cp) return cp % ep == 0 ? place.dp : 0;
  return ep % cp == 0 ? place.dp / (ep / cp) : 0;
}

const Place* Incident::place_of(int rank) const {
  const auto found = std::ranges::lower_bound(places_, rank, {}, &Place::rank);
  return found != places_.end() && found->rank == rank ? &*found : nullptr;
}

const RankEvidence* Incident::find(int rank) const {
  const auto found = std::ranges::lower_bound(ranks_, rank, {}, &RankEvidence::rank);
  return found != ranks_.end() && found->rank() == rank ? &*found : nullptr;
}

}  // namespace nanlocator::inline incident_room
