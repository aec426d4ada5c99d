#include "files/posix_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

#include "nanlocator/error.hpp"

namespace nanlocator::inline files_room {

void throw_io_error(const std::string& attempt, const std::filesystem::path& path, int error) {
  throw IoError(attempt + " " + path.string() + ": " + std::generic_category().message(error));
}

int open_regular_file(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe without a writer would block forever.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw_io_error("cannot read", path, errno);
  struct stat status {};
  const int error = ::fstat(file, &status) == 0 ? 0 : errno;
  if (error == 0 && S_ISREG(status.st_mode)) return file;
  ::close(file);
  if (error != 0) throw_io_error("cannot read", path, error);
  if (S_ISDIR(status.st_mode)) throw_io_error("cannot read", path, EISDIR);
  throw IoError("cannot read " + path.string() + ": not a regular file");
}

int open_new_file(const std::filesystem::path& path, std::filesystem::perms permissions) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                static_cast<mode_t>(permissions & std::filesystem::perms::mask));
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

void flush_and_close(Descriptor& file, const std::filesystem::path& path) {
  if (::fsync(file.get()) != 0) throw_io_error("cannot flush", path, errno);
  if (file.close() != 0) throw_io_error("cannot close", path, errno);
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor.is_open()) {
    // The folder can be written but not read (mode 0300): the rename is done, but cannot be made
    // durable against a power cut.
    if (errno == EACCES) return;
    throw_io_error("cannot open the folder", folder, errno);
  }
  // Some network file systems have no fsync for folders and return EINVAL.
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL) {
    throw_io_error("cannot flush the folder", folder, errno);
  }
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  const auto folder = path.parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

}  // namespace nanlocator::inline files_room
