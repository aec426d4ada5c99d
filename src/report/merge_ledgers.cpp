#include "report/merge_ledgers.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

namespace nanlocator::inline report_room {
namespace {

/// More ranks than any cluster has. A damaged ledger may claim two thousand million, and each
/// silent rank is listed.
constexpr int kLargestWorld = 1 << 20;

using Sizes = std::array<int, 6>;

Sizes sizes_of(const RankCoordinates& at) {
  return {at.world_size, at.tp.size, at.pp.size, at.dp.size, at.cp.size, at.ep.size};
}

std::string describe(const Sizes& sizes) {
  constexpr std::array<const char*, 6> kNames = {"ranks ", "tp ", "pp ", "dp ", "cp ", "ep "};
  std::string text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + (kNames[i] + std::to_string(sizes[i]));
  }
  return text;
}

/// "tp1pp0dp1" of "a17-ledger_tp1pp0dp1.jsonl"; "" if the file was renamed.
std::string_view place_in_name(std::string_view name) {
  constexpr std::string_view kPrefix = "ledger_";
  constexpr std::string_view kSuffix = ".jsonl";
  const std::size_t at = name.rfind(kPrefix);
  if (at == std::string_view::npos || !name.ends_with(kSuffix)) return {};
  name.remove_prefix(at + kPrefix.size());
  name.remove_suffix(std::min(kSuffix.size(), name.size()));
  const bool is_place = name.starts_with("tp") && name.find("pp") != std::string_view::npos &&
                        name.find_first_not_of("tpdc0123456789") == std::string_view::npos;
  return is_place ? name : std::string_view{};
}

/// The rank of a place in Megatron's default order: tp varies fastest, then cp, dp, pp
/// (megatron/core/parallel_state.py, order "tp-cp-ep-dp-pp").
std::int64_t rank_in_default_order(const RankCoordinates& at) {
  return at.tp.rank + std::int64_t{at.tp.size} *
                          (at.cp.rank + std::int64_t{at.cp.size} *
                                            (at.dp.rank + std::int64_t{at.dp.size} * at.pp.rank));
}

bool keeps_default_order(const RankCoordinates& at) {
  return rank_in_default_order(at) == at.rank;
}

/// The amount of evidence. A ledger with nothing but notes is written when other ranks fall silent.
std::size_t evidence_in(const Ledger& ledger) {
  return ledger.sightings.size() + ledger.births.size() + ledger.coverage.size() +
         ledger.crossings.size() + ledger.backward_order.size() + (ledger.rerun ? 1 : 0);
}

/// True if the sighting's crossing was sent or received and the ledger counts it, if it counts any.
bool is_possible(const Sighting& sighting, const Ledger& ledger) {
  const Crossing& crossing = *sighting.crossing;
  const auto counts = [&](const CrossingCoverage& covered) {
    return covered.group == crossing.group && covered.members == crossing.members &&
           covered.peer == crossing.peer && crossing.sequence < covered.count;
  };
  const RoleKind role = sighting.role.kind();
  return (role == RoleKind::sent || role == RoleKind::received) &&
         (ledger.crossings.empty() || std::ranges::any_of(ledger.crossings, counts));
}

class Merger {
 public:
  Merger(std::vector<ReadLedger> read, const std::vector<std::filesystem::path>& paths,
         std::vector<std::string>& notes)
      : read_(std::move(read)), paths_(paths), notes_(notes) {}

  MergedLedgers merge(int described_world_size) && {
    for (ReadLedger& each : read_) drop_damaged_sightings(each);
    leave_out_other_places();
    leave_out_other_sizes();
    leave_out_other_orders();
    MergedLedgers merged;
    merged.world_size = world_size(described_world_size);
    merged.ledgers = one_for_each_rank();
    return merged;
  }

 private:
  [[nodiscard]] std::string name_of(const ReadLedger& each) const {
    return paths_[each.file].filename().string();
  }

  template <typename IsWrong, typename Reason>
  void leave_out(const IsWrong& is_wrong, const Reason& reason_of) {
    for (const ReadLedger& each : read_) {
      if (is_wrong(each)) {
        notes_.push_back(name_of(each) + ": the ledger of rank " +
                         std::to_string(each.ledger.coordinates.rank) +
                         " is left out: " + reason_of(each));
      }
    }
    std::erase_if(read_, is_wrong);
  }

  /// A byte that changed on disk may leave valid JSON. Redundant fields of a sighting must agree,
  /// or it would accuse the wrong parameter.
  void drop_damaged_sightings(ReadLedger& each) {
    Ledger& ledger = each.ledger;
    std::map<std::int64_t, std::string_view> names;
    for (const auto& parameter : ledger.backward_order) names[parameter.id] = parameter.name;
    const auto is_damaged = [&](const Sighting& sighting) {
      if (sighting.iteration != ledger.iteration) return true;
      if (sighting.crossing && !is_possible(sighting, ledger)) return true;
      if (!sighting.parameter_id || sighting.parameter.empty()) return false;
      const auto named = names.find(*sighting.parameter_id);
      return named != names.end() && named->second != sighting.parameter;
    };
    const auto count = std::erase_if(ledger.sightings, is_damaged);
    if (count == 0) return;
    ledger.is_complete = false;
    notes_.push_back(
        name_of(each) + ": " + std::to_string(count) +
        " sightings contradict the ledger's own parameters, crossings or step and are left out; "
        "the file is damaged");
  }

