// Errors of Torch fill a page; their first line is what a person reads.
#pragma once

#include <string>

namespace nanlocator::netcheck {

inline std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace nanlocator::netcheck
