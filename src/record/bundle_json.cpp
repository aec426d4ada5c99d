#include "record/bundle_json.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "files/checksum.hpp"
#include "files/json_fields.hpp"
#include "files/printable.hpp"
#include "files/utf8.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "record/birth_json.hpp"
#include "record/element_types.hpp"

namespace nanlocator::inline record_room {

using nlohmann::ordered_json;

// ---- the tables ----

namespace {

constexpr int kBundleVersion = 1;

/// The set flags of a tensor, by name.
struct FlagsField {
  static constexpr const char* kKey = "flags";
  static constexpr std::pair<const char*, bool BundleTensor::*> kFlags[] = {
      {"wrapped_number", &BundleTensor::is_wrapped_number},
      {"conjugate", &BundleTensor::is_conjugate},
      {"negative", &BundleTensor::is_negative},
      {"requires_grad", &BundleTensor::requires_grad},
  };

  void write(ordered_json& json, const BundleTensor& tensor) const {
    ordered_json& flags = json[kKey] = ordered_json::array();
    for (const auto& [name, member] : kFlags) {
      if (tensor.*member) flags.push_back(name);
    }
  }
  void read(const JsonObject& object, BundleTensor& tensor) const {
    for (const auto& flag : member_from_json<std::vector<std::string>>(object, kKey)) {
      const auto* const known =
          std::ranges::find_if(kFlags, [&](const auto& named) { return named.first == flag; });
      if (known == std::end(kFlags)) {
        throw FormatError(object.where(kKey) + ": unknown flag " + in_quotes(flag));
      }
      tensor.*known->second = true;
    }
  }
};

/// [{"name", "tensor"}, ...]
struct WeightsField {
  static constexpr const char* kKey = "weights";

  void write(ordered_json& json, const BundleModuleCall& call) const {
    ordered_json& weights = json[kKey] = ordered_json::array();
    for (const auto& [name, tensor] : call.weights) {
      weights.push_back({{"name", name}, {"tensor", value_to_json(tensor)}});
    }
  }
  void read(const JsonObject& object, BundleModuleCall& call) const {
    const JsonMember weights(object, kKey);
    if (!weights.value().is_array()) weights.throw_unexpected("an array");
    for (std::size_t i = 0; i < weights.value().size(); ++i) {
      const JsonObject weight = weights.element(i).object();
      call.weights.emplace_back(weight.text("name"),
                                member_from_json<BundleTensor>(weight, "tensor"));
    }
  }
};

/// A real number by its bits.
struct BitsField {
  const char* key;
  double BundleValue::*member;

