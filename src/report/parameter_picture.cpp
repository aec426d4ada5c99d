#include "report/parameter_picture.hpp"

#include <algorithm>
#include <list>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace nanlocator::inline report_room {
namespace {

/// Merges the ranks' backward orders. Ranks of one stage have the same order except for experts,
/// which differ by rank. A new name is inserted after its predecessor on its rank.
class Merge {
 public:
  using Entries = std::list<PageParameter>;

  /// The entries of this rank's parameters, in its order.
  std::vector<PageParameter*> take(const Ledger& ledger) {
    std::vector<PageParameter*> entries;
    // Backward visits (chunk, stage) in descending order; within one of them the rank's order
    // counts.
    std::map<int, Entries::iterator> next;  // by chunk
    for (const ParameterRecord& parameter : ledger.backward_order) {
      const std::pair place(-parameter.chunk, -ledger.coordinates.pp.rank);
      Entries& entries_there = places_[place];
      auto& next_there = next.try_emplace(parameter.chunk, entries_there.begin()).first->second;
      const auto known = by_name_.find(parameter.name);
      if (known != by_name_.end()) {
        entries.push_back(&*known->second.entry);
        if (known->second.place == place) next_there = std::next(known->second.entry);
        continue;
      }
      const auto added = entries_there.insert(next_there, {.name = parameter.name,
                                                           .stage = ledger.coordinates.pp.rank,
                                                           .chunk = parameter.chunk,
                                                           .shape = parameter.shape});
      by_name_.emplace(added->name, Position{place, added});
      entries.push_back(&*added);
    }
    return entries;
  }

  [[nodiscard]] std::vector<PageParameter> parameters() && {
    std::vector<PageParameter> all;
    for (auto& [place, entries] : places_) {
      std::ranges::move(entries, std::back_inserter(all));
    }
    return all;
  }

 private:
  using Place = std::pair<int, int>;
  struct Position {
    Place place;
    Entries::iterator entry;
  };
  std::map<Place, Entries> places_;
  std::unordered_map<std::string_view, Position> by_name_;  // keys are views into the entries
};

std::size_t index_of(Phase phase) {
  return static_cast<std::size_t>(std::ranges::find(kParameterPhases, phase) -
                                  kParameterPhases.begin());
}

void count(const Ledger& ledger, const std::vector<PageParameter*>& entries) {
  std::unordered_map<std::int64_t, PageParameter*> by_id;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    by_id.emplace(ledger.backward_order[i].id, entries[i]);
  }
  for (const Coverage& coverage : ledger.coverage) {
    const std::size_t phase = index_of(coverage.phase);
    if (phase == kParameterPhases.size()) continue;
    for (const std::int64_t id : coverage.parameters) {
      if (const auto entry = by_id.find(id); entry != by_id.end()) ++entry->second->covered[phase];
    }
  }
  std::vector<std::pair<std::size_t, PageParameter*>> bad;
  for (const Sighting& sighting : ledger.sightings) {
    const std::size_t phase = index_of(sighting.phase);
    if (phase == kParameterPhases.size() || !sighting.parameter_id) continue;
    if (sighting.stats.is_finite()) continue;
    if (const auto entry = by_id.find(*sighting.parameter_id); entry != by_id.end())
      bad.emplace_back(phase, entry->second);
  }
  std::ranges::sort(bad);  // a parameter seen twice in a phase counts once
  const auto repeats = std::ranges::unique(bad);
  bad.erase(repeats.begin(), repeats.end());
  for (const auto& [phase, entry] : bad) ++entry->bad[phase];
}

}  // namespace

ParameterPicture picture_parameters(std::span<const PageRank> ranks) {
  ParameterPicture picture;
  Merge merge;
  for (const PageRank& rank : ranks) {
    if (!rank.ledger) continue;
    picture.is_order_observed =
        picture.is_order_observed && rank.ledger->is_backward_order_observed;
    count(*rank.ledger, merge.take(*rank.ledger));
  }
  picture.parameters = std::move(merge).parameters();
  return picture;
}

}  // namespace nanlocator::inline report_room
