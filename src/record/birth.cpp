#include "nanlocator/record/birth.hpp"

#include <array>
#include <cstddef>
#include <utility>

namespace nanlocator {
namespace {

constexpr std::array<std::pair<BirthKind, std::string_view>, 11> kBirthKindNames = {{
    {BirthKind::nan, "nan"},
    {BirthKind::nan_from_inf, "nan_from_inf"},
    {BirthKind::inf, "inf"},
    {BirthKind::literal, "literal"},
    {BirthKind::weight, "weight"},
    {BirthKind::buffer, "buffer"},
    {BirthKind::data, "data"},
    {BirthKind::memory, "memory"},
    {BirthKind::opaque, "opaque"},
    {BirthKind::user_hook, "user_hook"},
    {BirthKind::collective, "collective"},
}};

constexpr std::array<std::pair<ReplayConclusion, std::string_view>, 6> kConclusionNames = {{
    {ReplayConclusion::deterministic_overflow, "deterministic_overflow"},
    {ReplayConclusion::deterministic_undefined, "deterministic_undefined"},
    {ReplayConclusion::deterministic_custom, "deterministic_custom"},
    {ReplayConclusion::deterministic_kernel, "deterministic_kernel"},
    {ReplayConclusion::varies, "varies"},
    {ReplayConclusion::not_replayed, "not_replayed"},
}};

constexpr std::array<std::pair<ReachedKind, std::string_view>, 4> kReachedNames = {{
    {ReachedKind::loss, "loss"},
    {ReachedKind::other_ranks, "other_ranks"},
    {ReachedKind::parameter, "parameter"},
    {ReachedKind::module, "module"},
}};

constexpr std::array<std::pair<LastSeen, std::string_view>, 3> kLastSeenNames = {{
    {LastSeen::unknown, "unknown"},
    {LastSeen::allocated, "allocated"},
    {LastSeen::finite, "finite"},
}};

template <typename Names, typename Value>
std::string_view name_in(const Names& names, Value value) noexcept {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) return name;
  }
  return "unknown";
}

template <typename Value, std::size_t size>
std::optional<Value> value_in(const std::array<std::pair<Value, std::string_view>, size>& names,
                              std::string_view name) noexcept {
  for (const auto& [value, candidate] : names) {
    if (candidate == name) return value;
  }
  return std::nullopt;
}

}  // namespace

std::string_view name_of(BirthKind kind) noexcept {
  return name_in(kBirthKindNames, kind);
}

std::optional<BirthKind> birth_kind_from_name(std::string_view name) noexcept {
  return value_in(kBirthKindNames, name);
}

std::string_view name_of(ReplayConclusion conclusion) noexcept {
  return name_in(kConclusionNames, conclusion);
}

std::optional<ReplayConclusion> replay_conclusion_from_name(std::string_view name) noexcept {
  return value_in(kConclusionNames, name);
}

std::string_view name_of(ReachedKind kind) noexcept {
  return name_in(kReachedNames, kind);
}

std::optional<ReachedKind> reached_kind_from_name(std::string_view name) noexcept {
  return value_in(kReachedNames, name);
}

std::string_view name_of(LastSeen seen) noexcept {
  return name_in(kLastSeenNames, seen);
}

std::optional<LastSeen> last_seen_from_name(std::string_view name) noexcept {
  return value_in(kLastSeenNames, name);
}

}  // namespace nanlocator
