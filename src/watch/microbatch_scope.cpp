#include "nanlocator/watch/microbatch_scope.hpp"

#include <atomic>
#include <cstdint>

namespace nanlocator::inline watch_room {
namespace {

// Both numbers in one word, each plus one; zero means unknown.
std::atomic<std::uint64_t> current = 0;

std::uint64_t packed(std::optional<int> number) {
  return number ? static_cast<std::uint32_t>(*number) + std::uint64_t{1} : 0;
}

std::optional<int> unpacked(std::uint64_t word) {
  if (word == 0) return std::nullopt;
  return static_cast<int>(word - 1);
}

constexpr int kBits = 32;

}  // namespace

void set_current_microbatch(MicrobatchPlace place) noexcept {
  current.store(packed(place.microbatch) << kBits | packed(place.chunk), std::memory_order_relaxed);
}

MicrobatchPlace current_microbatch() noexcept {
  const std::uint64_t word = current.load(std::memory_order_relaxed);
  return {unpacked(word >> kBits), unpacked(word & 0xffffffffU)};
}

}  // namespace nanlocator::inline watch_room
