#include "nanlocator/record/sighting.hpp"

#include "files/names.hpp"

namespace nanlocator {
namespace {

constexpr Names<Phase, 8> kPhaseNames = {{
    {Phase::params_before, "params_before"},
    {Phase::forward, "forward"},
    {Phase::loss, "loss"},
    {Phase::backward, "backward"},
    {Phase::grad_local, "grad_local"},
    {Phase::grad_reduced, "grad_reduced"},
    {Phase::grad_norm, "grad_norm"},
    {Phase::params_after, "params_after"},
}};

}  // namespace

std::string_view name_of(Phase phase) noexcept {
  return name_in(kPhaseNames, phase);
}

std::optional<Phase> phase_from_name(std::string_view name) noexcept {
  return value_in(kPhaseNames, name);
}

std::vector<std::int64_t> unravel_index(std::int64_t flat, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> index(shape.size(), 0);
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] <= 0) continue;  // an empty tensor has no elements to index
    // What lies beyond the shape stays in the first axis, so that it is not mistaken for a place.
    index[axis] = axis == 0 ? flat : flat % shape[axis];
    flat /= shape[axis];
  }
  return index;
}

}  // namespace nanlocator
