#include "nanlocator/files/atomic_file.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "files/posix_file.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline files_room {
namespace {

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

/// Several threads, and several processes on hosts that share a network file system, may write into
/// one folder. A process id is not unique there, so O_EXCL decides and the caller tries the next
/// count.
std::filesystem::path temporary_path_for(const std::filesystem::path& path) {
  static std::atomic<std::uint64_t> count{0};
  // A name may have 255 bytes; the temporary one must fit even if that of `path` uses all of them.
  const std::string stem = path.filename().string().substr(0, 200);
  return folder_of(path) /
         ("." + stem + "." + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".tmp");
}

}  // namespace

void write_file_atomically(const std::filesystem::path& path, std::string_view bytes,
                           std::filesystem::perms permissions) {
  std::filesystem::path temporary_path = temporary_path_for(path);
  int opened = open_new_file(temporary_path, permissions);
  for (int attempt = 0; opened < 0 && errno == EEXIST && attempt < 100; ++attempt) {
    temporary_path = temporary_path_for(path);
    opened = open_new_file(temporary_path, permissions);
  }
  Descriptor file(opened);
  if (!file.is_open()) throw_io_error("cannot create", path, errno);
  TemporaryName temporary(std::move(temporary_path));

  write_all(file.get(), bytes, path);
  flush_and_close(file, path);
  if (::rename(temporary.path().c_str(), path.c_str()) != 0) {
    throw_io_error("cannot rename a finished temporary file to", path, errno);
  }
  temporary.renamed();
  sync_folder(folder_of(path));
}

std::string read_file(const std::filesystem::path& path, std::uint64_t limit) {
  const Descriptor file(open_regular_file(path));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_io_error("cannot read", path, errno);

  const auto refuse_as_too_large = [&] {
    throw IoError("cannot read " + path.string() + ": it is larger than the " +
                  std::to_string(limit) + " bytes accepted here");
  };
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > limit) refuse_as_too_large();
  std::string bytes(size + 1, '\0');  // one more, to detect the end of the file
  std::size_t filled = 0;
  while (true) {
    // The file grew while it was read, or is one of /proc, which report a size of 0.
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

}  // namespace nanlocator::inline files_room
