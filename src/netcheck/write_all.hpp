// Writes text to an open file, bypassing the buffers of stdio: the process may end by _exit.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace nanlocator::netcheck {

/// False, with errno, if the rest cannot be written.
inline bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace nanlocator::netcheck
