// Reveals reads of never-written memory: while one lives, new tensors are filled with NaN or with
// another byte.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace nanlocator::inline replay_room {

inline constexpr std::uint8_t kNanByte = 0xFF;

/// In host memory every allocation of Torch's allocator is filled with `byte`: 0xFF is NaN in every
/// floating-point type, -1 in every integer one. On CUDA, Torch's own switch fills the results of
/// `at::empty`; it implies deterministic algorithms, which may give bits other than the recorded
/// ones. Process-wide: tensors that other threads allocate meanwhile are filled, too.
class PoisonedAllocations {
 public:
  /// `byte` applies to host memory; on CUDA it is always NaN.
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
