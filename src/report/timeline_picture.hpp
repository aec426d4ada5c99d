// The failing step laid out over ranks and phases, with the ways that bad values took between
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "report/rank_picture.hpp"

namespace nanlocator::inline report_room {

/// A column: a phase, and of forward, loss and backward a microbatch.
struct TimelineColumn {
  Phase phase = Phase::forward;
  int microbatch = -1;  // -1: none, or not known
  friend auto operator<=>(const TimelineColumn&, const TimelineColumn&) = default;
};

enum class MarkKind : std::uint8_t { seen, sent, received };

struct TimelineMark {
  std::size_t column = 0;
  /// Logical time (Lamport's): above that of the mark before it on its rank, and of everything bad
  /// that was put into what it received. Compares marks of one column; it is no time of a clock.
  int clock = 0;
  MarkKind kind = MarkKind::seen;
  const Sighting* sighting = nullptr;
};

struct TimelineRow {
  std::size_t rank = 0;  // index into RankPicture::ranks
  std::vector<TimelineMark> marks;
  std::vector<bool> is_covered;  // by column: something was scanned there
};

/// A bad value that one rank received; of those that were put in, the earliest of another rank.
struct TimelineArrow {
  std::size_t from_row = 0, from_mark = 0;
  std::size_t to_row = 0, to_mark = 0;
  bool is_first = false;  // the receiver had met nothing bad before
};

struct TimelinePicture {
  std::vector<TimelineColumn> columns;
  std::vector<TimelineRow> rows;      // origins first, then in the order in which ranks met it
  std::vector<TimelineArrow> arrows;  // between rows; the earliest
  std::map<std::size_t, int> further_ranks;  // by first column: ranks that met it and have no row
};

inline constexpr std::size_t kMostTimelineRows = 40;
inline constexpr std::size_t kMostTimelineArrows = 150;
inline constexpr std::size_t kMostMarksOfARow = 300;
inline constexpr int kMostMicrobatchesShown = 12;  // of each phase; the earliest

[[nodiscard]] TimelinePicture picture_timeline(const RunReport& report, const RankPicture& ranks);

}  // namespace nanlocator::inline report_room
