// Files of JSON lines that grow by one incident after another.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string_view>

#include "files/posix_file.hpp"

namespace nanlocator::inline files_room {

class AppendedFile {
 public:
  /// Opens or creates it, with what the umask leaves of 0666. Throws IoError.
  explicit AppendedFile(std::filesystem::path path);

  /// In one write, then fsync. Where a writer before was stopped in the middle of a line, a new one
  /// begins. Throws IoError; what was in the file before stays as it was.
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
