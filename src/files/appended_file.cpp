#include "files/appended_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "nanlocator/error.hpp"

namespace nanlocator::inline files_room {

AppendedFile::AppendedFile(std::filesystem::path path)
    : path_(std::move(path)),
      descriptor_(::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666)) {
  if (!descriptor_.is_open()) throw_io_error("cannot open", path_, errno);
  struct stat status {};
  if (::fstat(descriptor_.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw IoError("cannot append to " + path_.string() + ": not a regular file");
  }
  size_ = status.st_size;
}

void AppendedFile::append_lines(std::string_view lines) {
  std::string bytes(ends_in_mid_line() ? 1 : 0, '\n');
  append(bytes.append(lines));
}

bool AppendedFile::ends_in_mid_line() const {
  char last = '\n';
  return size_ > 0 && ::pread(descriptor_.get(), &last, 1, size_ - 1) == 1 && last != '\n';
}

void AppendedFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) undo_and_throw("write");
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::fsync(descriptor_.get()) != 0) undo_and_throw("fsync");
}

void AppendedFile::undo_and_throw(const char* attempt) {
  const int error = errno;
  // Half an incident is useless. If truncating fails too, the reader finds a record that is cut
  // off.
  if (::ftruncate(descriptor_.get(), size_) != 0) errno = 0;
  throw_io_error(std::string("cannot ") + attempt, path_, error);
}

}  // namespace nanlocator::inline files_room
