#include "checksum.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace nanlocator::inline files_room {
namespace {

// Bytes per step. Each has its own table, so that the look-ups are independent (slicing by 16:
// Kounavis and Berry, "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation",
// 2008).
constexpr std::size_t kStep = 16;
using Table = std::array<std::uint32_t, 256>;

// tables[n][byte]: the CRC of `byte` followed by n zero bytes.
constexpr std::array<Table, kStep> kTables = [] {
  constexpr std::uint32_t kPolynomial = 0xEDB88320;  // IEEE 802.3, lowest bit first
  std::array<Table, kStep> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = rest;
  }
  for (std::size_t zeros = 1; zeros < kStep; ++zeros) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[zeros - 1][byte];
      tables[zeros][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

}  // namespace

std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  static_assert(std::endian::native == std::endian::little);
  std::uint32_t checksum = ~std::uint32_t{0};
  while (bytes.size() >= kStep) {
    std::array<std::uint32_t, kStep / 4> words;
    std::memcpy(words.data(), bytes.data(), kStep);
    words[0] ^= checksum;
    checksum = 0;
#pragma GCC unroll 16
    for (std::size_t at = 0; at < kStep; ++at) {
      checksum ^= kTables[kStep - 1 - at][(words[at / 4] >> (8 * (at % 4))) & 0xFF];
    }
    bytes = bytes.subspan(kStep);
  }
  for (const std::byte byte : bytes) {
    checksum =
        (checksum >> 8) ^ kTables[0][(checksum ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
  }
  return ~checksum;
}

}  // namespace nanlocator::inline files_room
