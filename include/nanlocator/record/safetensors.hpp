// The safetensors format, as read and written by the Python package `safetensors`.
//
// Layout (github.com/huggingface/safetensors): u64 little-endian header size, JSON header {"name":
// {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, data. Reading
// checks every offset before it touches a byte of data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/atomic_file.hpp"

namespace nanlocator::inline record_room {

/// One tensor, row-major without gaps. `dtype` is safetensors' spelling: "F32", "BF16", "F8_E4M3",
/// "C64", "I64", "BOOL", "U8", ...
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // if read from a file: valid as long as it is open
};

/// "float32" -> "F32" and back; "" if the format lacks the dtype (quantised types).
[[nodiscard]] std::string_view safetensors_dtype(std::string_view torch_dtype) noexcept;
[[nodiscard]] std::string_view torch_dtype(std::string_view safetensors_dtype) noexcept;
/// Bytes of one element of a safetensors dtype; 0 if unknown.
[[nodiscard]] std::size_t safetensors_element_size(std::string_view safetensors_dtype) noexcept;

/// How the bytes of a file get into memory.
enum class FileAccess : std::uint8_t {
  map,   // page by page; if the file is truncated meanwhile, the next access ends the process
         // (SIGBUS), so never in a training process
  copy,  // all at once, at most kLargestCopy bytes
};
inline constexpr std::uint64_t kLargestCopy = std::uint64_t{1} << 30;

class SafetensorsFile {
 public:
  /// Throws IoError if the file cannot be opened or is too large to copy. Throws FormatError (file,
  /// field) for a header that is truncated, huge (over 100 MB), not strict JSON, or has an unknown
  /// dtype, a shape whose product overflows or does not match its offsets, or offsets that are out
  /// of range, overlap or leave gaps.
  explicit SafetensorsFile(const std::filesystem::path& path, FileAccess access = FileAccess::map);
  /// The same for bytes in memory, which must outlive it. Messages call them `source`.
  SafetensorsFile(std::span<const std::byte> bytes, const std::string& source);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  SafetensorsFile(const SafetensorsFile&) = delete;  // owns the bytes
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const noexcept;  // in offset order
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept;
  /// Throws FormatError (naming the file and `name`) if there is no such tensor.
  [[nodiscard]] const SafetensorsEntry& at(std::string_view name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a new file (fails if it exists) and fsyncs it. Copies nothing, so the data may be larger
/// than memory. Orders the data so that each tensor is aligned to its elements. Throws UsageError
/// for entries whose bytes do not match dtype and shape or that share a name, IoError with the
/// system's reason; then no file is left.
void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> entries,
                       const std::map<std::string, std::string>& metadata = {},
                       std::filesystem::perms permissions = kPrivateFile);

}  // namespace nanlocator::inline record_room
