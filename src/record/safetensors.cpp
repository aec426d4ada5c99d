#include "nanlocator/record/safetensors.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "files/json_fields.hpp"
#include "files/posix_file.hpp"
#include "files/utf8.hpp"
#include "nanlocator/error.hpp"
#include "record/element_types.hpp"

namespace nanlocator::inline record_room {
namespace {

constexpr std::uint64_t kLargestHeader = 100'000'000;  // the Rust implementation's limit
constexpr std::size_t kSizeBytes = 8;                  // of the leading header size
constexpr const char* kMetadata = "__metadata__";
constexpr const char* kDtype = "dtype";
constexpr const char* kShape = "shape";
constexpr const char* kOffsets = "data_offsets";

struct ElementType {
  std::string_view torch;
  std::string_view safetensors;  // "": the format has no name for it
  std::size_t size;
};

// torch/_utils_internal and c10/core/ScalarType.h; safetensors/src/tensor.rs. Without F4 and F6,
// whose elements are smaller than a byte: no operator of torch 2.11 computes in them.
constexpr std::array<ElementType, 25> kElementTypes = {{
    {"float64", "F64", 8},
    {"float32", "F32", 4},
    {"float16", "F16", 2},
    {"bfloat16", "BF16", 2},
    {"float8_e4m3fn", "F8_E4M3", 1},
    {"float8_e5m2", "F8_E5M2", 1},
    {"float8_e4m3fnuz", "F8_E4M3FNUZ", 1},
    {"float8_e5m2fnuz", "F8_E5M2FNUZ", 1},
    {"float8_e8m0fnu", "F8_E8M0", 1},
    {"int64", "I64", 8},
    {"int32", "I32", 4},
    {"int16", "I16", 2},
    {"int8", "I8", 1},
    {"uint64", "U64", 8},
    {"uint32", "U32", 4},
    {"uint16", "U16", 2},
    {"uint8", "U8", 1},
    {"bool", "BOOL", 1},
    {"complex64", "C64", 8},
    {"complex128", "", 16},
    {"complex32", "", 4},
    {"float4_e2m1fn_x2", "", 1},
    {"qint32", "", 4},
    {"qint8", "", 1},
    {"quint8", "", 1},
}};

/// Bytes of a tensor; empty if the product of the nonzero sizes exceeds 2^63 - 1, so that no later
/// arithmetic on a part of the shape can overflow.
std::optional<std::uint64_t> bytes_of_shape(const std::vector<std::int64_t>& shape,
                                            std::size_t element_size) {
  std::int64_t product = static_cast<std::int64_t>(element_size);
  bool is_empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return is_empty ? 0 : static_cast<std::uint64_t>(product);
}

std::uint64_t little_endian_u64(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t index = kSizeBytes; index-- > 0;) {
    value = value << 8 | std::to_integer<std::uint64_t>(bytes[index]);
  }
  return value;
}

struct Tensors {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::size_t, std::less<>> index_of;  // name to index in `entries`
  std::map<std::string, std::string> metadata;
};

std::map<std::string, std::string> read_metadata(const nlohmann::json& value,
                                                 const std::string& where) {
  if (!value.is_object()) throw_unexpected_json(where, value, "an object of strings");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) throw_unexpected_json(where + "." + in_quotes(key), text, "a string");
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

/// One tensor with its bytes within `data`.
SafetensorsEntry read_entry(const std::string& name, const JsonObject& object,
                            std::span<const std::byte> data) {
  SafetensorsEntry entry{.name = name, .dtype = object.text(kDtype), .shape = {}, .bytes = {}};
  const std::size_t element_size = safetensors_element_size(entry.dtype);
  if (element_size == 0) {
    throw FormatError(object.where(kDtype) + ": unknown dtype " + in_quotes(entry.dtype) +
                      ", expected one such as \"F32\" or \"BF16\" of one byte or more");
  }
  entry.shape = member_from_json<std::vector<std::int64_t>>(object, kShape);
  const auto expected = bytes_of_shape(entry.shape, element_size);
  if (!expected) {
    throw FormatError(object.where(kShape) + ": more than 2^63 - 1 bytes");
  }
  const auto offsets = member_from_json<std::vector<std::int64_t>>(object, kOffsets);
  const std::string where = object.where(kOffsets);
  if (offsets.size() != 2) throw FormatError(where + ": expected two integers, begin and end");
  const auto begin = static_cast<std::uint64_t>(offsets[0]);
  const auto end = static_cast<std::uint64_t>(offsets[1]);
  const std::string range = std::to_string(begin) + " to " + std::to_string(end);
  if (begin > end) throw FormatError(where + ": " + range + " ends before it begins");
  if (end > data.size()) {
    throw FormatError(where + ": " + range + " lies beyond the file's " +
                      std::to_string(data.size()) +
                      " bytes of data; the file is cut off or damaged");
  }
  if (end - begin != *expected) {
    throw FormatError(where + ": " + range + " are " + std::to_string(end - begin) +
                      " bytes, but dtype and shape make " + std::to_string(*expected));
  }
  entry.bytes = data.subspan(begin, end - begin);
  return entry;
}

/// The format has neither gaps nor overlaps: every byte of data belongs to one tensor.
void check_that_entries_tile(const std::vector<SafetensorsEntry>& entries,
                             std::span<const std::byte> data, const std::string& source) {
  std::size_t position = 0;
  for (const auto& entry : entries) {
    const auto begin = static_cast<std::size_t>(entry.bytes.data() - data.data());
    if (begin == position) {
      position += entry.bytes.size();
      continue;
    }
    throw FormatError(source + ": " + in_quotes(entry.name) + "." + kOffsets + ": begins at byte " +
                      std::to_string(begin) +
                      (begin < position
                           ? ", where the tensor before it overlaps it (that one ends "
                             "at byte "
                           : ", which leaves a gap (the tensor before it ends at byte ") +
                      std::to_string(position) + ")");
  }
  if (position != data.size()) {
    throw FormatError(source + ": " + std::to_string(data.size() - position) +
                      " bytes of data at the end belong to no tensor");
  }
}

Tensors read_tensors(std::span<const std::byte> bytes, const std::string& source) {
  if (bytes.size() < kSizeBytes) {
    throw FormatError(source + ": cut off: " + std::to_string(bytes.size()) +
                      " bytes, a safetensors file begins with 8 bytes for the size of its header");
  }
  const std::uint64_t header_size = little_endian_u64(bytes);
  if (header_size > kLargestHeader) {
    throw FormatError(source + ": header size: " + std::to_string(header_size) +
                      " bytes, at most " + std::to_string(kLargestHeader) +
                      " are accepted; is this a safetensors file?");
  }
  if (header_size > bytes.size() - kSizeBytes) {
    throw FormatError(source + ": header: cut off: it has " + std::to_string(header_size) +
                      " bytes, but only " + std::to_string(bytes.size() - kSizeBytes) + " follow");
  }
  const auto header = bytes.subspan(kSizeBytes, header_size);
  const auto data = bytes.subspan(kSizeBytes + header_size);
  const std::string header_source = source + ": header";
  const nlohmann::json json =
      parse_json({reinterpret_cast<const char*>(header.data()), header.size()}, header_source);
  if (!json.is_object()) throw_unexpected_json(header_source, json, "an object");

  Tensors tensors;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      tensors.metadata = read_metadata(value, source + ": " + kMetadata);
    } else {
      tensors.entries.push_back(read_entry(name, JsonObject(value, source, in_quotes(name)), data));
    }
  }
  std::ranges::stable_sort(tensors.entries, [](const auto& left, const auto& right) {
    return std::pair(left.bytes.data(), left.bytes.size()) <
           std::pair(right.bytes.data(), right.bytes.size());
  });
  check_that_entries_tile(tensors.entries, data, source);
  for (const auto& entry : tensors.entries) {
    tensors.index_of.emplace(entry.name, tensors.index_of.size());
  }
  return tensors;
}

