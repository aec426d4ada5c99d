#include "nanlocator/map/parameter_map.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "files/strict_json.hpp"
#include "files/utf8.hpp"
#include "map/coordinates_json.hpp"
#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"

namespace nanlocator::inline map_room {
namespace {

constexpr int kManifestVersion = 1;

}  // namespace

std::int64_t ParameterInfo::numel() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return product;
}

ParameterMap::ParameterMap(RankCoordinates coordinates, std::vector<ParameterInfo> parameters,
                           std::string run_id)
    : coordinates_(std::move(coordinates)),
      parameters_(std::move(parameters)),
      by_name_(parameters_.size()),
      run_id_(std::move(run_id)) {
  check_coordinates(coordinates_);
  if (!is_utf8(run_id_)) throw UsageError("the run id is not UTF-8");
  for (std::size_t position = 0; position < parameters_.size(); ++position) {
    const auto& parameter = parameters_[position];
    if (!std::cmp_equal(parameter.id, position)) {
      throw UsageError("parameter ids must be 0, 1, 2, ... in order: found " +
                       std::to_string(parameter.id) + " at position " + std::to_string(position));
    }
    check_parameter(parameter);
  }
  const auto name_at = [this](std::size_t position) -> const std::string& {
    return parameters_[position].name;
  };
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  std::ranges::sort(by_name_, {}, name_at);
  const auto repeated = std::ranges::adjacent_find(by_name_, {}, name_at);
  if (repeated != by_name_.end()) {
    const auto [first, second] = std::minmax(repeated[0], repeated[1]);
    throw UsageError("the parameters " + std::to_string(first) + " and " + std::to_string(second) +
                     " have the same name " + name_at(first) +
                     "; names must be unique over a rank's model chunks");
  }
}

const ParameterInfo& ParameterMap::at(std::int64_t id) const {
  if (id < 0 || std::cmp_greater_equal(id, parameters_.size())) {
    throw UsageError("there is no parameter " + std::to_string(id) + " on " +
                     coordinates_.describe() + ", which has " + std::to_string(size()) +
                     " parameters");
  }
  return parameters_[static_cast<std::size_t>(id)];
}

const ParameterInfo* ParameterMap::find(std::string_view name) const noexcept {
  const auto name_at = [this](std::size_t position) -> std::string_view {
    return parameters_[position].name;
  };
  const auto found = std::ranges::lower_bound(by_name_, name, {}, name_at);
  if (found == by_name_.end() || name_at(*found) != name) return nullptr;
  return &parameters_[*found];
}

std::string ParameterMap::to_id_name_json() const {
  std::string json = "{";
  for (const auto& parameter : parameters_) {
    if (parameter.id != 0) json += ", ";
    json += '"' + std::to_string(parameter.id) + "\": " + to_python_json_string(parameter.name);
  }
  return json + "}";
}

std::string ParameterMap::to_manifest_json() const {
  const auto ascii = [](const nlohmann::ordered_json& json) { return json.dump(-1, ' ', true); };
  std::string text =
      "{\n\"version\": " + std::to_string(kManifestVersion) + ",\n\"run_id\": " + ascii(run_id_) +
      ",\n\"coordinates\": " + ascii(fields_to_json(coordinates_)) + ",\n\"parameters\": [";
  for (const auto& parameter : parameters_) {
    text += (parameter.id == 0 ? "\n" : ",\n") + ascii(parameter_to_json(parameter));
  }
  return text + "\n]\n}\n";
}

ParameterMap ParameterMap::from_manifest_json(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  const JsonObject manifest(json, source);
  require_version(manifest, kManifestVersion);
  const auto& list = manifest.member("parameters");
  if (!list.is_array()) throw_unexpected_json(manifest.where("parameters"), list, "an array");
  std::vector<ParameterInfo> parameters;
  parameters.reserve(list.size());
  for (const auto& value : list) {
    parameters.push_back(parameter_from_json(
        value, source, "parameters[" + std::to_string(parameters.size()) + "]"));
  }
  try {
    return {member_from_json<RankCoordinates>(manifest, "coordinates"), std::move(parameters),
            manifest.text("run_id")};
  } catch (const UsageError& error) {
    throw FormatError(source + ": " + error.what());
  }
}

void ParameterMap::write(const std::filesystem::path& directory) const {
  const std::string suffix = coordinates_.file_suffix() + ".json";
  write_file_atomically(directory / ("param_id_name_map_" + suffix), to_id_name_json());
  write_file_atomically(directory / ("param_manifest_" + suffix), to_manifest_json());
}

}  // namespace nanlocator::inline map_room
