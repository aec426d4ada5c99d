#include "netcheck/memory_check.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "nanlocator/error.hpp"
#include "netcheck/torch_versions.hpp"

namespace nanlocator::netcheck {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMebibyte = 1 << 20;
constexpr std::uint64_t kDefaultBytes = 64 * kMebibyte;
constexpr std::int64_t kWordsPerChunk = 256 * kMebibyte / 8;
// Compared at once: a comparison allocates about this much beside the memory under test.
constexpr std::int64_t kWordsPerSlice = 4 * kMebibyte / 8;
constexpr double kLargestFraction = 0.95;

// --- free memory ---------------------------------------------------------------------------

std::optional<std::uint64_t> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // no such file, or "max"
}

/// The memory left by the limits of this process's cgroup and of the enclosing ones.
std::uint64_t left_in_cgroup() {
  auto left = std::numeric_limits<std::uint64_t>::max();
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    if (line.rfind("0::/", 0) != 0) continue;  // version 1
    const std::filesystem::path root = "/sys/fs/cgroup";
    for (auto group = root / line.substr(4);; group = group.parent_path()) {
      const auto most = number_in(group / "memory.max");
      const auto used = number_in(group / "memory.current");
      if (most && used) left = std::min(left, *most - std::min(*most, *used));
      if (group == root || !group.has_relative_path()) break;
    }
  }
  return left;
}

std::uint64_t available_on_host() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::uint64_t kibibytes = 0;
  std::string unit;
  while (file >> name >> kibibytes) {
    std::getline(file, unit);
    if (name == "MemAvailable:") return std::min(kibibytes * 1024, left_in_cgroup());
  }
  throw IoError("/proc/meminfo has no MemAvailable; check a fraction of 0, which asks for 64 MiB");
}

std::uint64_t free_bytes(at::Device device) {
  if (device.is_cpu()) return available_on_host();
  return free_device_bytes(device);
}

std::uint64_t bytes_to_check(at::Device device, double fraction) {
  const auto free = free_bytes(device);
  if (fraction == 0) return std::min(kDefaultBytes, free / 2);
  return static_cast<std::uint64_t>(static_cast<double>(free) * fraction);
}

// --- the memory under test ----------------------------------------------------------------------

/// A part of a chunk; `first` counts the words before it, over all chunks.
struct Slice {
  at::Tensor words;
  std::size_t chunk = 0;
  std::int64_t offset = 0;
  std::int64_t first = 0;
};

class Memory {
 public:
  explicit Memory(at::Device device) : device_(device) {}
  /// Not in the constructor, because the destructor must free earlier chunks if it throws.
  void allocate(std::uint64_t bytes) {
    auto words = static_cast<std::int64_t>(bytes / 8);
    for (std::int64_t first = 0; words > 0;) {
      const auto count = std::min(words, kWordsPerChunk);
      chunks_.push_back(at::empty({count}, at::TensorOptions(at::kLong).device(device_)));
      for (std::int64_t offset = 0; offset < count; offset += kWordsPerSlice) {
        const auto length = std::min(kWordsPerSlice, count - offset);
        slices_.push_back(
            {chunks_.back().narrow(0, offset, length), chunks_.size() - 1, offset, first + offset});
      }
      first += count;
      words -= count;
    }
  }

  ~Memory() {
    slices_.clear();
    chunks_.clear();
    if (device_.is_cpu()) return;
    try {  // otherwise the cache keeps it from the training that follows
      empty_device_cache(device_);
    } catch (const std::exception&) {  // the device has failed, which is already reported
    }
  }
  Memory(const Memory&) = delete;  // as large as the device's memory
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] const std::vector<at::Tensor>& chunks() const { return chunks_; }
  [[nodiscard]] const std::vector<Slice>& slices() const { return slices_; }

 private:
  at::Device device_;
  std::vector<at::Tensor> chunks_;
  std::vector<Slice> slices_;
};

// --- patterns -----------------------------------------------------------------------------------

/// The content of a word: `value`, or its own index if `is_address`; possibly inverted.
struct Pattern {
  std::uint64_t value = 0;
  bool is_address = false;
  bool is_inverted = false;

  [[nodiscard]] Pattern inverse() const { return {value, is_address, !is_inverted}; }
  [[nodiscard]] std::uint64_t at(std::int64_t word) const {
    const auto plain = is_address ? static_cast<std::uint64_t>(word) : value;
    return is_inverted ? ~plain : plain;
  }
};

void write(const Pattern& pattern, const Slice& slice) {
  auto words = slice.words;
  if (!pattern.is_address) {
    words.fill_(static_cast<std::int64_t>(pattern.at(0)));
    return;
  }
  at::arange_out(words, slice.first, slice.first + words.numel(), 1);
  if (pattern.is_inverted) words.bitwise_not_();
}

at::Tensor is_wrong(const Pattern& pattern, const Slice& slice) {
  if (!pattern.is_address) return slice.words.ne(static_cast<std::int64_t>(pattern.at(0)));
  auto expected =
      at::arange(slice.first, slice.first + slice.words.numel(), 1, slice.words.options());
  if (pattern.is_inverted) expected.bitwise_not_();
  return slice.words.ne(expected);
}

std::string hexadecimal(std::uint64_t word) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%016" PRIx64, word);
  return text;
}

