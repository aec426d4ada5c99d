// Names of an enumeration's values in files and text, in both directions from one table.
//
//   enum class Phase { forward, loss };
//   constexpr auto names_of(Phase) {
//     return std::to_array<std::string_view>({"forward", "loss"});
//   }
//
//   name_of(Phase::loss);        value_named<Phase>("loss");
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace nanlocator::inline files_room {

template <typename Enum>
concept HasNames = requires {
  names_of(Enum{});  // found in the enumeration's namespace
};

/// In the order of the values, which count from 0.
template <HasNames Enum>
inline constexpr auto kNames = names_of(Enum{});

template <HasNames Enum>
[[nodiscard]] constexpr std::string_view name_of(Enum value) noexcept {
  return kNames<Enum>[static_cast<std::size_t>(value)];
}

template <HasNames Enum>
[[nodiscard]] constexpr std::optional<Enum> value_named(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kNames<Enum>.size(); ++i) {
    if (kNames<Enum>[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

}  // namespace nanlocator::inline files_room