  void write(ordered_json& json, const BundleValue& value) const {
    json[key] = hexadecimal_text(std::bit_cast<std::uint64_t>(value.*member), 16);
  }
  void read(const JsonObject& object, BundleValue& value) const {
    value.*member = std::bit_cast<double>(member_from_json<std::uint64_t>(object, key));
  }
};

/// The readable number beside its bits.
struct ShownNumberField {
  void write(ordered_json& json, const BundleValue& value) const {
    ordered_json& shown = json["value"] = number_to_json(value.real);
    if (value.kind == BundleValueKind::complex) shown = {shown, number_to_json(value.imaginary)};
  }
  void read(const JsonObject& /*object*/, BundleValue& /*value*/) const {}
};

/// The members of the tensor, beside the value's kind.
struct TensorField {
  void write(ordered_json& json, const BundleValue& value) const;
  void read(const JsonObject& object, BundleValue& value) const;
};

}  // namespace

[[nodiscard]] constexpr auto names_of(BundleValueKind) {
  return std::to_array<std::string_view>(
      {"none", "undefined_tensor", "tensor", "boolean", "integer", "real", "complex", "text",
       "device", "generator", "list", "tuple", "dictionary", "object", "unsupported"});
}

ordered_json value_to_json(const BundleValue& value);
void read_value(const JsonMember& from, JsonRange range, BundleValue& value);

constexpr auto json_fields(const BundleTensor*) {
  using T = BundleTensor;
  return std::tuple(JsonWriteOnly{"kind", "tensor"}, JsonField("storage", &T::storage),
                    JsonField("dtype", &T::dtype), JsonField("sizes", &T::sizes),
                    JsonField("strides", &T::strides), JsonField("offset", &T::offset),
                    JsonField("device", &T::device), FlagsField());
}

constexpr auto json_fields(const BundleRegistration*) {
  using R = BundleRegistration;
  return std::tuple(JsonOrNull("module", &R::module), JsonOrNull("file", &R::file),
                    JsonOrNull("source", &R::source));
}

constexpr auto json_fields(const BundleOperatorCall*) {
  using C = BundleOperatorCall;
  return std::tuple(JsonField("operator", &C::op), JsonField("schema", &C::schema),
                    JsonField("arguments", &C::arguments), JsonField("outputs", &C::outputs),
                    JsonField("generator_states", &C::generator_states),
                    JsonAdded(JsonField("registered_by", &C::registered_by)));
}

constexpr auto json_fields(const BundleModuleCall*) {
  using C = BundleModuleCall;
  return std::tuple(
      JsonField("name", &C::name), JsonField("class", &C::class_name),
      JsonField("is_training", &C::is_training), JsonField("arguments", &C::arguments),
      JsonField("keywords", &C::keywords), JsonField("outputs", &C::outputs), WeightsField(),
      JsonField("grad_outputs", &C::grad_outputs), JsonField("grad_inputs", &C::grad_inputs),
      JsonOrNull("pickle", &C::pickle), JsonOrNull("pickle_problem", &C::pickle_problem));
}

constexpr auto json_fields(const BundleKernelCall*) {
  using C = BundleKernelCall;
  return std::tuple(JsonField("name", &C::name), JsonField("launcher", &C::launcher),
                    JsonOrNull("module", &C::module), JsonOrNull("entry", &C::entry),
                    JsonOrNull("file", &C::file), JsonOrNull("source", &C::source),
                    JsonOrNull("why_not_replayed", &C::why_not_replayed),
                    JsonField("names", &C::names), JsonField("arguments", &C::arguments),
                    JsonField("keywords", &C::keywords), JsonField("launch", &C::launch),
                    JsonField("arguments_after", &C::arguments_after),
                    JsonField("beside", &C::beside), JsonField("results", &C::results),
                    JsonField("environment", &C::environment));
}

constexpr auto json_fields(const Bundle*) {
  using B = Bundle;
  return std::tuple(JsonField("run", &B::run_id), JsonField("coordinates", &B::coordinates),
                    JsonField("birth", &B::birth), JsonField("operator_call", &B::operator_call),
                    JsonField("module_call", &B::module_call),
                    JsonAdded(JsonField("kernel_call", &B::kernel_call)),
                    JsonField("settings", &B::settings), JsonField("versions", &B::versions),
                    JsonField("cpp_stack", &B::cpp_stack), JsonField("notes", &B::notes));
}

namespace {

/// What bundle.json says about a storage or a further file.
struct StorageLine {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint32_t crc32 = 0;
};
constexpr auto json_fields(const StorageLine*) {
  return std::tuple(JsonField("dtype", &StorageLine::dtype),
                    JsonField("shape", &StorageLine::shape),
                    JsonField("crc32", &StorageLine::crc32));
}

struct FileLine {
  std::uint32_t crc32 = 0;
};
constexpr auto json_fields(const FileLine*) {
  return std::tuple(JsonField("crc32", &FileLine::crc32));
}

void TensorField::write(ordered_json& json, const BundleValue& value) const {
  write_fields(json, value.tensor, json_fields(&value.tensor));
}
void TensorField::read(const JsonObject& object, BundleValue& value) const {
  read_fields(object, value.tensor);
}

/// Calls `use` with the table of the members of a value of `kind`. False if JSON itself can express
/// such a value.
template <typename Use>
bool with_fields_of(BundleValueKind kind, Use use) {
  using Kind = BundleValueKind;
  using V = BundleValue;
  constexpr JsonField kTextField("text", &V::text);
  constexpr JsonField kNamesField("names", &V::names);
  constexpr JsonField kItemsField("items", &V::items);
  constexpr BitsField kBitsField{"bits", &V::real};
  switch (kind) {
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::text:
    case Kind::list:
      return false;
    case Kind::undefined_tensor:
      use(std::tuple());
      return true;
    case Kind::tensor:
      use(std::tuple(TensorField()));
      return true;
    case Kind::real:
      use(std::tuple(kBitsField, ShownNumberField()));
      return true;
    case Kind::complex:
      use(std::tuple(kBitsField, BitsField{"imaginary_bits", &V::imaginary}, ShownNumberField()));
      return true;
    case Kind::device:
    case Kind::generator:
    case Kind::unsupported:
      use(std::tuple(kTextField));
      return true;
    case Kind::tuple:
      use(std::tuple(kItemsField));
      return true;
    case Kind::dictionary:
      use(std::tuple(kNamesField, kItemsField));
      return true;
    case Kind::object:
      use(std::tuple(kTextField, kNamesField, kItemsField));
      return true;
  }
  return false;
}

}  // namespace

ordered_json value_to_json(const BundleValue& value) {
  ordered_json json = {{"kind", name_of(value.kind)}};
  if (with_fields_of(value.kind, [&](const auto& fields) { write_fields(json, value, fields); })) {
    return json;
  }
  switch (value.kind) {
    case BundleValueKind::boolean:
      return value.boolean;
    case BundleValueKind::integer:
      return value.integer;
    case BundleValueKind::text:
      return value.text;
    case BundleValueKind::list:
      return value_to_json(value.items);
    default:
      return nullptr;
  }
}

void read_value(const JsonMember& from, JsonRange /*range*/, BundleValue& value) {
  using Kind = BundleValueKind;
  const nlohmann::json& found = from.value();
  if (found.is_object()) {
    const JsonObject object = from.object();
    const JsonMember name(object, "kind");
    const auto kind = value_named<Kind>(name.text());
    const auto read = [&](const auto& fields) { read_fields(object, value, fields); };
    value.kind = kind.value_or(Kind::none);
    if (!with_fields_of(value.kind, read)) {
      name.throw_unexpected("a kind of value such as \"tensor\"");
    }
  } else if (found.is_null()) {
    value.kind = Kind::none;
  } else if (found.is_boolean()) {
    value.kind = Kind::boolean;
    value.boolean = found.get<bool>();
  } else if (found.is_string()) {
    value.kind = Kind::text;
    value.text = from.text();
  } else if (found.is_array()) {
    value.kind = Kind::list;
    read_value(from, JsonRange(), value.items);
  } else {
    value.kind = Kind::integer;
    value.integer = from.integer(std::numeric_limits<std::int64_t>::min(), JsonRange().most);
  }
}

// ---- consistency with the other files ----

namespace {

/// Nesting of lists in a value. Each level costs two of JSON's; parse_json allows 32, and the
/// deepest position of a value (module_call, keywords, its entry, value) takes five.
constexpr int kDeepestValue = 12;
constexpr std::size_t kMostDimensions = 64;  // torch: at most 64, in most kernels fewer

/// What is wrong with `tensor` as a view of a storage of `storage_bytes`; "" if nothing.
std::string problem_of_view(const BundleTensor& tensor, std::uint64_t storage_bytes) {
  const std::size_t element_size = torch_element_size(tensor.dtype);
  if (element_size == 0) return "unknown dtype " + in_quotes(tensor.dtype);
  if (tensor.sizes.size() != tensor.strides.size()) {
    return std::to_string(tensor.sizes.size()) + " sizes, but " +
           std::to_string(tensor.strides.size()) + " strides";
  }
  if (tensor.sizes.size() > kMostDimensions) return "more than 64 dimensions";
  if (tensor.offset < 0) return "the offset is negative";

  std::int64_t numel = 1;  // without zero sizes, to bound every part of the shape
  std::int64_t last = tensor.offset;
  bool is_empty = false;
  bool overflows = false;
  for (std::size_t axis = 0; axis < tensor.sizes.size(); ++axis) {
    const std::int64_t size = tensor.sizes[axis];
    const std::int64_t stride = tensor.strides[axis];
    if (size < 0 || stride < 0) return "a size or a stride is negative";
    if (size == 0) {
      is_empty = true;
      continue;
    }
    std::int64_t reach = 0;
    overflows = overflows || __builtin_mul_overflow(numel, size, &numel) ||
                __builtin_mul_overflow(size - 1, stride, &reach) ||
                __builtin_add_overflow(last, reach, &last);
  }
  const std::int64_t end = is_empty ? tensor.offset : last;
  std::uint64_t end_bytes = 0;
  overflows = overflows ||
              __builtin_mul_overflow(numel, static_cast<std::int64_t>(element_size), &numel) ||
              __builtin_mul_overflow(static_cast<std::uint64_t>(end) + (is_empty ? 0 : 1),
                                     static_cast<std::uint64_t>(element_size), &end_bytes);
  if (overflows) return "sizes, strides and offset reach beyond 2^63 - 1 bytes";
  if (end_bytes > storage_bytes) {
    return "it reaches byte " + std::to_string(end_bytes) + " of a storage of " +
           std::to_string(storage_bytes) + " bytes";
  }
  return {};
}

/// Checks a bundle's values: each view is within its storage, each name of a dictionary has its
/// item, and nothing nests too deeply. Throws FormatError with the keys that lead to the value.
class ValueCheck {
 public:
  explicit ValueCheck(const std::vector<SafetensorsEntry>& storages) {
    for (const auto& storage : storages) sizes_[storage.name] = storage.bytes.size();
  }

