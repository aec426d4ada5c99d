// Memory that nobody has written made visible: while one lives, new tensors are full of NaN, or of
// another byte.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace nanlocator::inline replay_room {

inline constexpr std::uint8_t kNanByte = 0xFF;

/// In host memory every allocation of Torch's allocator is filled with `byte`: 0xFF is NaN in every
/// floating-point type, -1 in every integer one. On CUDA Torch's own switch fills what `at::empty`
/// gives; it comes with deterministic algorithms, which may give other bits than the recorded ones.
/// Process-wide: tensors that other threads allocate meanwhile are filled, too.
class PoisonedAllocations {
 public:
  /// `byte` is for host memory; on CUDA it is always NaN.
  explicit PoisonedAllocations(at::Device device, std::uint8_t byte = kNanByte);
  ~PoisonedAllocations();
  PoisonedAllocations(const PoisonedAllocations&) = delete;  // switches the process's state
  PoisonedAllocations& operator=(const PoisonedAllocations&) = delete;

 private:
  struct DeterministicState {
    bool is_on;
    bool only_warns;
    bool fills;
  };
  std::optional<DeterministicState> before_;  // on CUDA
};

}  // namespace nanlocator::inline replay_room
