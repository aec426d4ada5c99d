// Every rank of the run with its place and its state in the verdict: the page's grid.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// A rank's state in this step, the most telling first.
enum class RankState : std::uint8_t {
  born,       // an origin's only rank
  candidate,  // one of several ranks that the evidence cannot separate
  silent,     // no ledger arrived
  received,   // saw something bad and is not an origin
  reduced,  // the same, but only after the reduction of gradients, as all of a data-parallel group
            // do
  unknown,  // reported nothing bad, but its ledger is cut off or scanned nothing
  clean,
};
inline constexpr std::array<std::string_view, 7> kRankStateNames = {
    "born", "candidate", "silent", "received", "reduced", "unknown", "clean"};

struct PageRank {
  int rank = 0;
  RankState state = RankState::clean;
  bool is_silent = false;  // may be set for a candidate, too
  /// For a silent rank: inferred from the other ranks' places if possible, without host and device.
  std::optional<RankCoordinates> coordinates;
  const Ledger* ledger = nullptr;  // null: not in this folder
};

/// Points into the report.
struct RankPicture {
  RankCoordinates layout;       // sizes of the axes, from the lowest known rank
  std::vector<PageRank> ranks;  // ascending
  std::vector<std::string> notes;
};

/// Above this number only ranks with data are listed.
inline constexpr int kMostRanksDrawn = 32'768;

[[nodiscard]] RankPicture picture_ranks(const RunReport& report);

}  // namespace nanlocator::inline report_room
