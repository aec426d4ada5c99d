#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "files/checksum.hpp"
#include "files/posix_file.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/record/bundle.hpp"
#include "record/bundle_json.hpp"

namespace nanlocator::inline record_room {
namespace {

constexpr const char* kBundles = "bundles";

/// "step12-backward-rank3-decoder.layers.3.q_layernorm". A long name keeps its end, which
/// distinguishes modules.
std::string folder_name_of(const Bundle& bundle) {
  const Sighting& sighting = bundle.birth.sighting;
  std::string name = "step" + std::to_string(sighting.iteration) + "-" +
                     std::string(name_of(sighting.phase)) + "-rank" +
                     std::to_string(bundle.coordinates.rank);
  std::string place = !sighting.module.empty() ? sighting.module : sighting.op;
  if (place.empty()) return name;
  constexpr std::size_t kLongest = 80;
  if (place.size() > kLongest) place.erase(0, place.size() - kLongest);
  for (char& byte : place) {
    const bool is_safe = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') ||
                         (byte >= '0' && byte <= '9') || byte == '.' || byte == '_' || byte == '-';
    if (!is_safe) byte = '_';
  }
  return name + "-" + place;
}

/// A folder in progress: private, and removed with its contents unless it was renamed.
class PartialFolder {
 public:
  explicit PartialFolder(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code ignored;  // left by a killed process that had the same id
    std::filesystem::remove_all(path_, ignored);
    if (::mkdir(path_.c_str(), 0700) != 0) throw_io_error("cannot create", path_, errno);
  }
  PartialFolder(const PartialFolder&) = delete;  // one owner removes it
  PartialFolder& operator=(const PartialFolder&) = delete;
  ~PartialFolder() {
    std::error_code ignored;
    if (!is_renamed_) std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  void rename_to(const std::filesystem::path& target) {
    if (::rename(path_.c_str(), target.c_str()) != 0) {
      throw_io_error("cannot rename a finished bundle to", target, errno);
    }
    is_renamed_ = true;
  }

 private:
  std::filesystem::path path_;
  bool is_renamed_ = false;
};

void write_private_file(const std::filesystem::path& path, std::string_view bytes) {
  Descriptor file(open_new_file(path, kPrivateFile));
  if (!file.is_open()) throw_io_error("cannot create", path, errno);
  write_all(file.get(), bytes, path);
  flush_and_close(file, path);
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  const bool is_new = std::filesystem::create_directories(folder, error);
  if (error) throw_io_error("cannot create", folder, error.value());
  if (is_new) sync_folder(folder_of(folder));
}

/// The first free one of name, name-2, name-3, ...
std::string free_folder(const std::filesystem::path& run_dir, const std::string& name,
                        const std::set<std::string>& taken) {
  constexpr int kMostOfOneName = 10'000;
  for (int count = 1; count < kMostOfOneName; ++count) {
    const std::string folder =
        std::string(kBundles) + "/" + name + (count == 1 ? "" : "-" + std::to_string(count));
    struct stat status {};
    const bool is_free =
        !taken.contains(folder) && ::lstat((run_dir / folder).c_str(), &status) != 0;
    if (is_free) return folder;
  }
  throw IoError("cannot name a bundle in " + (run_dir / kBundles).string() + ": " + name + " and " +
                std::to_string(kMostOfOneName) + " more are taken");
}

std::uint64_t bytes_of(const BundleContents& contents) {
  std::uint64_t bytes = 0;
  for (const auto& storage : contents.storages) bytes += storage.bytes.size();
  for (const auto& [name, file] : contents.files) bytes += file.size();
  return bytes;
}

void write_folder(const std::filesystem::path& target, const PreparedBundle& prepared) {
  const auto parent = target.parent_path();
  make_folder(parent);
  PartialFolder folder(
      parent / (".partial-" + target.filename().string() + "-" + std::to_string(::getpid())));
  write_safetensors(folder.path() / kTensorsFile, prepared.contents.storages,
                    {{kBundleFile, checksum_text(crc32_of(prepared.json))}});
  for (const auto& [file, text] : prepared.contents.files) {
    write_private_file(folder.path() / file, text);
  }
  write_private_file(folder.path() / kBundleFile, prepared.json);
  sync_folder(folder.path());
  folder.rename_to(target);
  sync_folder(parent);
}

}  // namespace

BundleStore::BundleStore(std::filesystem::path run_dir, BundleBudget budget)
    : run_dir_(std::move(run_dir)), budget_(budget) {}

std::optional<PreparedBundle> BundleStore::prepare(const Bundle& bundle, BundleContents contents) {
  const std::string name = folder_name_of(bundle);
  const std::uint64_t bytes = bytes_of(contents);
  const bool is_too_large = bytes > budget_.bytes - std::min(bytes_, budget_.bytes);
  if (is_too_large || count_ >= budget_.count) {
    dropped_.push_back("the bundle " + name + " (" + std::to_string(bytes) +
                       " bytes) was not written: the budget of " + std::to_string(budget_.bytes) +
                       " bytes and " + std::to_string(budget_.count) +
                       " bundles per rank already holds " + std::to_string(bytes_) + " bytes and " +
                       std::to_string(count_) + " bundles; a budget of " +
                       std::to_string(bytes_ + bytes) + " bytes and " + std::to_string(count_ + 1) +
                       " bundles would keep it");
    return std::nullopt;
  }
  PreparedBundle prepared;
  prepared.json = bundle_to_json(bundle, contents);
  prepared.folder = free_folder(run_dir_, name, prepared_);
  prepared.contents = std::move(contents);
  prepared_.insert(prepared.folder);
  bytes_ += bytes + prepared.json.size();
  ++count_;
  return prepared;
}

void BundleStore::write(const PreparedBundle& prepared) {
  try {
    write_folder(run_dir_ / prepared.folder, prepared);
  } catch (...) {
    bytes_ -= bytes_of(prepared.contents) + prepared.json.size();
    --count_;
    prepared_.erase(prepared.folder);
    throw;
  }
}

std::string BundleStore::write(const Bundle& bundle, const BundleContents& contents) {
  const auto prepared = prepare(bundle, contents);
  if (!prepared) return {};
  write(*prepared);
  return prepared->folder;
}

std::uint64_t BundleStore::bytes_written() const noexcept {
  return bytes_;
}

const std::vector<std::string>& BundleStore::dropped() const noexcept {
  return dropped_;
}

}  // namespace nanlocator::inline record_room
