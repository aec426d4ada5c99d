// Queries on the maps of a run: who holds this parameter, and how do two maps differ?
//
// Plain functions on maps already read (read_map_directory); nothing here opens a file. Results
// point into the maps, which must outlive them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/map/parameter_map.hpp"

namespace nanlocator::inline map_room {

/// True if `pattern` occurs in `name`. A pattern with * (any text) or ? (one byte) must match the
/// whole name or its end after a dot: "layers.3.*" finds "decoder.layers.3.mlp.weight". No other
/// character is special; letter case counts.
[[nodiscard]] bool name_matches(std::string_view name, std::string_view pattern) noexcept;

/// One rank that holds a parameter, and which part of it.
struct ParameterHolder {
  const ParameterMap* map = nullptr;
  const ParameterInfo* parameter = nullptr;
  /// Its slice among the tensor-parallel ranks; empty if every rank holds the same.
  std::optional<AxisCoordinate> tp_slice;
};

/// A name and every rank that holds it, in the order of the maps.
struct FoundParameter {
  std::string_view name;
  std::vector<ParameterHolder> holders;
};

/// The parameters with this id: each pipeline stage has its own, so there may be several names.
[[nodiscard]] std::vector<FoundParameter> find_parameters(std::span<const ParameterMap> maps,
                                                          std::int64_t id);
/// The parameters whose name matches, ordered as they appear in the maps.
[[nodiscard]] std::vector<FoundParameter> find_parameters(std::span<const ParameterMap> maps,
                                                          std::string_view pattern);

enum class MapDifferenceKind : std::uint8_t {
  only_left,   // the name is in the left map alone
  only_right,  // the name is in the right map alone
  order,       // common parameters are ordered differently
  id,          // the same name has another id
  shape,
  dtype,
  layer,
  chunk,
  flags,  // expert, shared, tp-duplicate, tied, may-be-untouched
};
[[nodiscard]] constexpr auto names_of(MapDifferenceKind) {
  return std::to_array<std::string_view>(
      {"only_left", "only_right", "order", "id", "shape", "dtype", "layer", "chunk", "flags"});
}

struct MapDifference {
  MapDifferenceKind kind = MapDifferenceKind::id;
  std::string name;
  std::optional<std::int64_t> left_id;
  std::optional<std::int64_t> right_id;
  std::string
      left;  // the value on each side: "[4, 8]", "bfloat16", "expert, tied"; empty for an id
  std::string right;
  friend bool operator==(const MapDifference&, const MapDifference&) = default;
};

/// The differences between two maps, matched by name. `order` is listed once, for the first
/// parameter that comes too late on the right. If one side knows only ids and names (empty dtype),
/// only those are compared. Raw names, buckets and shards are not compared: they differ between
/// data-parallel ranks and wrappers by design.
[[nodiscard]] std::vector<MapDifference> compare_maps(const ParameterMap& left,
                                                      const ParameterMap& right);

/// The flags that are set: "expert, tp-duplicate"; empty if none is.
[[nodiscard]] std::string describe_flags(const ParameterInfo& parameter);

}  // namespace nanlocator::inline map_room
