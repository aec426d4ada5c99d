// A rank's position in a pass over its step: the number of crossings that it has issued since the
// pass began. It orders what one rank computed and exchanged, and it is the same for the same place
// in the first pass and in a re-run, so that a birth of the re-run can be compared with a sighting
// of the first pass.
//
// Crossing k (0 is the first) is counted when the call that issues it returns. Therefore, on one
// rank:
//   a.position < b.position proves that a crossing was issued between a and b;
//   what went into crossing k has position k or less;
//   what came out of it, and all that was computed from that, has position k + 1 or more. The
//   position of a received tensor is that at which the program waited for it.
//
// Counted are the collectives and messages that a BoundaryWatch sees, and that the program issues
// itself: through methods of ProcessGroup, as functional collectives, and the buffers that
// DistributedDataParallel broadcasts. A message to the own rank and each part of a coalesced batch
// count as one. Not counted, because their number or place may differ between the passes:
//   transfers of weights and gradients that a framework issues by itself (enter_transfer): they
//   are prefetched in another order once a first step has shown the order of use;
//   what C++ issues by itself (DistributedDataParallel's buckets), and what a CUDA graph replays;
//   crossings of a thread that does not work for the step, whose order is accidental.
// If the crossings of a re-run still differ from those of the first pass (a pipeline exchanges the
// shapes of its messages only once; a compiled region runs eagerly), its births have no position.
#pragma once

#include <cstdint>
#include <optional>

namespace nanlocator::inline watch_room {

/// Empty if no pass is counted, or if this thread does not work for the step. Lock-free; one pass
/// is counted per process.
[[nodiscard]] std::optional<std::int64_t> current_position() noexcept;

/// For a pass whose crossings nobody watches: there is no position until the next `begin`.
void forget_position() noexcept;

/// The crossings of a pass, in their order.
struct CrossingOrder {
  std::int64_t count = 0;
  std::uint64_t hash = 0;  // of what was passed to `add`, in order
  friend bool operator==(const CrossingOrder&, const CrossingOrder&) = default;
};

/// Counts the crossings of passes. Not thread-safe, beside current_position.
class PositionCounter {
 public:
  PositionCounter() = default;
  ~PositionCounter();
  PositionCounter(const PositionCounter&) = delete;  // its address says whose pass is counted
  PositionCounter& operator=(const PositionCounter&) = delete;

  /// A pass begins on this thread. It takes the place of any other counter's.
  void begin() noexcept;
  /// A crossing has been issued on this thread; ignored if the thread does not work for the step,
  /// or if another counter counts. `kind`: the same for crossings that are issued alike.
  void add(std::uint64_t kind) noexcept;
  [[nodiscard]] const CrossingOrder& order() const noexcept { return order_; }

 private:
  CrossingOrder order_;
};

}  // namespace nanlocator::inline watch_room
