#include "files/checksum.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace nanlocator {
namespace {

// Bit by bit, as in RFC 1952, section 8.
std::uint32_t plain_crc32_of(std::span<const std::byte> bytes) {
  std::uint32_t checksum = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    checksum ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      checksum = (checksum & 1) != 0 ? (checksum >> 1) ^ 0xEDB88320 : checksum >> 1;
    }
  }
  return ~checksum;
}

TEST(Checksum, IsTheOneOfZlib) {  // python3 -c 'import zlib; print(hex(zlib.crc32(b"...")))'
  EXPECT_EQ(crc32_of(std::string_view("")), 0u);
  EXPECT_EQ(crc32_of(std::string_view("123456789")), 0xCBF43926u);
  EXPECT_EQ(crc32_of(std::string_view("The quick brown fox jumps over the lazy dog")), 0x414FA339u);
}

TEST(Checksum, IsRightForAnyLengthAndAddress) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(200);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t from = 0; from < 20; ++from) {
    for (std::size_t length = 0; from + length <= bytes.size(); ++length) {
      const auto part = std::span<const std::byte>(bytes).subspan(from, length);
      ASSERT_EQ(crc32_of(part), plain_crc32_of(part)) << from << " " << length;
    }
  }
}

}  // namespace
}  // namespace nanlocator
