// The system calls that this project's files share: self-closing descriptors, complete writes,
// fsynced folders, and IoErrors that name the path and the reason.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace nanlocator::inline files_room {

/// "cannot write /run/x.json: No space left on device" for `error`, a value of errno.
[[noreturn]] void throw_io_error(const std::string& attempt, const std::filesystem::path& path,
                                 int error);

/// An open file descriptor, closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(const Descriptor&) = delete;  // two owners would close it twice
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  [[nodiscard]] int get() const { return descriptor_; }
  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }
  /// Closes now, to get errors that network file systems report only here.
  [[nodiscard]] int close() { return ::close(std::exchange(descriptor_, -1)); }

 private:
  int descriptor_;
};

/// Opens a regular file for reading. Throws IoError. Refuses a folder, a pipe or a device, because
/// reading one may never end.
[[nodiscard]] int open_regular_file(const std::filesystem::path& path);

/// Creates a file that must not exist yet. On failure: -1, and the reason in errno.
[[nodiscard]] int open_new_file(const std::filesystem::path& path,
                                std::filesystem::perms permissions);

/// Writes every byte, however often a write is interrupted. Throws IoError, naming `path`.
void write_all(int descriptor, std::string_view bytes, const std::filesystem::path& path);

/// fsync and close. Throws IoError, naming `path`.
void flush_and_close(Descriptor& file, const std::filesystem::path& path);

/// Makes the names in `folder` survive a power cut. Throws IoError.
void sync_folder(const std::filesystem::path& folder);

/// "." if `path` has no folder.
[[nodiscard]] std::filesystem::path folder_of(const std::filesystem::path& path);

}  // namespace nanlocator::inline files_room
