#include "report/candidates_text.hpp"

#include "files/printable.hpp"

namespace nanlocator {

std::string candidates_text(const Origin& origin, const std::string& list) {
  if (origin.is_on_every_candidate) return "ranks " + list;
  return "one of " + count_text(origin.candidates.size(), "rank") + ": " + list;
}

}  // namespace nanlocator
