#include "step/run_directory.hpp"

#include <sys/stat.h>
#include <torch/version.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <type_traits>

#include "nanlocator/error.hpp"

namespace nanlocator::inline step_room {
namespace {

constexpr int kRunVersion = 1;
constexpr mode_t kFolder = 0777;  // before the umask

std::string utc_now(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::ostringstream text;
  text << std::put_time(&parts, format);
  return text.str();
}

// The system's entropy, never Torch's generators: training's random numbers must not change.
std::string random_hex() {
  std::ostringstream text;
  text << std::hex << std::setw(6) << std::setfill('0') << (std::random_device{}() & 0xffffff);
  return text.str();
}

[[noreturn]] void throw_io_error(const std::filesystem::path& path, const std::string& reason) {
  throw IoError("Cannot create the folder " + path.string() + ": " + reason +
                ". Choose another output_dir, or free space there.");
}

// Invalid UTF-8 (a file name) becomes a replacement character instead of an exception.
std::string dump(const nlohmann::ordered_json& json, int indent) {
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

template <typename Value>
void add(nlohmann::ordered_json& json, const LocatorOptions& options,
         const OptionField<Value>& option) {
  const Value& value = options.*option.field;
  if constexpr (HasNames<Value>) {
    json[option.name] = name_of(value);
  } else if constexpr (std::is_same_v<Value, std::filesystem::path>) {
    json[option.name] = value.string();
  } else if constexpr (std::is_same_v<Value, std::chrono::milliseconds>) {
    json[std::string(option.name) + "_ms"] = value.count();
  } else {
    json[option.name] = value;
  }
}

}  // namespace

std::filesystem::path run_directory(const std::filesystem::path& output_dir, int attempt) {
  return output_dir / std::string("a").append(std::to_string(attempt));
}

void ensure_directory(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw_io_error(directory, error.message());
}

Run start_run(const std::filesystem::path& output_dir) {
  ensure_directory(output_dir);
  for (int attempt = 0;; ++attempt) {
    const auto directory = run_directory(output_dir, attempt);
    if (::mkdir(directory.c_str(), kFolder) == 0) {
      return {utc_now("%Y%m%dT%H%M%SZ") + "-" + random_hex(), attempt};
    }
    if (errno != EEXIST) throw_io_error(directory, std::strerror(errno));
  }
}

std::string utc_time() {
  return utc_now("%Y-%m-%dT%H:%M:%SZ");
}

std::string run_json(const Run& run, const std::string& started, const LocatorOptions& options,
                     const RankCoordinates& coordinates) {
  nlohmann::ordered_json json;
  json["version"] = kRunVersion;
  json["run_id"] = run.id;
  json["attempt"] = run.attempt;
  json["started"] = started;
  json["nanlocator"] = NANLOCATOR_VERSION;
  json["torch"] = TORCH_VERSION;
  json["integration"] = options.integration;
  json["level"] = name_of(options.level);
  json["world_size"] = coordinates.world_size;
  json["layout"] = {{"tp", coordinates.tp.size},
                    {"pp", coordinates.pp.size},
                    {"dp", coordinates.dp.size},
                    {"cp", coordinates.cp.size},
                    {"ep", coordinates.ep.size}};
  json["host"] = coordinates.host;
  for_each_option([&](const auto& option) { add(json["options"], options, option); });
  json["not_covered"] = options.not_covered;
  return dump(json, 2) + "\n";
}

std::string agreed_options_json(const LocatorOptions& options, std::string_view flag_device) {
  nlohmann::ordered_json json;
  json["nanlocator"] = NANLOCATOR_VERSION;
  json["torch"] = TORCH_VERSION;
  json["integration"] = options.integration;
  for_each_option([&](const auto& option) {
    if (option.is_agreed) add(json, options, option);
  });
  json["flag_device"] = flag_device;
  return dump(json, -1);
}

}  // namespace nanlocator::inline step_room
