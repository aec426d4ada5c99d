// Files of JSON lines to which each incident is appended.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string_view>

#include "files/posix_file.hpp"

namespace nanlocator::inline files_room {

class AppendedFile {
 public:
  /// Opens the file, or creates it with 0666 less the umask. Throws IoError.
  explicit AppendedFile(std::filesystem::path path);

  /// One write, then fsync. Starts a new line if an earlier writer was stopped in the middle of
  /// one. Throws IoError and leaves the earlier content unchanged.
  void append_lines(std::string_view lines);

 private:
  [[nodiscard]] bool ends_in_mid_line() const;
  void append(std::string_view bytes);
  [[noreturn]] void undo_and_throw(const char* attempt);

  std::filesystem::path path_;
  Descriptor descriptor_;
  off_t size_ = 0;
};

}  // namespace nanlocator::inline files_room
