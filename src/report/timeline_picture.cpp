#include "report/timeline_picture.hpp"

#include <algorithm>
#include <compare>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>

namespace nanlocator::inline report_room {
namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// One collective or one message. Groups are compared by a hash of name and members; a collision
/// costs only an arrow in the picture.
struct Meeting {
  std::uint64_t group = 0;
  int sender = -1;  // -1: a collective
  int receiver = -1;
  std::int64_t sequence = 0;
  /// One sequence covers forward and backward, but another pass may count again.
  Phase phase = Phase::forward;
  friend auto operator<=>(const Meeting&, const Meeting&) = default;
};

std::uint64_t hash_of(const Crossing& crossing) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  for (const char c : crossing.group) add(static_cast<unsigned char>(c));
  for (const RankRun& run : crossing.members.runs()) {
    for (const int number : {run.first, run.last, run.step}) {
      add(static_cast<std::uint64_t>(number) + 256);
    }
  }
  return hash;
}

MarkKind kind_of(const Sighting& sighting) {
  if (!sighting.crossing) return MarkKind::seen;
  const RoleKind role = sighting.role.kind();
  return role == RoleKind::sent       ? MarkKind::sent
         : role == RoleKind::received ? MarkKind::received
                                      : MarkKind::seen;
}

Meeting meeting_of(const Sighting& sighting, int rank) {
  const Crossing& crossing = *sighting.crossing;
  Meeting meeting{
      .group = hash_of(crossing), .sequence = crossing.sequence, .phase = sighting.phase};
  if (crossing.peer) {
    const bool is_sent = sighting.role.kind() == RoleKind::sent;
    meeting.sender = is_sent ? rank : *crossing.peer;
    meeting.receiver = is_sent ? *crossing.peer : rank;
  }
  return meeting;
}

struct Event {
  const Sighting* sighting = nullptr;
  TimelineColumn column;
  MarkKind kind = MarkKind::seen;
  std::size_t meeting = kNone;
  int clock = 0;
};

struct Train {  // one rank's events in execution order
  std::vector<Event> events;
  std::size_t done = 0;
};

struct Gathering {
  std::vector<std::pair<std::size_t, std::size_t>> sent;  // (train, event)
  std::size_t awaited = 0;                                // sends that have no clock yet
  int clock = 0;                                          // the latest clock of the sends
};

class Timeline {
 public:
  Timeline(const RunReport& report, const RankPicture& ranks) : report_(report), ranks_(ranks) {}

  TimelinePicture draw() && {
    read_events();
    set_clocks();
    choose_columns();
    choose_rows();
    add_arrows();
    return std::move(picture_);
  }

 private:
  void read_events() {
    trains_.resize(ranks_.ranks.size());
    std::map<Meeting, std::size_t> known;
    for (std::size_t rank = 0; rank < trains_.size(); ++rank) {
      const Ledger* ledger = ranks_.ranks[rank].ledger;
      if (!ledger) continue;
      for (const Sighting& sighting : ledger->sightings) {
        if (sighting.stats.is_finite()) continue;
        Event event{.sighting = &sighting,
                    .column = {sighting.phase, std::max(-1, sighting.microbatch.value_or(-1))},
                    .kind = kind_of(sighting)};
        if (event.kind != MarkKind::seen) {
          const auto meeting = meeting_of(sighting, ranks_.ranks[rank].rank);
          event.meeting = known.emplace(meeting, gatherings_.size()).first->second;
          if (event.meeting == gatherings_.size()) gatherings_.emplace_back();
          if (event.kind == MarkKind::sent) {
            gatherings_[event.meeting].sent.emplace_back(rank, trains_[rank].events.size());
            ++gatherings_[event.meeting].awaited;
          }
        }
        trains_[rank].events.push_back(event);
      }
    }
  }

  /// Advances each rank until it receives something that has not been sent yet. Ledgers of real
  /// steps have no cyclic waits; if damaged ones do, a rank advances without waiting.
  void set_clocks() {
    constexpr int kMostPasses = 2'000;  // then no rank waits: only forged ledgers need more
    bool is_forced = false;
    bool is_left = true;
    for (int pass = 0; is_left; ++pass) {
      is_left = false;
      bool has_moved = false;
      for (Train& train : trains_) {
        while (train.done < train.events.size()) {
          Event& event = train.events[train.done];
          const bool must_wait =
              event.kind == MarkKind::received && gatherings_[event.meeting].awaited > 0;
          if (must_wait && !is_forced && pass < kMostPasses) break;
          is_forced = is_forced && !must_wait;
          set_clock(train, event);
          has_moved = true;
        }
        is_left = is_left || train.done < train.events.size();
      }
      is_forced = !has_moved;
    }
  }

  void set_clock(Train& train, Event& event) {
    event.clock = train.done == 0 ? 1 : train.events[train.done - 1].clock + 1;
    if (event.kind == MarkKind::received)
      event.clock = std::max(event.clock, gatherings_[event.meeting].clock + 1);
    if (event.kind == MarkKind::sent) {
      Gathering& gathering = gatherings_[event.meeting];
      gathering.clock = std::max(gathering.clock, event.clock);
      --gathering.awaited;
    }
    ++train.done;
  }

