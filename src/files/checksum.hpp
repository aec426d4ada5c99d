// CRC-32 as in zlib, gzip and Python's zlib.crc32, so that anybody can check a bundle.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace nanlocator {

[[nodiscard]] inline std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  return static_cast<std::uint32_t>(
      ::crc32_z(0, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()));
}

[[nodiscard]] inline std::uint32_t crc32_of(std::string_view text) {
  return crc32_of(std::as_bytes(std::span(text)));
}

}  // namespace nanlocator