  void check(const Bundle& bundle) const {
    if (const auto& call = bundle.operator_call) {
      values(call->arguments, "operator_call.arguments");
      values(call->outputs, "operator_call.outputs");
      for (const auto& [device, state] : call->generator_states) {
        tensor(state, "operator_call.generator_states." + escaped(device));
      }
    }
    if (const auto& call = bundle.module_call) {
      values(call->arguments, "module_call.arguments");
      for (std::size_t i = 0; i < call->keywords.size(); ++i) {
        value(call->keywords[i].second, element("module_call.keywords", i) + ".value");
      }
      value(call->outputs, "module_call.outputs");
      for (std::size_t i = 0; i < call->weights.size(); ++i) {
        tensor(call->weights[i].second, element("module_call.weights", i) + ".tensor");
      }
      values(call->grad_outputs, "module_call.grad_outputs");
      values(call->grad_inputs, "module_call.grad_inputs");
    }
    if (const auto& call = bundle.kernel_call) {
      values(call->arguments, "kernel_call.arguments");
      for (std::size_t i = 0; i < call->keywords.size(); ++i) {
        value(call->keywords[i].second, element("kernel_call.keywords", i) + ".value");
      }
      values(call->launch, "kernel_call.launch");
      values(call->arguments_after, "kernel_call.arguments_after");
      values(call->results, "kernel_call.results");
    }
  }

