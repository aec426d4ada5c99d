// CRC-32 as in zlib, gzip and Python's zlib.crc32, so that any tool can check a bundle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace nanlocator::inline files_room {

[[nodiscard]] std::uint32_t crc32_of(std::span<const std::byte> bytes);

[[nodiscard]] inline std::uint32_t crc32_of(std::string_view text) {
  return crc32_of(std::as_bytes(std::span(text)));
}

}  // namespace nanlocator::inline files_room