class FileBytes {
 public:
  FileBytes() = default;
  FileBytes(const std::filesystem::path& path, FileAccess access) {
    if (access == FileAccess::copy) {
      copy_ = read_file(path, kLargestCopy);
    } else {
      map(path);
    }
  }
  FileBytes(const FileBytes&) = delete;  // one owner unmaps
  FileBytes& operator=(const FileBytes&) = delete;
  ~FileBytes() {
    if (!mapped_.empty()) ::munmap(const_cast<std::byte*>(mapped_.data()), mapped_.size());
  }
  [[nodiscard]] std::span<const std::byte> bytes() const {
    return mapped_.empty() ? std::as_bytes(std::span(copy_)) : mapped_;
  }

 private:
  void map(const std::filesystem::path& path) {
    const Descriptor file(open_regular_file(path));
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) throw_io_error("cannot read", path, errno);
    if (status.st_size == 0) return;  // mmap refuses it; the reader reports why
    const auto size = static_cast<std::size_t>(status.st_size);
    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED) throw_io_error("cannot map", path, errno);
    mapped_ = {static_cast<const std::byte*>(address), size};
  }

  std::span<const std::byte> mapped_;
  std::string copy_;
};

void check_entries(std::span<const SafetensorsEntry> entries, const std::filesystem::path& path) {
  std::set<std::string_view> names;
  for (const auto& entry : entries) {
    const std::string what = path.string() + ": tensor " + in_quotes(entry.name);
    if (!is_utf8(entry.name)) throw UsageError(what + ": the name is not UTF-8");
    if (entry.name == kMetadata) throw UsageError(what + ": the name is reserved by the format");
    if (!names.insert(entry.name).second) throw UsageError(what + ": the name occurs twice");
    const std::size_t element_size = safetensors_element_size(entry.dtype);
    if (element_size == 0) {
      throw UsageError(what + ": the format has no dtype " + in_quotes(entry.dtype) +
                       "; write its bytes as \"U8\"");
    }
    const auto expected = bytes_of_shape(entry.shape, element_size);
    if (!expected || *expected != entry.bytes.size()) {
      throw UsageError(what + ": " + std::to_string(entry.bytes.size()) +
                       " bytes given, but dtype and shape make " +
                       (expected ? std::to_string(*expected) : "more than 2^63 - 1"));
    }
  }
}