  void leave_out_other_places() {
    const auto is_wrong = [&](const ReadLedger& each) {
      const std::string name = name_of(each);
      const auto place = place_in_name(name);
      return !place.empty() && place != each.ledger.coordinates.file_suffix();
    };
    leave_out(is_wrong, [](const ReadLedger& each) {
      return "it says that it is of " + each.ledger.coordinates.file_suffix() +
             ", which is not the file's";
    });
    leave_out(
        [](const ReadLedger& each) { return each.ledger.coordinates.world_size > kLargestWorld; },
        [](const ReadLedger& each) {
          return "it claims " + std::to_string(each.ledger.coordinates.world_size) + " ranks";
        });
  }

  void leave_out_other_sizes() {
    std::map<Sizes, std::size_t> counts;
    for (const ReadLedger& each : read_) ++counts[sizes_of(each.ledger.coordinates)];
    if (counts.size() < 2) return;
    const Sizes usual =
        std::ranges::max_element(counts, {}, [](const auto& entry) { return entry.second; })->first;
    leave_out([&](const ReadLedger& each) { return sizes_of(each.ledger.coordinates) != usual; },
              [&](const ReadLedger& each) {
                return "it states other sizes (" + describe(sizes_of(each.ledger.coordinates)) +
                       ") than the others (" + describe(usual) + ")";
              });
  }

  /// A job may number its ranks in another order, but then more than half of them differ from the
  /// default order.
  void leave_out_other_orders() {
    const auto keeps_order = [](const ReadLedger& each) {
      return keeps_default_order(each.ledger.coordinates);
    };
    const auto kept = static_cast<std::size_t>(std::ranges::count_if(read_, keeps_order));
    if (2 * kept <= read_.size()) return;
    leave_out([&](const ReadLedger& each) { return !keeps_order(each); },
              [](const ReadLedger& each) {
                return "its place (" + each.ledger.coordinates.file_suffix() + ") has rank " +
                       std::to_string(rank_in_default_order(each.ledger.coordinates)) +
                       " in the order that the others keep";
              });
  }

  [[nodiscard]] int world_size(int described) const {
    if (read_.empty()) return std::clamp(described, 1, kLargestWorld);
    const int stated = read_.front().ledger.coordinates.world_size;
    if (described > 0 && described != stated) {
      notes_.push_back("run.json states " + std::to_string(described) + " ranks, the ledgers " +
                       std::to_string(stated) + ", which count");
    }
    return stated;
  }

  std::vector<Ledger> one_for_each_rank() {
    std::map<int, ReadLedger> by_rank;
    for (ReadLedger& each : read_) {
      const int rank = each.ledger.coordinates.rank;
      const auto [known, is_first] = by_rank.try_emplace(rank);
      if (is_first) {
        known->second = std::move(each);
      } else {
        join(known->second, std::move(each));
      }
    }
    std::vector<Ledger> ledgers;
    ledgers.reserve(by_rank.size());
    for (auto& [rank, each] : by_rank) ledgers.push_back(std::move(each.ledger));
    return ledgers;
  }

  /// Keeps the ledger with more evidence, with the notes of both.
  void join(ReadLedger& known, ReadLedger other) {
    if (known.ledger == other.ledger) return;  // the file was copied twice
    const bool is_written_again =              // with a later note: the rank concluded twice
        name_of(known) == name_of(other) && known.ledger.sightings == other.ledger.sightings;
    const auto weight = [](const Ledger& ledger) {
      return std::pair(evidence_in(ledger) > 0 && ledger.is_complete, evidence_in(ledger));
    };
    if (weight(known.ledger) < weight(other.ledger)) std::swap(known, other);
    if (evidence_in(other.ledger) > 0 && !is_written_again) {
      notes_.push_back("rank " + std::to_string(known.ledger.coordinates.rank) +
                       " has two ledgers of this step: that of " + name_of(known) + " with " +
                       std::to_string(known.ledger.sightings.size()) +
                       " sightings counts, that of " + name_of(other) + " with " +
                       std::to_string(other.ledger.sightings.size()) + " is left out");
    }
    for (auto& note : other.ledger.notes) {
      auto& kept = known.ledger.notes;
      if (std::ranges::find(kept, note) == kept.end()) kept.push_back(std::move(note));
    }
  }

  std::vector<ReadLedger> read_;
  const std::vector<std::filesystem::path>& paths_;
  std::vector<std::string>& notes_;
};

}  // namespace

MergedLedgers merge_ledgers(std::vector<ReadLedger> read,
                            const std::vector<std::filesystem::path>& paths,
                            int described_world_size, std::vector<std::string>& notes) {
  return Merger(std::move(read), paths, notes).merge(described_world_size);
}

}  // namespace nanlocator::inline report_room
