// bundle.json: a Bundle and the checksums of its other files, as text and back.
//
// Reading checks everything that does not need the tensors' bytes: each view is within its storage,
// and each name is a plain file name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "files/json_fields.hpp"
#include "nanlocator/record/bundle.hpp"
#include "nanlocator/record/safetensors.hpp"

namespace nanlocator::inline record_room {

/// In a bundle's folder. The tensors' metadata contain the checksum of bundle.json, under its name.
inline constexpr const char* kBundleFile = "bundle.json";
inline constexpr const char* kTensorsFile = "tensors.safetensors";

struct BundleText {
  Bundle bundle;
  std::map<std::string, std::uint32_t> storage_checksums;  // CRC-32 by name
  std::map<std::string, std::uint32_t> file_checksums;     // of the further files, by name
};

/// Writes version 1. Throws UsageError for everything that `read_bundle_json` would refuse: a view
/// beyond its storage, values nested too deeply, a file whose name is not plain.
[[nodiscard]] std::string bundle_to_json(const Bundle& bundle, const BundleContents& contents);

/// Throws FormatError naming `source` and the key.
[[nodiscard]] BundleText read_bundle_json(std::string_view text, const std::string& source,
                                          const SafetensorsFile& tensors);

/// "89abcdef" for a CRC-32.
[[nodiscard]] inline std::string checksum_text(std::uint32_t crc32) {
  return hexadecimal_text(crc32, 8);
}

/// Names one file in the bundle's own folder and nothing else: no '/', no "..", not hidden, no
/// control characters.
[[nodiscard]] bool is_plain_file_name(std::string_view name) noexcept;

/// Names the same file wherever it is read: absolute, no "..", no control characters, and not in
/// /dev, /proc or /sys, where a path leads elsewhere in each process ("/proc/self/cwd/kernel.py").
[[nodiscard]] bool is_plain_path(std::string_view path);

/// A program may run from /dev/shm; its bundle then omits the path.
[[nodiscard]] inline std::string plain_path_or_none(const std::string& path) {
  return is_plain_path(path) ? path : "";
}

}  // namespace nanlocator::inline record_room
