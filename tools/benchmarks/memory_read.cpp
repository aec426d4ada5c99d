// Reads memory and does nothing else, as a reference for tools/bench scan. Called through ctypes,
// which lets several Python threads run it at once.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {
typedef std::uint64_t Vector __attribute__((vector_size(64)));
}

/// Sum of the whole 64-byte lines in [data, data + bytes); the sum only keeps the loads alive.
extern "C" std::uint64_t read_memory(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  Vector sums[4] = {};
  for (std::size_t i = 0; i + 256 <= bytes; i += 256) {
    Vector lines[4];
    std::memcpy(lines, p + i, sizeof lines);
    for (int k = 0; k < 4; ++k) sums[k] += lines[k];
  }
  const Vector all = sums[0] + sums[1] + sums[2] + sums[3];
  std::uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total += all[lane];
  return total;
}