std::optional<std::string> compare(const Pattern& pattern, const Slice& slice) {
  const auto wrong = is_wrong(pattern, slice);
  if (!wrong.any().item<bool>()) return std::nullopt;
  const auto places = wrong.nonzero();
  const auto place = places[0].item<std::int64_t>();
  const auto expected = pattern.at(slice.first + place);
  const auto found = static_cast<std::uint64_t>(slice.words[place].item<std::int64_t>());
  const auto offset = static_cast<std::uint64_t>(slice.offset + place) * 8;
  // A second read distinguishes a cell that lost its value from a read error.
  const auto changed = found ^ expected;
  return "chunk " + std::to_string(slice.chunk) + ", byte " + std::to_string(offset) +
         ": written " + hexadecimal(expected) + ", read " +
         (changed == 0 ? "wrong once, right when read again"
                       : hexadecimal(found) + ", XOR " + hexadecimal(changed)) +
         "; " + std::to_string(places.size(0)) + " of the " + std::to_string(slice.words.numel()) +
         " words around it are wrong";
}

// --- the tests ----------------------------------------------------------------------------------

struct Test {
  std::string name;
  Pattern pattern;
  bool is_moving = false;  // moving inversions: two sweeps that check and invert
};

const std::vector<Test>& tests() {
  static const std::vector<Test> all = {
      {"own address", {0, true, false}},
      {"own address, inverted", {0, true, true}},
      {"pattern 0x00", {0}},
      {"pattern 0xff", {0xffffffffffffffff}},
      {"pattern 0x55", {0x5555555555555555}},
      {"pattern 0xaa", {0xaaaaaaaaaaaaaaaa}},
      {"moving inversions, ones and zeros", {0}, true},
      {"moving inversions, 8-bit pattern", {0x8080808080808080}, true},
  };
  return all;
}

/// Gives every test the same share of the time. If that is too short for all of the memory, a test
/// continues after the part that the previous one covered.
class Checker {
 public:
  Checker(const Memory& memory, Clock::time_point end, const AfterWrite& after,
          MemoryCheck& outcome)
      : memory_(memory), end_(end), after_(after), outcome_(outcome), is_read_(slices().size()) {}

  void run_all() {
    outcome_.tests = tests().size();
    auto left = static_cast<int>(outcome_.tests);
    for (const auto& test : tests()) {
      const auto now = Clock::now();
      run(test, now, now + (end_ - now) / left--);
    }
  }

 private:
  void run(const Test& test, Clock::time_point start, Clock::time_point end) {
    const auto written = fill(test, start + (end - start) / 2);
    if (written.empty()) return;
    if (after_) after_(test.name, memory_.chunks());
    bool is_through = sweep(test, test.pattern, written, end);
    if (test.is_moving && is_through) {
      // Backwards, because a cell that is disturbed by its neighbour may show it in one direction
      // only.
      is_through = sweep(test, test.pattern.inverse(), {written.rbegin(), written.rend()}, end);
    }
    if (is_through && written.size() == slices().size()) outcome_.completed.push_back(test.name);
  }

  /// Returns the slices that it has written.
  std::vector<std::size_t> fill(const Test& test, Clock::time_point end) {
    std::vector<std::size_t> written;
    while (written.size() < slices().size() && Clock::now() < end) {
      write(test.pattern, slices()[next_]);
      written.push_back(next_);
      next_ = (next_ + 1) % slices().size();
    }
    return written;
  }

  /// Compares and, in moving inversions, leaves the inverse behind. False if it stopped early.
  bool sweep(const Test& test, const Pattern& pattern, const std::vector<std::size_t>& written,
             Clock::time_point end) {
    for (const auto index : written) {
      if (Clock::now() >= end) return false;
      const auto& slice = slices()[index];
      if (const auto failure = compare(pattern, slice)) {
        outcome_.failures.push_back("memory, " + test.name + ": " + *failure);
        return false;
      }
      if (test.is_moving) write(pattern.inverse(), slice);
      if (!is_read_[index]) outcome_.bytes += slice.words.nbytes();
      is_read_[index] = true;
    }
    return true;
  }

  [[nodiscard]] const std::vector<Slice>& slices() const { return memory_.slices(); }

  const Memory& memory_;
  Clock::time_point end_;
  const AfterWrite& after_;
  MemoryCheck& outcome_;
  std::vector<bool> is_read_;
  std::size_t next_ = 0;
};

void check_usage(at::Device device, double fraction, double seconds) {
  if (!device.is_cpu() && !device.is_cuda()) {
    throw UsageError("check_memory supports CPU and CUDA devices, not " + device.str());
  }
  if (!(fraction >= 0 && fraction <= kLargestFraction)) {
    throw UsageError("the fraction of memory is " + std::to_string(fraction) +
                     "; it must be from 0 to 0.95: the rest is left for other programs");
  }
  if (!(seconds > 0)) {
    throw UsageError("the time for the memory is " + std::to_string(seconds) +
                     " s; it must be above 0");
  }
}

}  // namespace

MemoryCheck check_memory(at::Device device, double fraction, double seconds,
                         const AfterWrite& after) {
  check_usage(device, fraction, seconds);
  if (!device.has_index() && !device.is_cpu()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration_cast<Clock::duration>(
                               std::chrono::duration<double>(std::min(seconds, 1e6)));
  MemoryCheck outcome;
  std::uint64_t bytes = 0;
  bool is_allocated = false;
  try {
    bytes = bytes_to_check(device, fraction);
    Memory memory(device);
    memory.allocate(bytes);
    is_allocated = true;
    Checker(memory, end, after, outcome).run_all();
  } catch (const std::exception& error) {
    const auto amount = std::to_string(bytes / kMebibyte) + " MiB of " + device.str();
    outcome.failures.push_back((is_allocated ? "memory, checking " : "memory, allocating ") +
                               amount + " failed: " + first_line(error));
  }
  outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return outcome;
}

}  // namespace nanlocator::netcheck
