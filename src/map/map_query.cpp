#include "nanlocator/map/map_query.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "files/text.hpp"

namespace nanlocator::inline map_room {
namespace {

/// Matches the whole `name`. Never backtracks into earlier stars: at most name.size() *
/// pattern.size() steps.
bool glob_matches(std::string_view name, std::string_view pattern) noexcept {
  std::size_t at = 0;
  std::size_t in_pattern = 0;
  std::size_t last_star = std::string_view::npos;
  std::size_t name_at_star = 0;
  while (at < name.size()) {
    if (in_pattern < pattern.size() && pattern[in_pattern] == '*') {
      last_star = in_pattern++;
      name_at_star = at;
    } else if (in_pattern < pattern.size() &&
               (pattern[in_pattern] == '?' || pattern[in_pattern] == name[at])) {
      ++in_pattern;
      ++at;
    } else if (last_star != std::string_view::npos) {
      in_pattern = last_star + 1;  // let the star match one more byte
      at = ++name_at_star;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', in_pattern) == std::string_view::npos;
}

/// The coordinates that distinguish the replicas of one parameter, all but the tensor-parallel one.
auto place_without_tp(const RankCoordinates& coordinates) {
  return std::tuple(coordinates.pp.rank, coordinates.dp.rank, coordinates.cp.rank);
}

/// Under tensor parallelism an expert's weights may be sliced or whole
/// (expert-tensor-parallel-size), and the manifest does not say which. If several tp ranks with
/// otherwise equal coordinates hold the same expert, they hold slices.
bool is_expert_sliced(const FoundParameter& found) {
  std::set<std::tuple<int, int, int>> places;
  return std::ranges::any_of(found.holders, [&](const ParameterHolder& holder) {
    return !places.insert(place_without_tp(holder.map->coordinates())).second;
  });
}

void fill_tp_slices(FoundParameter& found) {
  const bool expert_is_sliced = is_expert_sliced(found);
  for (auto& holder : found.holders) {
    const auto& parameter = *holder.parameter;
    const auto& tp = holder.map->coordinates().tp;
    const bool is_known = !parameter.dtype.empty();
    const bool is_sliced = parameter.is_expert ? expert_is_sliced : !parameter.is_tp_duplicate;
    if (is_known && tp.size > 1 && is_sliced) holder.tp_slice = tp;
  }
}

std::vector<FoundParameter> find_where(std::span<const ParameterMap> maps,
                                       const std::function<bool(const ParameterInfo&)>& fits) {
  std::vector<FoundParameter> found;
  std::unordered_map<std::string_view, std::size_t> position_of;
  for (const auto& map : maps) {
    for (const auto& parameter : map.parameters()) {
      if (!fits(parameter)) continue;
      const auto [entry, is_new] = position_of.try_emplace(parameter.name, found.size());
      if (is_new) found.push_back({parameter.name, {}});
      found[entry->second].holders.push_back({&map, &parameter, std::nullopt});
    }
  }
  for (auto& parameter : found) fill_tp_slices(parameter);
  return found;
}

/// The first parameter of `right` that comes before one which precedes it on the left. The values
/// are the parameter that it follows on the left, and the one that it precedes on the right.
std::optional<MapDifference> first_out_of_order(const ParameterMap& left,
                                                const ParameterMap& right) {
  // Left ids of the common parameters in the right order; sorted if the order is the same.
  const ParameterInfo* highest = nullptr;
  for (const auto& parameter : right.parameters()) {
    const ParameterInfo* const same = left.find(parameter.name);
    if (same == nullptr) continue;
    if (highest != nullptr && same->id < highest->id) {
      return MapDifference{.kind = MapDifferenceKind::order,
                           .name = parameter.name,
                           .left_id = same->id,
                           .right_id = parameter.id,
                           .left = "before " + highest->name,
                           .right = "after " + highest->name};
    }
    highest = same;
  }
  return std::nullopt;
}

std::string describe_optional(const std::optional<int>& number) {
  return number ? std::to_string(*number) : "none";
}

void compare_values(const ParameterInfo& left, const ParameterInfo& right,
                    std::vector<MapDifference>& differences) {
  const auto add = [&](MapDifferenceKind kind, std::string left_value, std::string right_value) {
    differences.push_back(
        {kind, left.name, left.id, right.id, std::move(left_value), std::move(right_value)});
  };
  if (left.id != right.id) add(MapDifferenceKind::id, {}, {});
  if (left.dtype.empty() || right.dtype.empty()) return;
  if (left.shape != right.shape) {
    add(MapDifferenceKind::shape, describe_shape(left.shape), describe_shape(right.shape));
  }
  if (left.dtype != right.dtype) add(MapDifferenceKind::dtype, left.dtype, right.dtype);
  if (left.layer != right.layer) {
    add(MapDifferenceKind::layer, describe_optional(left.layer), describe_optional(right.layer));
  }
  if (left.chunk != right.chunk) {
    add(MapDifferenceKind::chunk, std::to_string(left.chunk), std::to_string(right.chunk));
  }
  if (describe_flags(left) != describe_flags(right)) {
    const auto or_none = [](std::string flags) { return flags.empty() ? "none" : flags; };
    add(MapDifferenceKind::flags, or_none(describe_flags(left)), or_none(describe_flags(right)));
  }
}

}  // namespace

bool name_matches(std::string_view name, std::string_view pattern) noexcept {
  if (pattern.find_first_of("*?") == std::string_view::npos) {
    return name.find(pattern) != std::string_view::npos;
  }
  while (!glob_matches(name, pattern)) {
    const auto dot = name.find('.');
    if (dot == std::string_view::npos) return false;
    name.remove_prefix(dot + 1);
  }
  return true;
}

std::vector<FoundParameter> find_parameters(std::span<const ParameterMap> maps, std::int64_t id) {
  return find_where(maps, [id](const ParameterInfo& parameter) { return parameter.id == id; });
}

std::vector<FoundParameter> find_parameters(std::span<const ParameterMap> maps,
                                            std::string_view pattern) {
  return find_where(maps, [pattern](const ParameterInfo& parameter) {
    return name_matches(parameter.name, pattern);
  });
}

std::vector<MapDifference> compare_maps(const ParameterMap& left, const ParameterMap& right) {
  std::vector<MapDifference> differences;
  if (auto order = first_out_of_order(left, right)) differences.push_back(std::move(*order));
  for (const auto& parameter : left.parameters()) {
    if (const ParameterInfo* const same = right.find(parameter.name)) {
      compare_values(parameter, *same, differences);
    } else {
      differences.push_back(
          {MapDifferenceKind::only_left, parameter.name, parameter.id, std::nullopt, {}, {}});
    }
  }
  for (const auto& parameter : right.parameters()) {
    if (left.find(parameter.name) != nullptr) continue;
    differences.push_back(
        {MapDifferenceKind::only_right, parameter.name, std::nullopt, parameter.id, {}, {}});
  }
  return differences;
}

std::string describe_flags(const ParameterInfo& parameter) {
  std::string flags;
  const auto add = [&](bool is_set, const char* flag) {
    if (is_set) append_item(flags, flag);
  };
  add(parameter.is_expert, "expert");
  add(parameter.is_shared, "shared");
  add(parameter.is_tp_duplicate, "tp-duplicate");
  add(parameter.is_tied, "tied");
  add(parameter.may_be_untouched, "may-be-untouched");
  return flags;
}

}  // namespace nanlocator::inline map_room
