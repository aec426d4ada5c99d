#include "report/rank_picture.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "map/rank_order.hpp"

namespace nanlocator::inline report_room {
namespace {

class Picture {
 public:
  explicit Picture(const RunReport& report) : report_(report) {}

  RankPicture draw() && {
    take_ledgers();
    take_verdict();
    list_ranks();
    place_ranks();
    return std::move(picture_);
  }

 private:
  void take_ledgers() {
    // Sorted by content if a rank has two, so that their order does not matter.
    std::vector<const Ledger*> ledgers;
    for (const Ledger& ledger : report_.ledgers) ledgers.push_back(&ledger);
    std::ranges::stable_sort(ledgers, [](const Ledger* a, const Ledger* b) {
      if (a->coordinates.rank != b->coordinates.rank)
        return a->coordinates.rank < b->coordinates.rank;
      return a->sightings.size() > b->sightings.size();
    });
    for (const Ledger* ledger : ledgers) {
      const int rank = ledger->coordinates.rank;
      if (!ledger_of_.emplace(rank, ledger).second) {
        picture_.notes.push_back("rank " + std::to_string(rank) +
                                 " has two ledgers; the one with more sightings is shown");
      }
      coordinates_of_.emplace(rank, ledger->coordinates);
    }
  }

  void take_verdict() {
    for (const Origin& origin : report_.verdict.origins) {
      if (origin.coordinates) {
        born_.insert(origin.coordinates->rank);
        coordinates_of_.emplace(origin.coordinates->rank, *origin.coordinates);
      } else if (origin.candidates.size() == 1 || origin.is_on_every_candidate) {
        born_.insert(origin.candidates.begin(), origin.candidates.end());
      } else {
        candidates_.insert(origin.candidates.begin(), origin.candidates.end());
      }
    }
    received_.insert(report_.verdict.spread.ranks.begin(), report_.verdict.spread.ranks.end());
    silent_.insert(report_.verdict.silent_ranks.begin(), report_.verdict.silent_ranks.end());
  }

  void list_ranks() {
    std::set<int> known;
    for (const auto& ranks : {born_, candidates_, received_, silent_}) {
      known.insert(ranks.begin(), ranks.end());
    }
    int world_size = report_.run ? report_.run->world_size : 0;
    for (const auto& [rank, coordinates] : coordinates_of_) {
      known.insert(rank);
      world_size = std::max(world_size, coordinates.world_size);
    }
    if (world_size <= kMostRanksDrawn) {
      for (int rank = 0; rank < world_size; ++rank) known.insert(rank);
    } else {
      picture_.notes.push_back("the run says that it has " + std::to_string(world_size) +
                               " ranks: only those are listed of which something is known");
    }
    for (const int rank : known) {
      if (rank < 0) continue;
      if (picture_.ranks.size() == kMostRanksDrawn) break;
      const auto ledger = ledger_of_.find(rank);
      PageRank entry{.rank = rank,
                     .is_silent = silent_.contains(rank),
                     .coordinates = {},
                     .ledger = ledger == ledger_of_.end() ? nullptr : ledger->second};
      entry.state = state_of(entry);
      picture_.ranks.push_back(entry);
    }
  }

  [[nodiscard]] RankState state_of(const PageRank& rank) const {
    if (born_.contains(rank.rank)) return RankState::born;
    if (candidates_.contains(rank.rank)) return RankState::candidate;
    if (rank.is_silent) return RankState::silent;
    bool is_bad = false;
    bool is_early = false;
    if (rank.ledger) {
      for (const Sighting& seen : rank.ledger->sightings) {
        is_bad = is_bad || !seen.stats.is_finite();
        is_early = is_early || (!seen.stats.is_finite() && seen.phase < Phase::grad_reduced);
      }
    }
    if (is_bad && !is_early) return RankState::reduced;
    if (is_bad || received_.contains(rank.rank)) return RankState::received;
    const bool has_scanned =
        !rank.ledger || !rank.ledger->coverage.empty() || !rank.ledger->crossings.empty();
    if (rank.ledger && (!rank.ledger->is_complete || !has_scanned)) return RankState::unknown;
    return RankState::clean;
  }

  void place_ranks() {
    if (coordinates_of_.empty()) return;
    std::vector<RankCoordinates> known;
    for (const auto& [rank, coordinates] : coordinates_of_) known.push_back(coordinates);
    const bool are_all_listed = picture_.ranks.back().rank + 1 == std::ssize(picture_.ranks);
    const RankOrder order(known.front(), are_all_listed ? picture_.ranks.back().rank + 1 : 0,
                          known);
    picture_.layout = order.layout();
    for (PageRank& rank : picture_.ranks) {
      const auto found = coordinates_of_.find(rank.rank);
      rank.coordinates = found != coordinates_of_.end() ? found->second : order.place_of(rank.rank);
    }
  }

  const RunReport& report_;
  RankPicture picture_;
  std::map<int, const Ledger*> ledger_of_;
  std::map<int, RankCoordinates> coordinates_of_;
  std::set<int> born_, candidates_, received_, silent_;
};

}  // namespace

RankPicture picture_ranks(const RunReport& report) {
  return Picture(report).draw();
}

}  // namespace nanlocator::inline report_room
