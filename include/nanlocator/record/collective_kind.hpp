// What an operator of a process group does with the ranks' inputs, by its name.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace nanlocator::inline record_room {

enum class CollectiveKind : std::uint8_t {
  all_reduce,
  reduce_scatter,
  reduce,
  all_gather,
  broadcast,
  scatter,
  exchange,  // gather, all-to-all: sends some of each rank's input to some ranks
  send,
  receive,
  wait,  // for another operator's result; moves nothing itself
};

/// For c10d's operators and the functional ones ("c10d::allreduce_",
/// "_c10d_functional::wait_tensor"; torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp); empty for
/// any other `op`.
[[nodiscard]] constexpr std::optional<CollectiveKind> collective_kind_of(
    std::string_view op) noexcept {
  constexpr std::array<std::pair<std::string_view, CollectiveKind>, 11> kParts = {{
      {"reduce_scatter", CollectiveKind::reduce_scatter},
      {"allreduce", CollectiveKind::all_reduce},
      {"all_reduce", CollectiveKind::all_reduce},
      {"reduce", CollectiveKind::reduce},
      {"allgather", CollectiveKind::all_gather},
      {"all_gather", CollectiveKind::all_gather},
      {"broadcast", CollectiveKind::broadcast},
      {"scatter", CollectiveKind::scatter},
      {"send", CollectiveKind::send},
      {"recv", CollectiveKind::receive},
      {"wait", CollectiveKind::wait},
  }};
  if (!op.starts_with("c10d::") && !op.starts_with("_c10d_functional")) return std::nullopt;
  for (const auto& [part, kind] : kParts) {
    if (op.find(part) != std::string_view::npos) return kind;
  }
  return CollectiveKind::exchange;
}

/// Combines inputs, so the result may be bad although all inputs are finite.
[[nodiscard]] constexpr bool is_reduction(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::all_reduce || kind == CollectiveKind::reduce_scatter ||
         kind == CollectiveKind::reduce;
}

/// Reads only the root's memory; that of other ranks is only written.
[[nodiscard]] constexpr bool is_from_root(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::broadcast || kind == CollectiveKind::scatter;
}

/// Every member gets the same result.
[[nodiscard]] constexpr bool gives_all_members_the_same(CollectiveKind kind) noexcept {
  return kind == CollectiveKind::all_reduce || kind == CollectiveKind::all_gather ||
         kind == CollectiveKind::broadcast;
}

}  // namespace nanlocator::inline record_room