 private:
  static std::string element(const std::string& path, std::size_t index) {
    return path + "[" + std::to_string(index) + "]";
  }

  void tensor(const BundleTensor& tensor, const std::string& path) const {
    const auto storage = sizes_.find(tensor.storage);
    if (storage == sizes_.end()) {
      throw FormatError(path + ".storage: there is no tensor " + in_quotes(tensor.storage));
    }
    if (const auto problem = problem_of_view(tensor, storage->second); !problem.empty()) {
      throw FormatError(path + ": the view does not fit: " + problem);
    }
  }

  void values(const std::vector<BundleValue>& values, const std::string& path,
              int depth = 0) const {
    for (std::size_t i = 0; i < values.size(); ++i) value(values[i], element(path, i), depth);
  }

  void value(const BundleValue& value, const std::string& path, int depth = 0) const {
    using Kind = BundleValueKind;
    if (depth > kDeepestValue) {
      throw FormatError(path + ": values nested deeper than " + std::to_string(kDeepestValue) +
                        " levels");
    }
    const bool has_names = value.kind == Kind::dictionary || value.kind == Kind::object;
    if (has_names && value.names.size() != value.items.size()) {
      throw FormatError(path + ": " + std::to_string(value.names.size()) + " names for " +
                        std::to_string(value.items.size()) + " items");
    }
    if (value.kind == Kind::tensor) tensor(value.tensor, path);
    values(value.items, value.kind == Kind::list ? path : path + ".items", depth + 1);
  }