  void choose_columns() {
    std::set<TimelineColumn> used;
    for (const Train& train : trains_) {
      for (const Event& event : train.events) used.insert(event.column);
    }
    for (const Origin& origin : report_.verdict.origins) {
      used.insert({origin.phase, std::max(-1, origin.microbatch.value_or(-1))});
    }
    int microbatches = 0;  // drawn by any rank: the step's extent, even if all were clean
    for (const PageRank& rank : ranks_.ranks) {
      if (!rank.ledger) continue;
      for (const Microbatch& microbatch : rank.ledger->microbatches) {
        microbatches = std::max(microbatches, std::min(microbatch.number, 7) + 1);
      }
    }
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
      used.insert({Phase::forward, microbatch});
      used.insert({Phase::backward, microbatch});
    }
    for (const Phase phase : {Phase::forward, Phase::backward, Phase::grad_local,
                              Phase::grad_reduced, Phase::grad_norm}) {
      const auto next = used.lower_bound({phase, -1});
      if (next == used.end() || next->phase != phase) used.insert({phase, -1});
    }
    std::map<Phase, int> shown;
    for (const TimelineColumn& column : used) {
      if (shown[column.phase]++ < kMostMicrobatchesShown) picture_.columns.push_back(column);
    }
  }

  [[nodiscard]] std::size_t index_of(const TimelineColumn& column) const {
    const auto found = std::ranges::lower_bound(picture_.columns, column);
    return found != picture_.columns.end() && *found == column
               ? static_cast<std::size_t>(found - picture_.columns.begin())
               : kNone;
  }

  void choose_rows() {
    // (class, first column, clock, rank): class 0 origins, 1 ranks that met the fault, 2 the others
    std::vector<std::tuple<int, std::size_t, int, std::size_t>> order;
    for (std::size_t rank = 0; rank < trains_.size(); ++rank) {
      const PageRank& entry = ranks_.ranks[rank];
      const auto& events = trains_[rank].events;
      const auto first = std::ranges::min_element(
          events, {}, [](const Event& event) { return std::tuple(event.column, event.clock); });
      const bool is_origin = entry.state == RankState::born || entry.state == RankState::candidate;
      const bool is_bad = first != events.end();
      order.emplace_back(is_origin ? 0
                         : is_bad  ? 1
                                   : 2,
                         is_bad ? index_of(first->column) : kNone, is_bad ? first->clock : 0, rank);
    }
    std::ranges::sort(order);
    for (const auto& [order_class, column, clock, rank] : order) {
      if (picture_.rows.size() < kMostTimelineRows) {
        row_of_.emplace(rank, picture_.rows.size());
        add_row(rank);
      } else if (order_class < 2) {
        ++picture_.further_ranks[column];
      }
    }
  }

  void add_row(std::size_t rank) {
    TimelineRow row{.rank = rank, .marks = {}, .is_covered = {}};
    for (const Event& event : trains_[rank].events) {
      const std::size_t column = index_of(event.column);
      if (column == kNone || row.marks.size() == kMostMarksOfARow) continue;
      mark_of_.emplace(&event, row.marks.size());
      row.marks.push_back({column, event.clock, event.kind, event.sighting});
    }
    const Ledger* ledger = ranks_.ranks[rank].ledger;
    for (const TimelineColumn& column : picture_.columns) {
      const bool is_crossing_phase =
          column.phase == Phase::forward || column.phase == Phase::backward;
      const bool is_covered =
          ledger && (std::ranges::find(ledger->coverage, column.phase, &Coverage::phase) !=
                         ledger->coverage.end() ||
                     (is_crossing_phase && !ledger->crossings.empty()));
      row.is_covered.push_back(is_covered);
    }
    picture_.rows.push_back(std::move(row));
  }

  /// Adds arrows between shown rows. The first bad value that a rank received shows how the fault
  /// reached it, so those arrows come first.
  void add_arrows() {
    struct Way {
      bool is_later = false;
      int clock = 0;
      TimelineArrow arrow;
    };
    std::vector<Way> ways;
    for (std::size_t to_row = 0; to_row < picture_.rows.size(); ++to_row) {
      const Train& train = trains_[picture_.rows[to_row].rank];
      for (const Event& event : train.events) {
        const auto to_mark = mark_of_.find(&event);
        if (event.kind != MarkKind::received || to_mark == mark_of_.end()) continue;
        const auto from = first_to_send(event, to_row);
        if (!from) continue;
        const bool is_first = &event == &train.events.front();
        ways.push_back({!is_first,
                        event.clock,
                        {from->first, from->second, to_row, to_mark->second, is_first}});
      }
    }
    std::ranges::stable_sort(ways, {}, [](const Way& way) {
      return std::tuple(way.is_later, way.clock, way.arrow.to_row, way.arrow.from_row);
    });
    if (ways.size() > kMostTimelineArrows) ways.resize(kMostTimelineArrows);
    for (const Way& way : ways) picture_.arrows.push_back(way.arrow);
  }

  /// Row and mark of the earliest send by another rank.
  [[nodiscard]] std::optional<std::pair<std::size_t, std::size_t>> first_to_send(
      const Event& received, std::size_t to_row) const {
    std::optional<std::pair<std::size_t, std::size_t>> first;
    int clock = std::numeric_limits<int>::max();
    for (const auto& [sender, sent] : gatherings_[received.meeting].sent) {
      const Event& event = trains_[sender].events[sent];
      const auto row = row_of_.find(sender);
      const auto mark = mark_of_.find(&event);
      if (row == row_of_.end() || row->second == to_row || mark == mark_of_.end()) continue;
      if (event.clock < clock) {
        clock = event.clock;
        first = {row->second, mark->second};
      }
    }
    return first;
  }

  const RunReport& report_;
  const RankPicture& ranks_;
  std::vector<Train> trains_;  // by index of RankPicture::ranks
  std::vector<Gathering> gatherings_;
  std::unordered_map<std::size_t, std::size_t> row_of_;    // by index of RankPicture::ranks
  std::unordered_map<const Event*, std::size_t> mark_of_;  // of the shown events
  TimelinePicture picture_;
};

}  // namespace

TimelinePicture picture_timeline(const RunReport& report, const RankPicture& ranks) {
  return Timeline(report, ranks).draw();
}

}  // namespace nanlocator::inline report_room
