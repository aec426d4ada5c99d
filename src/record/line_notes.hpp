// Notes about unreadable lines of one file.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace nanlocator::inline record_room {

/// Bounds the memory for notes on a file of garbage: `add` keeps the first `kMost`, then says once
/// that there are more.
class LineNotes {
 public:
  static constexpr std::size_t kMost = 20;

  explicit LineNotes(std::string source) : source_(std::move(source)) {}

  void add(std::string note, std::vector<std::string>& to) {
    if (added_ < kMost) to.push_back(std::move(note));
    if (added_ == kMost) {
      to.push_back(source_ + ": further unreadable lines are not listed");
    }
    ++added_;
  }

 private:
  std::string source_;
  std::size_t added_ = 0;
};

}  // namespace nanlocator::inline record_room
