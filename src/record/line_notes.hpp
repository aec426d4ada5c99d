// Remarks about the lines of one file that cannot be read.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace nanlocator::inline record_room {

/// A file of garbage must not fill the memory with remarks about its lines: `add` keeps the first
/// `kMost`, and then says once that there are more.
class LineNotes {
 public:
  static constexpr std::size_t kMost = 20;

  explicit LineNotes(std::string source) : source_(std::move(source)) {}

  void add(std::string note, std::vector<std::string>& to) {
    if (added_ < kMost) to.push_back(std::move(note));
    if (added_ == kMost) {
      to.push_back(source_ + ": further lines that cannot be read are not listed");
    }
    ++added_;
  }

 private:
  std::string source_;
  std::size_t added_ = 0;
};

}  // namespace nanlocator::inline record_room
