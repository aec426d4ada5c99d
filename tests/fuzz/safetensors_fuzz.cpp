// Any bytes: either a FormatError, or tensors whose every byte is there to be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "files/checksum.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/record/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nanlocator;
  try {
    const SafetensorsFile file(std::as_bytes(std::span(data, size)), "fuzzed.safetensors");
    std::size_t total = 0;
    for (const auto& entry : file.entries()) {
      (void)crc32_of(entry.bytes);  // the address sanitizer sees it read
      total += entry.bytes.size();
      if (&file.at(entry.name) != &entry) std::abort();
    }
    if (total > size) std::abort();  // overlapping tensors
  } catch (const FormatError&) {
  }
  return 0;
}
