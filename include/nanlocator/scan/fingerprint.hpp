// A fingerprint of a tensor's bits that does not depend on the order in which they are read.
//
// The tensor's logical row-major bytes are taken as little-endian 32-bit words w_0, w_1, ... (the
// last one padded with zero bytes). With m(w) = w ^ (w >> 16), both sums modulo 2^32:
//     S0 = sum_j m(w_j)          S1 = sum_j j * m(w_j)          fingerprint = S1 << 32 | S0
// Sums commute, so threads, vector lanes and GPU blocks may add in any order, and all backends give
// the same number. The factor j makes it depend on positions. The xor keeps a flipped sign bit
// visible: bit 31 alone would vanish from any even sum. The fingerprint tells two executions of an
// operation apart; it is no defence against an adversary.
#pragma once

#include <cstdint>

namespace nanlocator {
inline namespace scan_room {

/// m(w), the summed word.
[[nodiscard]] constexpr std::uint32_t mix_word(std::uint32_t word) noexcept {
  return word ^ (word >> 16);
}

[[nodiscard]] constexpr std::uint64_t make_fingerprint(std::uint32_t s0,
                                                       std::uint32_t s1) noexcept {
  return (static_cast<std::uint64_t>(s1) << 32) | s0;
}

/// The fingerprint of a part whose first word is word `base` of the whole tensor (modulo 2^32). Add
/// the parts' S0 and S1 with `add_fingerprints`.
[[nodiscard]] constexpr std::uint64_t shift_fingerprint(std::uint64_t part,
                                                        std::uint32_t base) noexcept {
  const auto s0 = static_cast<std::uint32_t>(part);
  const auto s1 = static_cast<std::uint32_t>(part >> 32);
  return make_fingerprint(s0, s1 + base * s0);
}

[[nodiscard]] constexpr std::uint64_t add_fingerprints(std::uint64_t a, std::uint64_t b) noexcept {
  return make_fingerprint(
      static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b),
      static_cast<std::uint32_t>(a >> 32) + static_cast<std::uint32_t>(b >> 32));
}

}  // namespace scan_room
}  // namespace nanlocator
