#include "nanlocator/record/birth.hpp"

#include "files/names.hpp"

namespace nanlocator {
namespace {

constexpr Names<BirthKind, 11> kBirthKindNames = {{
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

constexpr Names<ReplayConclusion, 6> kConclusionNames = {{
    {ReplayConclusion::deterministic_overflow, "deterministic_overflow"},
    {ReplayConclusion::deterministic_undefined, "deterministic_undefined"},
    {ReplayConclusion::deterministic_custom, "deterministic_custom"},
    {ReplayConclusion::deterministic_kernel, "deterministic_kernel"},
    {ReplayConclusion::varies, "varies"},
    {ReplayConclusion::not_replayed, "not_replayed"},
}};

constexpr Names<ReachedKind, 4> kReachedNames = {{
    {ReachedKind::loss, "loss"},
    {ReachedKind::other_ranks, "other_ranks"},
    {ReachedKind::parameter, "parameter"},
    {ReachedKind::module, "module"},
}};

constexpr Names<LastSeen, 3> kLastSeenNames = {{
    {LastSeen::unknown, "unknown"},
    {LastSeen::allocated, "allocated"},
    {LastSeen::finite, "finite"},
}};

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
