// What an operator of a process group does with what the ranks put in, by its name.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace nanlocator {

enum class CollectiveKind : std::uint8_t {
  reduction,  // adds up: what comes out may be bad where all that went in is finite
  from_root,  // broadcast, scatter: takes what the root has, memory of other ranks is only written
  exchange,   // gather, all-to-all: hands over what each has
  send,
  receive,
  wait,  // for another one's result; moves nothing itself
};

/// Of c10d's operators and the functional ones ("c10d::allreduce_",
/// "_c10d_functional::wait_tensor"; torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp); empty
/// where `op` is neither's.
[[nodiscard]] constexpr std::optional<CollectiveKind> collective_kind_of(
    std::string_view op) noexcept {
  constexpr std::array<std::pair<std::string_view, CollectiveKind>, 6> kParts = {{
      {"reduce", CollectiveKind::reduction},  // before "scatter": reduce_scatter adds up
      {"broadcast", CollectiveKind::from_root},
      {"scatter", CollectiveKind::from_root},
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

/// Every member gets the same out of it; false where that is not known.
[[nodiscard]] constexpr bool gives_all_the_same(std::string_view op) noexcept {
  const auto has = [&](std::string_view part) { return op.find(part) != std::string_view::npos; };
  return has("allgather") || has("all_gather") || has("allreduce") || has("all_reduce") ||
         has("broadcast");
}

}  // namespace nanlocator
