#include "replay/host_memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace nanlocator::inline replay_room {
namespace {

constexpr std::uint64_t kUnknown = std::numeric_limits<std::uint64_t>::max();

/// The number after `key` in a file of lines "key number ..."; with `key` "", a file of one number.
std::optional<std::uint64_t> number_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    std::uint64_t number = 0;
    if (key.empty()) {  // "max": no limit
      return word == "max" ? std::nullopt : std::optional(std::stoull(word));
    }
    if (word == key && file >> number) return number;
  }
  return std::nullopt;
}

/// The kernel reclaims file pages when memory is needed.
std::uint64_t left_below(const char* limit, const char* usage, const char* stat) {
  const auto most = number_in(limit, "");
  const auto used = number_in(usage, "");
  if (!most || !used) return kUnknown;
  const std::uint64_t files = number_in(stat, "inactive_file").value_or(0);
  const std::uint64_t held = *used - std::min(*used, files);
  return *most - std::min(*most, held);
}

}  // namespace

std::uint64_t free_host_memory() {
  const auto available = number_in("/proc/meminfo", "MemAvailable:");
  return std::min({available ? *available * 1024 : kUnknown,
                   left_below("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                              "/sys/fs/cgroup/memory.stat"),
                   left_below("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                              "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                              "/sys/fs/cgroup/memory/memory.stat")});
}

}  // namespace nanlocator::inline replay_room
