// The failing step by rank and phase, with the paths of bad values between ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "report/rank_picture.hpp"

namespace nanlocator::inline report_room {

/// A column: a phase; forward, loss and backward have one per microbatch.
struct TimelineColumn {
  Phase phase = Phase::forward;
  int microbatch = -1;  // -1: none, or unknown
  friend auto operator<=>(const TimelineColumn&, const TimelineColumn&) = default;
};

enum class MarkKind : std::uint8_t { seen, sent, received };

struct TimelineMark {
  std::size_t column = 0;
  /// Logical time (Lamport's): greater than the preceding mark's on the same rank, and than that of
  /// every bad send that contributed to a receive. Compares marks of one column; not a wall-clock
  /// time.
  int clock = 0;
  MarkKind kind = MarkKind::seen;
  const Sighting* sighting = nullptr;
};

struct TimelineRow {
  std::size_t rank = 0;  // index into RankPicture::ranks
  std::vector<TimelineMark> marks;
  std::vector<bool> is_covered;  // by column: something was scanned
};

/// A bad value that one rank received, from the earliest bad send of another rank.
struct TimelineArrow {
  std::size_t from_row = 0, from_mark = 0;
  std::size_t to_row = 0, to_mark = 0;
  bool is_first = false;  // the first bad value on the receiver
};

struct TimelinePicture {
  std::vector<TimelineColumn> columns;
  std::vector<TimelineRow> rows;      // origins first, then in the order in which ranks met it
  std::vector<TimelineArrow> arrows;  // between rows; the earliest ones
  std::map<std::size_t, int>
      further_ranks;  // by first column: number of ranks that met the fault and have no row
};

inline constexpr std::size_t kMostTimelineRows = 40;
inline constexpr std::size_t kMostTimelineArrows = 150;
inline constexpr std::size_t kMostMarksOfARow = 300;
inline constexpr int kMostMicrobatchesShown = 12;  // per phase; the earliest ones

[[nodiscard]] TimelinePicture picture_timeline(const RunReport& report, const RankPicture& ranks);

}  // namespace nanlocator::inline report_room
