// The names of an enumeration's values in files and text: one table for both ways.
//
//   constexpr Names<Phase, 2> kPhaseNames = {{{Phase::forward, "forward"}, {Phase::loss, "loss"}}};
//   name_in(kPhaseNames, phase);        value_in(kPhaseNames, "loss");
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

namespace nanlocator {

template <class Value, std::size_t count>
using Names = std::array<std::pair<Value, std::string_view>, count>;

template <class Value, std::size_t count>
[[nodiscard]] constexpr std::string_view name_in(const Names<Value, count>& names,
                                                 Value value) noexcept {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

template <class Value, std::size_t count>
[[nodiscard]] constexpr std::optional<Value> value_in(const Names<Value, count>& names,
                                                      std::string_view name) noexcept {
  for (const auto& [value, candidate] : names) {
    if (candidate == name) return value;
  }
  return std::nullopt;
}

}  // namespace nanlocator