/// The order of the data: sizes with the most factors of two first. Then each tensor begins at a
/// multiple of its element size, as readers of a mapped file expect, and the format allows no
/// padding.
std::vector<const SafetensorsEntry*> aligned_order(std::span<const SafetensorsEntry> entries) {
  std::vector<const SafetensorsEntry*> order;
  for (const auto& entry : entries) order.push_back(&entry);
  const auto alignment = [](const SafetensorsEntry* entry) {
    constexpr int kWidest = 4;  // 16 bytes: complex128
    return std::min(std::countr_zero(entry->bytes.size()), kWidest);
  };
  std::ranges::stable_sort(order, std::ranges::greater{}, alignment);
  return order;
}

/// Size and header, padded with spaces so that the data begins at a multiple of 16 bytes.
std::string header_of(const std::vector<const SafetensorsEntry*>& entries,
                      const std::map<std::string, std::string>& metadata,
                      const std::filesystem::path& path) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  std::uint64_t position = 0;
  for (const auto* entry : entries) {
    const std::uint64_t end = position + entry->bytes.size();
    json[entry->name] = {
        {kDtype, entry->dtype}, {kShape, entry->shape}, {kOffsets, {position, end}}};
    position = end;
  }
  std::string text = one_line(json);
  constexpr std::size_t kAlignment = 16;
  text.append((kAlignment - (kSizeBytes + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > kLargestHeader) {
    throw UsageError(path.string() + ": a header of " + std::to_string(text.size()) +
                     " bytes; readers accept at most " + std::to_string(kLargestHeader));
  }
  std::string header;
  for (std::size_t index = 0; index < kSizeBytes; ++index) {
    header += static_cast<char>(text.size() >> (8 * index) & 0xff);
  }
  return header + text;
}

}  // namespace

std::string_view safetensors_dtype(std::string_view torch_dtype) noexcept {
  const auto* const type = std::ranges::find(kElementTypes, torch_dtype, &ElementType::torch);
  return type == kElementTypes.end() ? std::string_view() : type->safetensors;
}

std::string_view torch_dtype(std::string_view safetensors_dtype) noexcept {
  if (safetensors_dtype.empty()) return {};
  const auto* const type =
      std::ranges::find(kElementTypes, safetensors_dtype, &ElementType::safetensors);
  return type == kElementTypes.end() ? std::string_view() : type->torch;
}

std::size_t safetensors_element_size(std::string_view safetensors_dtype) noexcept {
  return torch_element_size(torch_dtype(safetensors_dtype));
}

std::size_t torch_element_size(std::string_view torch_dtype) noexcept {
  const auto* const type = std::ranges::find(kElementTypes, torch_dtype, &ElementType::torch);
  return type == kElementTypes.end() ? 0 : type->size;
}

struct SafetensorsFile::Impl {
  Impl(const std::filesystem::path& path, FileAccess access)
      : file(path, access), source(path.string()), tensors(read_tensors(file.bytes(), source)) {}
  Impl(std::span<const std::byte> bytes, std::string name)
      : source(std::move(name)), tensors(read_tensors(bytes, source)) {}

  FileBytes file;
  std::string source;
  Tensors tensors;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, FileAccess access)
    : impl_(std::make_unique<Impl>(path, access)) {}
SafetensorsFile::SafetensorsFile(std::span<const std::byte> bytes, const std::string& source)
    : impl_(std::make_unique<Impl>(bytes, source)) {}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const noexcept {
  return impl_->tensors.entries;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return impl_->tensors.metadata;
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  const auto found = impl_->tensors.index_of.find(name);
  if (found == impl_->tensors.index_of.end()) {
    throw FormatError(impl_->source + ": it has no tensor " + in_quotes(name));
  }
  return entries()[found->second];
}

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> entries,
                       const std::map<std::string, std::string>& metadata,
                       std::filesystem::perms permissions) {
  check_entries(entries, path);
  const auto order = aligned_order(entries);
  const std::string header = header_of(order, metadata, path);
  Descriptor file(open_new_file(path, permissions));
  if (!file.is_open()) throw_io_error("cannot create", path, errno);
  try {
    write_all(file.get(), header, path);
    for (const auto* entry : order) {
      write_all(file.get(),
                {reinterpret_cast<const char*>(entry->bytes.data()), entry->bytes.size()}, path);
    }
    flush_and_close(file, path);
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

}  // namespace nanlocator::inline record_room
