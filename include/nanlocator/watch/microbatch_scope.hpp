// The microbatch and model chunk that the pipeline schedule is working on. Every observer records
// them beside a module's name.
//
// One value per process: a schedule works on one microbatch at a time, and autograd's threads work
// for it while it waits. Lock-free.
#pragma once

#include <optional>

namespace nanlocator::inline watch_room {

struct MicrobatchPlace {
  std::optional<int> microbatch;  // counted from 0
  std::optional<int> chunk;       // virtual-pipeline model chunk
  friend bool operator==(const MicrobatchPlace&, const MicrobatchPlace&) = default;
};

void set_current_microbatch(MicrobatchPlace place) noexcept;
[[nodiscard]] MicrobatchPlace current_microbatch() noexcept;

}  // namespace nanlocator::inline watch_room
