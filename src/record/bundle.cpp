#include "nanlocator/record/bundle.hpp"

#include <bit>
#include <utility>

#include "files/checksum.hpp"
#include "files/posix_file.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "record/bundle_json.hpp"

namespace nanlocator::inline record_room {
namespace {

/// Parsing bundle.json takes about twenty times its size in memory.
constexpr std::uint64_t kLargestBundleJson = std::uint64_t{64} << 20;

std::filesystem::path folder_of_bundle(const std::filesystem::path& path) {
  return path.filename() == kBundleFile ? folder_of(path) : path;
}

std::string changed(const std::string& what, std::uint32_t found, std::uint32_t expected) {
  return what + ": its bytes have changed: checksum " + checksum_text(found) + ", expected " +
         checksum_text(expected);
}

}  // namespace

bool operator==(const BundleValue& left, const BundleValue& right) {
  const auto bits = [](double number) { return std::bit_cast<std::uint64_t>(number); };
  return left.kind == right.kind && left.tensor == right.tensor && left.boolean == right.boolean &&
         left.integer == right.integer && bits(left.real) == bits(right.real) &&
         bits(left.imaginary) == bits(right.imaginary) && left.text == right.text &&
         left.names == right.names && left.items == right.items;
}

OpenBundle::OpenBundle(const std::filesystem::path& path, FileAccess access)
    : path_(folder_of_bundle(path)), tensors_(path_ / kTensorsFile, access) {
  const auto file = path_ / kBundleFile;
  BundleText text = read_bundle_json(read_file(file, kLargestBundleJson), file.string(), tensors_);
  bundle_ = std::move(text.bundle);
  storage_checksums_ = std::move(text.storage_checksums);
  file_checksums_ = std::move(text.file_checksums);
}

std::vector<std::string> OpenBundle::verify() const {
  std::vector<std::string> mismatches;
  const auto bundle_file = path_ / kBundleFile;
  const std::string tensors_file = (path_ / kTensorsFile).string();
  const std::uint32_t json_checksum = crc32_of(read_file(bundle_file, kLargestBundleJson));
  const auto expected = tensors_.metadata().find(kBundleFile);
  if (expected == tensors_.metadata().end()) {
    mismatches.push_back(tensors_file + ": it does not name the checksum of " + kBundleFile);
  } else if (expected->second != checksum_text(json_checksum)) {
    mismatches.push_back(bundle_file.string() + ": its bytes have changed: checksum " +
                         checksum_text(json_checksum) + ", expected " +
                         expected->second.substr(0, 40));
  }
  for (const auto& entry : tensors_.entries()) {
    const std::uint32_t checksum = crc32_of(entry.bytes);
    const std::uint32_t right = storage_checksums_.at(entry.name);
    if (checksum != right) {
      mismatches.push_back(changed(tensors_file + ": " + entry.name, checksum, right));
    }
  }
  for (const auto& [name, right] : file_checksums_) {
    try {
      const std::uint32_t checksum = crc32_of(read_file(path_ / name));
      if (checksum != right) {
        mismatches.push_back(changed((path_ / name).string(), checksum, right));
      }
    } catch (const IoError& error) {
      mismatches.emplace_back(error.what());
    }
  }
  return mismatches;
}

}  // namespace nanlocator::inline record_room