  std::map<std::string, std::uint64_t> sizes_;  // of the storages, in bytes
};

/// "pkg.module": accepted by Python's import, and safe on a terminal as it is.
bool is_module_name(std::string_view name) {
  bool begins = true;  // of a part
  for (const char byte : name) {
    const auto code = static_cast<unsigned char>(byte);
    const bool is_digit = code >= '0' && code <= '9';
    const bool is_letter =
        (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z') || code == '_' || code >= 0x80;
    if (begins ? !is_letter : !is_letter && !is_digit && code != '.') return false;
    begins = code == '.';
  }
  return !begins && printable(name) == name;
}

void check_file(const std::string& file, const std::string& where) {
  if (file.empty() || is_plain_path(file)) return;
  throw FormatError(where + ": " + in_quotes(file) +
                    ", expected an absolute path outside of /dev, /proc and /sys");
}

/// Throws FormatError for a registration with a forbidden name.
void check_registrations(const Bundle& bundle) {
  if (!bundle.operator_call) return;
  const auto& registrations = bundle.operator_call->registered_by;
  for (std::size_t i = 0; i < registrations.size(); ++i) {
    const auto& [module, file, source] = registrations[i];
    const auto where = "operator_call.registered_by[" + std::to_string(i) + "]";
    if (!module.empty() && !is_module_name(module)) {
      throw FormatError(where + ".module: " + in_quotes(module) + " is not a module name");
    }
    check_file(file, where + ".file");
    if (module.empty() && file.empty()) {
      throw FormatError(where + ": neither a module nor a file");
    }
  }
}

/// The same for a kernel: LD_PRELOAD, too, is a variable that changes what is executed.
void check_kernel(const Bundle& bundle) {
  if (!bundle.kernel_call) return;
  check_file(bundle.kernel_call->file, "kernel_call.file");
  for (const auto& [name, value] : bundle.kernel_call->environment) {
    const auto begins = [&name = name](std::string_view prefix) {
      return name.starts_with(prefix);
    };
    if (std::ranges::any_of(kKernelVariables, begins)) continue;
    throw FormatError("kernel_call.environment: " + in_quotes(name) +
                      " is not a variable of a kernel library");
  }
}

/// Calls `require` with the key and name of every file of the bundle that its calls name.
template <typename Require>
void for_each_named_file(const Bundle& bundle, Require require) {
  if (const auto& call = bundle.module_call) require("module_call.pickle", call->pickle);
  if (const auto& call = bundle.kernel_call) require("kernel_call.source", call->source);
  if (const auto& call = bundle.operator_call) {
    for (const auto& each : call->registered_by) {
      require("operator_call.registered_by.source", each.source);
    }
  }
}

[[noreturn]] void refuse(const std::string& what) {
  throw UsageError("this cannot be written into a bundle: " + what);
}

void check_files(const Bundle& bundle, const BundleContents& contents) {
  std::set<std::string_view> names = {kBundleFile, kTensorsFile};
  for (const auto& [name, bytes] : contents.files) {
    if (!is_plain_file_name(name)) {
      refuse("a file " + in_quotes(name) + ", expected a plain file name");
    }
    if (!names.insert(name).second) refuse("a second file " + in_quotes(name));
  }
  for_each_named_file(bundle, [&](const char* key, const std::string& file) {
    if (file.empty() || names.contains(file)) return;
    refuse(std::string(key) + " " + in_quotes(file) + ", which is not among the files");
  });
}

/// The checksums of the storages, after checking that they match tensors.safetensors.
std::map<std::string, std::uint32_t> storages_from_json(const JsonObject& object,
                                                        const SafetensorsFile& tensors) {
  const auto lines = member_from_json<std::map<std::string, StorageLine>>(object, "storages");
  std::map<std::string, std::uint32_t> checksums;
  for (const auto& entry : tensors.entries()) {
    const std::string where = object.where("storages") + "." + escaped(entry.name);
    const auto line = lines.find(entry.name);
    if (line == lines.end()) {
      throw FormatError(where + ": missing, though " + kTensorsFile + " has this tensor");
    }
    if (line->second.dtype != entry.dtype || line->second.shape != entry.shape) {
      throw FormatError(where + ": dtype or shape are not those of the tensor in " + kTensorsFile);
    }
    checksums[entry.name] = line->second.crc32;
  }
  if (lines.size() != tensors.entries().size()) {
    throw FormatError(object.where("storages") + ": " + std::to_string(lines.size()) +
                      " storages, but " + kTensorsFile + " has " +
                      std::to_string(tensors.entries().size()) + " tensors");
  }
  return checksums;
}

std::map<std::string, std::uint32_t> files_from_json(const JsonObject& object) {
  std::map<std::string, std::uint32_t> checksums;
  for (const auto& [name, file] :
       member_from_json<std::map<std::string, FileLine>>(object, "files")) {
    if (!is_plain_file_name(name)) {
      throw FormatError(object.where("files") + ": " + in_quotes(name) +
                        " is not a plain file name of this folder");
    }
    checksums[name] = file.crc32;
  }
  return checksums;
}

/// The file's text: each top-level key on its own line, for grep and diff.
std::string one_key_per_line(const ordered_json& out) {
  std::string text;
  for (const auto& [key, value] : out.items()) {
    text += text.empty() ? "{\n" : ",\n";
    text += one_line(key) + ": " + one_line(value);
  }
  return text + "\n}\n";
}

}  // namespace

std::string bundle_to_json(const Bundle& bundle, const BundleContents& contents) {
  check_files(bundle, contents);
  try {
    ValueCheck(contents.storages).check(bundle);
    check_registrations(bundle);
    check_kernel(bundle);
  } catch (const FormatError& error) {
    refuse(error.what());
  }
  ordered_json out = {{"version", kBundleVersion}};
  write_fields(out, bundle, json_fields(&bundle));
  ordered_json& storages = out["storages"] = ordered_json::object();
  for (const auto& storage : contents.storages) {
    storages[storage.name] =
        fields_to_json(StorageLine{storage.dtype, storage.shape, crc32_of(storage.bytes)});
  }
  ordered_json& files = out["files"] = ordered_json::object();
  for (const auto& [name, bytes] : contents.files) {
    files[name] = fields_to_json(FileLine{crc32_of(std::string_view(bytes))});
  }
  return one_key_per_line(out);
}

BundleText read_bundle_json(std::string_view text, const std::string& source,
                            const SafetensorsFile& tensors) {
  const nlohmann::json root = parse_json(text, source);
  const JsonObject object(root, source);
  require_version(object, kBundleVersion);
  BundleText out;
  out.storage_checksums = storages_from_json(object, tensors);
  out.file_checksums = files_from_json(object);
  read_fields(object, out.bundle);
  try {
    ValueCheck(tensors.entries()).check(out.bundle);
    check_registrations(out.bundle);
    check_kernel(out.bundle);
  } catch (const FormatError& error) {
    throw FormatError(source + ": " + error.what());
  }
  for_each_named_file(out.bundle, [&](const char* key, const std::string& file) {
    if (file.empty() || out.file_checksums.contains(file)) return;
    throw FormatError(source + ": " + key + ": " + in_quotes(file) +
                      " is not among the bundle's files");
  });
  return out;
}

bool is_plain_path(std::string_view path) {
  if (!path.starts_with('/') || !is_utf8(path)) return false;
  if (std::ranges::any_of(path, [](char byte) {
        return static_cast<unsigned char>(byte) < 0x20 || byte == 0x7f;
      })) {
    return false;
  }
  const std::filesystem::path parts(path);
  if (std::ranges::any_of(parts, [](const auto& part) { return part == ".."; })) return false;
  const auto normal = parts.lexically_normal().relative_path();  // "//proc", "/./proc"
  const std::string first = normal.empty() ? "" : normal.begin()->string();
  return first != "dev" && first != "proc" && first != "sys";
}

bool is_plain_file_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && is_utf8(name) &&
         std::ranges::none_of(name, [](char byte) {
           const auto code = static_cast<unsigned char>(byte);
           return byte == '/' || byte == '\\' || code < 0x20 || code == 0x7f;
         });
}

}  // namespace nanlocator::inline record_room
