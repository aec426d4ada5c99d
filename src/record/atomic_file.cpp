#include "nanlocator/record/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "nanlocator/error.hpp"

namespace nanlocator {
namespace {

[[noreturn]] void throw_io_error(const std::string& attempt, const std::filesystem::path& path,
                                 int error) {
  throw IoError(attempt + " " + path.string() + ": " + std::generic_category().message(error));
}

/// An open file descriptor, closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(const Descriptor&) = delete;  // two owners would close twice
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  [[nodiscard]] int get() const { return descriptor_; }
  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }
  /// Closes now, to learn of errors that network file systems report only here.
  [[nodiscard]] int close() { return ::close(std::exchange(descriptor_, -1)); }

 private:
  int descriptor_;
};

/// Removes the temporary file unless it has been renamed away.
class TemporaryName {
 public:
  explicit TemporaryName(std::filesystem::path path) : path_(std::move(path)) {}
  TemporaryName(const TemporaryName&) = delete;  // one owner removes it
  TemporaryName& operator=(const TemporaryName&) = delete;
  ~TemporaryName() {
    if (!renamed_) ::unlink(path_.c_str());
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  void renamed() { renamed_ = true; }

 private:
  std::filesystem::path path_;
  bool renamed_ = false;
};

std::filesystem::path folder_of(const std::filesystem::path& path) {
  const auto folder = path.parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

/// Several processes, on several hosts of one network file system, and several threads may write
/// into one folder: a process number alone is not unique, so O_EXCL decides and the count goes on.
std::filesystem::path temporary_path_for(const std::filesystem::path& path) {
  static std::atomic<std::uint64_t> count{0};
  // Its name must not be longer than a name may be (255 bytes) where that of `path` is.
  const std::string stem = path.filename().string().substr(0, 200);
  return folder_of(path) /
         ("." + stem + "." + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".tmp");
}

int open_new_file(const std::filesystem::path& path, mode_t mode) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
}

void write_all(int descriptor, std::string_view bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_io_error("cannot write", path, errno);
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor.is_open()) {
    // A folder that may be written but not read (mode 0300): the rename is done, only its
    // durability over a power cut is not asked for.
    if (errno == EACCES) return;
    throw_io_error("cannot open the folder", folder, errno);
  }
  // Some network file systems have no fsync for folders and say EINVAL.
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL) {
    throw_io_error("cannot flush the folder", folder, errno);
  }
}

}  // namespace

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes,
                           std::filesystem::perms permissions) {
  const auto mode = static_cast<mode_t>(permissions & std::filesystem::perms::mask);
  std::filesystem::path temporary_path = temporary_path_for(path);
  int opened = open_new_file(temporary_path, mode);
  for (int attempt = 0; opened < 0 && errno == EEXIST && attempt < 100; ++attempt) {
    temporary_path = temporary_path_for(path);
    opened = open_new_file(temporary_path, mode);
  }
  Descriptor file(opened);
  if (!file.is_open()) throw_io_error("cannot create", path, errno);
  TemporaryName temporary(std::move(temporary_path));

  write_all(file.get(), bytes, path);
  if (::fsync(file.get()) != 0) throw_io_error("cannot flush", path, errno);
  if (file.close() != 0) throw_io_error("cannot close", path, errno);
  if (::rename(temporary.path().c_str(), path.c_str()) != 0) {
    throw_io_error("cannot rename a finished temporary file to", path, errno);
  }
  temporary.renamed();
  sync_folder(folder_of(path));
}

std::string read_file(const std::filesystem::path& path, std::uint64_t limit) {
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) throw_io_error("cannot read", path, errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_io_error("cannot read", path, errno);
  if (S_ISDIR(status.st_mode)) throw_io_error("cannot read", path, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    throw IoError("cannot read " + path.string() + ": not a regular file");
  }

  const auto refuse_as_too_large = [&] {
    throw IoError("cannot read " + path.string() + ": it is larger than the " +
                  std::to_string(limit) + " bytes accepted here");
  };
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > limit) refuse_as_too_large();
  std::string bytes(size + 1, '\0');  // the one more tells the end from "there is more"
  std::size_t filled = 0;
  while (true) {
    // A file that grows while it is read, or one of /proc that says it has no bytes.
    if (filled == bytes.size()) bytes.resize(2 * filled);
    const ssize_t got = ::read(file.get(), bytes.data() + filled, bytes.size() - filled);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_io_error("cannot read", path, errno);
    }
    if (got == 0) break;
    filled += static_cast<std::size_t>(got);
    if (filled > limit) refuse_as_too_large();
  }
  bytes.resize(filled);
  return bytes;
}

}  // namespace nanlocator
