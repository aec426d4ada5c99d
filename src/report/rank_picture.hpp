// Every rank of the run with its place and what the verdict says of it: the grid of the page.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// What a rank is to this step, the most telling first.
enum class RankState : std::uint8_t {
  born,       // an origin's only rank
  candidate,  // one of several that the evidence cannot separate
  silent,     // no ledger arrived
  received,   // saw something bad, and is no origin
  reduced,    // the same, but not before gradients were reduced: all of a data-parallel group do
  unknown,    // nothing bad told, and its ledger is cut off or scanned nothing
  clean,
};
inline constexpr std::array<std::string_view, 7> kRankStateNames = {
    "born", "candidate", "silent", "received", "reduced", "unknown", "clean"};

struct PageRank {
  int rank = 0;
  RankState state = RankState::clean;
  bool is_silent = false;  // also of a candidate
  /// Of a silent rank: where it follows from the others' places; then without host and device.
  std::optional<RankCoordinates> coordinates;
  const Ledger* ledger = nullptr;  // null: not in this folder
};

/// Points into the report.
struct RankPicture {
  RankCoordinates layout;       // the sizes of the axes; of the lowest rank that is known
  std::vector<PageRank> ranks;  // ascending
  std::vector<std::string> notes;
};

/// More ranks than this are not drawn: only those are listed that something is known of.
inline constexpr int kMostRanksDrawn = 32'768;

[[nodiscard]] RankPicture picture_ranks(const RunReport& report);

}  // namespace nanlocator::inline report_room
