#include "locate/lanes.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace nanlocator::inline locate_room {
namespace {

/// A lane's stages while it is filled: backward visits the highest index first.
using Stages = std::map<std::int64_t, std::map<int, std::vector<const Place*>>, std::greater<>>;

/// Assigns ranks to stages. A rank that did not answer, or knows no parameters, is in every stage
/// of its pipeline rank that the others know.
Stages lay_out(std::span<const Place* const> places, int pipeline_size) {
  std::set<std::int64_t> indices;
  std::set<int> pipeline_ranks;
  for (const Place* place : places) {
    pipeline_ranks.insert(place->pp);
    if (place->evidence == nullptr) continue;
    for (const auto& parameter : place->evidence->ledger().backward_order) {
      indices.insert(std::int64_t{parameter.chunk} * pipeline_size + place->pp);
    }
  }
  std::set<std::int64_t> chunks = {0};
  for (const std::int64_t index : indices) chunks.insert(index / pipeline_size);
  Stages stages;
  for (const Place* place : places) {
    for (const std::int64_t chunk : chunks) {
      const std::int64_t index = chunk * pipeline_size + place->pp;
      stages[index][place->tp].push_back(place);
    }
  }
  return stages;
}

class CellFiller {
 public:
  CellFiller(Phase phase, int chunk, const BadFilter& keep)
      : phase_(phase), chunk_(chunk), keep_(keep) {}

  Cell fill(int tp, const std::vector<const Place*>& places) {
    Cell cell;
    cell.tp = tp;
    for (const Place* place : places) {
      cell.ranks.push_back(place->rank);
      if (place->evidence == nullptr) continue;
      cell.has_evidence |= place->evidence->scanned(phase_);
      if (cell.steps.empty()) {
        start(cell, *place->evidence);
      } else {
        merge(cell, *place->evidence);
      }
    }
    std::ranges::sort(cell.ranks);
    return cell;
  }

 private:
  std::pair<Status, const Sighting*> look(const RankEvidence& rank, std::size_t position) const {
    const BadParameter* const bad = rank.find_bad(phase_, position);
    if (bad == nullptr) return {rank.status(phase_, position), nullptr};
    if (!keep_(rank, *bad)) return {Status::unknown, nullptr};
    return {Status::bad, bad->sighting};
  }

  void start(Cell& cell, const RankEvidence& rank) {
    for (std::size_t position = 0; position < rank.size(); ++position) {
      if (rank.parameter(position).chunk != chunk_) continue;
      const auto [status, sighting] = look(rank, position);
      cell.steps.push_back(
          {.parameter = &rank.parameter(position), .status = status, .sighting = sighting});
    }
  }

  static void merge_step(Step& step, Status status, const Sighting* sighting) {
    if (step.status == Status::bad || status == Status::unknown) return;
    step.status = status;
    step.sighting = sighting;
  }

  void merge(Cell& cell, const RankEvidence& rank) {
    for (Step& step : cell.steps) {
      const auto position = rank.position_of(step.parameter->name);
      if (!position) continue;
      const auto [status, sighting] = look(rank, *position);
      merge_step(step, status, sighting);
    }
  }

  Phase phase_;
  int chunk_;
  const BadFilter& keep_;
};

bool have_one_order(const Stage& stage) {
  const Cell* first = nullptr;
  for (const Cell& cell : stage.cells) {
    if (cell.steps.empty()) continue;
    if (first == nullptr) {
      first = &cell;
      continue;
    }
    const auto name_of_step = [](const Step& step) -> const std::string& {
      return step.parameter->name;
    };
    if (!std::ranges::equal(first->steps, cell.steps, {}, name_of_step, name_of_step)) return false;
  }
  return true;
}

/// Adds bad parameters that are in no cell: unknown names, and other ranks' experts in a merged
/// lane.
void add_unplaced(Lane& lane, std::span<const Place* const> places, Phase phase,
                  const BadFilter& keep) {
  std::set<std::string_view> placed_names;
  for (const Stage& stage : lane.stages) {
    for (const Cell& cell : stage.cells) {
      for (const Step& step : cell.steps) {
        if (step.status == Status::bad) placed_names.insert(step.parameter->name);
      }
    }
  }
  std::map<std::string_view, Unplaced> unplaced;
  for (const Place* place : places) {
    if (place->evidence == nullptr) continue;
    for (const BadParameter& bad : place->evidence->bad(phase)) {
      if (placed_names.contains(bad.name) || !keep(*place->evidence, bad)) continue;
      Unplaced& entry = unplaced[bad.name];
      if (entry.bad == nullptr) entry.bad = &bad;
      entry.ranks.push_back(place->rank);
    }
  }
  for (auto& [name, entry] : unplaced) {
    std::ranges::sort(entry.ranks);
    lane.unplaced.push_back(std::move(entry));
  }
}

Lane make_lane(const Incident& incident, std::span<const Place* const> places, Phase phase,
               const BadFilter& keep) {
  const int pipeline_size = incident.pipeline_size();
  Lane lane;
  lane.dp = places.front()->dp;
  lane.cp = places.front()->cp;
  std::set<int> pipeline_ranks;
  for (const Place* place : places) {
    pipeline_ranks.insert(place->pp);
    if (place->evidence != nullptr && place->evidence->size() > 0) {
      lane.is_order_observed &= place->evidence->ledger().is_backward_order_observed;
    }
  }
  lane.has_all_stages = std::ssize(pipeline_ranks) == pipeline_size;
  for (const auto& [index, cells] : lay_out(places, pipeline_size)) {
    Stage stage;
    stage.index = index;
    stage.pp = static_cast<int>(index % pipeline_size);
    CellFiller filler(phase, static_cast<int>(index / pipeline_size), keep);
    for (const auto& [tp, members] : cells) stage.cells.push_back(filler.fill(tp, members));
    stage.has_unseen_cell = !incident.unplaced().empty();
    for (const Cell& cell : stage.cells) {
      stage.has_unseen_cell |= !cell.has_evidence;
      for (const Step& step : cell.steps) {
        if (step.status == Status::bad && step.parameter->is_tp_duplicate) {
          stage.bad_duplicates.insert(step.parameter->name);
        }
      }
    }
    // Positions in different orders cannot be compared; only layers can.
    if (!have_one_order(stage)) lane.is_order_observed = false;
    lane.stages.push_back(std::move(stage));
  }
  add_unplaced(lane, places, phase, keep);
  return lane;
}

}  // namespace

std::vector<Lane> make_lanes(const Incident& incident, std::span<const Place* const> places,
                             Phase phase) {
  std::map<std::pair<int, int>, std::vector<const Place*>> members;
  for (const Place* place : places) members[{place->dp, place->cp}].push_back(place);
  std::vector<Lane> lanes;
  for (const auto& [where, lane_places] : members) {
    lanes.push_back(make_lane(incident, lane_places, phase,
                              [](const RankEvidence&, const BadParameter&) { return true; }));
  }
  return lanes;
}

Lane make_merged_lane(const Incident& incident, std::span<const Place* const> places, Phase phase,
                      const BadFilter& keep) {
  return make_lane(incident, places, phase, keep);
}

}  // namespace nanlocator::inline locate_room
