#include "record/bundle_json.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdio>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "files/checksum.hpp"
#include "files/strict_json.hpp"
#include "files/utf8.hpp"
#include "map/coordinates_json.hpp"
#include "nanlocator/error.hpp"
#include "record/birth_json.hpp"
#include "record/bundle_keys.hpp"
#include "record/element_types.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"

namespace nanlocator {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// Lists within lists of a value. Each level costs two of JSON's; parse_json allows 32, and the
/// deepest place of a value (module_call, keywords, its entry, value) takes five.
constexpr int kDeepestValue = 12;
constexpr std::size_t kMostDimensions = 64;  // torch: at most 64, in most kernels fewer

constexpr std::pair<const char*, bool BundleTensor::*> kFlagNames[] = {
    {"wrapped_number", &BundleTensor::is_wrapped_number},
    {"conjugate", &BundleTensor::is_conjugate},
    {"negative", &BundleTensor::is_negative},
    {"requires_grad", &BundleTensor::requires_grad},
};

// ---- the range of a view ----

/// What is wrong with `tensor` as a view of a storage of `storage_bytes`; "" where nothing is.
std::string problem_of_view(const BundleTensor& tensor, std::uint64_t storage_bytes) {
  const std::size_t element_size = torch_element_size(tensor.dtype);
  if (element_size == 0) return "unknown dtype " + in_quotes(tensor.dtype);
  if (tensor.sizes.size() != tensor.strides.size()) {
    return std::to_string(tensor.sizes.size()) + " sizes, but " +
           std::to_string(tensor.strides.size()) + " strides";
  }
  if (tensor.sizes.size() > kMostDimensions) return "more than 64 dimensions";
  if (tensor.offset < 0) return "the offset is negative";

  std::int64_t numel = 1;  // zero sizes left aside, as in any part of the shape
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

// ---- writing ----

[[noreturn]] void refuse(const std::string& what) {
  throw UsageError("this cannot be written into a bundle: " + what);
}

/// Writes values and refuses views that the contents do not hold.
class Writer {
 public:
  explicit Writer(const BundleContents& contents) {
    for (const auto& storage : contents.storages) sizes_[storage.name] = storage.bytes.size();
  }

  [[nodiscard]] ordered_json tensor(const BundleTensor& tensor) const {
    const auto storage = sizes_.find(tensor.storage);
    if (storage == sizes_.end())
      refuse("a view of " + in_quotes(tensor.storage) + ", which is not there");
    if (const auto problem = problem_of_view(tensor, storage->second); !problem.empty()) {
      refuse("a view of " + in_quotes(tensor.storage) + ": " + problem);
    }
    ordered_json flags = ordered_json::array();
    for (const auto& [name, member] : kFlagNames) {
      if (tensor.*member) flags.push_back(name);
    }
    ordered_json out;
    out[keys::kKind] = keys::kKindTensor;
    out[keys::kStorage] = tensor.storage;
    out[keys::kDtype] = tensor.dtype;
    out[keys::kSizes] = tensor.sizes;
    out[keys::kStrides] = tensor.strides;
    out[keys::kOffset] = tensor.offset;
    out[keys::kDevice] = tensor.device;
    out[keys::kFlags] = std::move(flags);
    return out;
  }

  [[nodiscard]] ordered_json value(const BundleValue& value, int depth = 0) const {
    if (depth > kDeepestValue) {
      refuse("values nested deeper than " + std::to_string(kDeepestValue) + " levels");
    }
    const auto tagged = [](const char* kind, const char* key, ordered_json content) {
      ordered_json out;
      out[keys::kKind] = kind;
      out[key] = std::move(content);
      return out;
    };
    switch (value.kind) {
      case BundleValueKind::none:
        return nullptr;
      case BundleValueKind::boolean:
        return value.boolean;
      case BundleValueKind::integer:
        return value.integer;
      case BundleValueKind::text:
        return value.text;
      case BundleValueKind::list:
        return items(value, depth);
      case BundleValueKind::undefined_tensor:
        return {{keys::kKind, keys::kKindUndefinedTensor}};
      case BundleValueKind::tensor:
        return tensor(value.tensor);
      case BundleValueKind::real: {
        auto out = tagged(keys::kKindReal, keys::kBits, bits_of(value.real));
        out[keys::kValue] = number_to_json(value.real);
        return out;
      }
      case BundleValueKind::complex: {
        auto out = tagged(keys::kKindComplex, keys::kBits, bits_of(value.real));
        out[keys::kImaginaryBits] = bits_of(value.imaginary);
        out[keys::kValue] = {number_to_json(value.real), number_to_json(value.imaginary)};
        return out;
      }
      case BundleValueKind::device:
        return tagged(keys::kKindDevice, keys::kText, value.text);
      case BundleValueKind::generator:
        return tagged(keys::kKindGenerator, keys::kText, value.text);
      case BundleValueKind::unsupported:
        return tagged(keys::kKindUnsupported, keys::kText, value.text);
      case BundleValueKind::tuple:
        return tagged(keys::kKindTuple, keys::kItems, items(value, depth));
      case BundleValueKind::dictionary:
        return named_items(tagged(keys::kKindDictionary, keys::kNames, value.names), value, depth);
      case BundleValueKind::object:
        return named_items(tagged(keys::kKindObject, keys::kText, value.text), value, depth);
    }
    refuse("a value of unknown kind");
  }

  [[nodiscard]] ordered_json values(const std::vector<BundleValue>& values) const {
    ordered_json out = ordered_json::array();
    for (const auto& item : values) out.push_back(value(item));
    return out;
  }

 private:
  static ordered_json bits_of(double number) {
    return bits_to_json(std::bit_cast<std::uint64_t>(number));
  }

  [[nodiscard]] ordered_json items(const BundleValue& list, int depth) const {
    ordered_json out = ordered_json::array();
    for (const auto& item : list.items) out.push_back(value(item, depth + 1));
    return out;
  }

  [[nodiscard]] ordered_json named_items(ordered_json out, const BundleValue& dictionary,
                                         int depth) const {
    if (dictionary.names.size() != dictionary.items.size()) {
      refuse("a dictionary of " + std::to_string(dictionary.items.size()) + " items with " +
             std::to_string(dictionary.names.size()) + " names");
    }
    out[keys::kNames] = dictionary.names;
    out[keys::kItems] = items(dictionary, depth);
    return out;
  }

  std::map<std::string, std::uint64_t> sizes_;
};

ordered_json call_to_json(const BundleOperatorCall& call, const Writer& writer) {
  ordered_json states = ordered_json::object();
  for (const auto& [device, state] : call.generator_states) states[device] = writer.tensor(state);
  ordered_json out;
  out[keys::kOperator] = call.op;
  out[keys::kSchema] = call.schema;
  out[keys::kArguments] = writer.values(call.arguments);
  out[keys::kOutputs] = writer.values(call.outputs);
  out[keys::kGeneratorStates] = std::move(states);
  return out;
}

ordered_json call_to_json(const BundleModuleCall& call, const Writer& writer) {
  ordered_json keywords = ordered_json::array();
  for (const auto& [name, value] : call.keywords) {
    keywords.push_back({{keys::kName, name}, {keys::kValue, writer.value(value)}});
  }
  ordered_json weights = ordered_json::array();
  for (const auto& [name, tensor] : call.weights) {
    weights.push_back({{keys::kName, name}, {keys::kTensor, writer.tensor(tensor)}});
  }
  ordered_json out;
  out[keys::kName] = call.name;
  out[keys::kClass] = call.class_name;
  out[keys::kIsTraining] = call.is_training;
  out[keys::kArguments] = writer.values(call.arguments);
  out[keys::kKeywords] = std::move(keywords);
  out[keys::kOutputs] = writer.value(call.outputs);
  out[keys::kWeights] = std::move(weights);
  out[keys::kGradOutputs] = writer.values(call.grad_outputs);
  out[keys::kGradInputs] = writer.values(call.grad_inputs);
  out[keys::kPickle] = text_or_null(call.pickle);
  out[keys::kPickleProblem] = text_or_null(call.pickle_problem);
  return out;
}

void check_files(const Bundle& bundle, const BundleContents& contents) {
  std::map<std::string, int> times;
  for (const auto& [name, bytes] : contents.files) {
    if (!is_plain_file_name(name))
      refuse("a file " + in_quotes(name) + ", expected a plain file name");
    if (name == keys::kBundleFile || name == keys::kTensorsFile || ++times[name] > 1) {
      refuse("a second file " + in_quotes(name));
    }
  }
  if (!bundle.module_call || bundle.module_call->pickle.empty()) return;
  if (!times.contains(bundle.module_call->pickle)) {
    refuse("the pickle " + in_quotes(bundle.module_call->pickle) +
           ", which is not among the files");
  }
}

// ---- reading ----

/// Where a value stands in the file, for errors: "x.json" and "operator_call.arguments[0]".
struct Place {
  std::string source;
  std::string path;

  [[nodiscard]] std::string where() const { return source + ": " + path; }
  [[nodiscard]] JsonObject object(const json& value) const { return {value, source, path}; }
  [[nodiscard]] Place element(std::size_t index) const {
    return {source, path + "[" + std::to_string(index) + "]"};
  }
  [[nodiscard]] Place member(const std::string& name) const {
    return {source, path + "." + escaped(name)};
  }
};

Place place_of(const JsonObject& object, const char* key) {
  return {object.source(), object.path_to(key)};
}

/// Every element of the array below `key`, as `read(element, place)` makes it.
template <typename Read>
auto read_array(const JsonObject& object, const char* key, Read read) {
  const json& array = object.member(key);
  if (!array.is_array()) throw_unexpected_json(object.where(key), array, "an array");
  std::vector<decltype(read(array, Place()))> values;
  for (const auto& element : array) {
    values.push_back(read(element, place_of(object, key).element(values.size())));
  }
  return values;
}

/// Every member of the object below `key`, as `read(value, place)` makes it.
template <typename Read>
auto read_map(const JsonObject& object, const char* key, Read read) {
  const json& members = object.member(key);
  if (!members.is_object()) throw_unexpected_json(object.where(key), members, "an object");
  std::map<std::string, decltype(read(members, Place()))> values;
  for (const auto& [name, value] : members.items()) {
    values.emplace(name, read(value, place_of(object, key).member(name)));
  }
  return values;
}

std::map<std::string, std::string> texts_by_name(const JsonObject& object, const char* key) {
  return read_map(object, key, [](const json& value, const Place& place) {
    if (!value.is_string()) throw_unexpected_json(place.where(), value, "a string");
    return value.get<std::string>();
  });
}

std::map<std::string, std::uint32_t> checksums_from_json(const JsonObject& object,
                                                         const char* key) {
  return read_map(object, key, [](const json& value, const Place& place) {
    return checksum_from_json(place.object(value));
  });
}

/// Reads values and tensors and checks that the tensor file has what they view.
class Reader {
 public:
  explicit Reader(const SafetensorsFile& tensors) : tensors_(tensors) {}

  [[nodiscard]] BundleTensor tensor(const json& value, const Place& place) const {
    const JsonObject object = place.object(value);
    BundleTensor tensor;
    tensor.storage = object.text(keys::kStorage);
    tensor.dtype = object.text(keys::kDtype);
    tensor.sizes = sizes_from_json(object, keys::kSizes);
    tensor.strides = sizes_from_json(object, keys::kStrides);
    tensor.offset = object.integer(keys::kOffset, 0);
    tensor.device = object.text(keys::kDevice);
    for (const auto& flag : texts_from_json(object, keys::kFlags)) {
      const auto* const known =
          std::ranges::find_if(kFlagNames, [&](const auto& named) { return named.first == flag; });
      if (known == std::end(kFlagNames)) {
        throw FormatError(object.where(keys::kFlags) + ": unknown flag " + in_quotes(flag));
      }
      tensor.*known->second = true;
    }
    std::uint64_t storage_bytes = 0;
    try {
      storage_bytes = tensors_.at(tensor.storage).bytes.size();
    } catch (const FormatError& error) {
      throw FormatError(object.where(keys::kStorage) + ": " + error.what());
    }
    if (const auto problem = problem_of_view(tensor, storage_bytes); !problem.empty()) {
      throw FormatError(place.where() + ": the view does not fit: " + problem);
    }
    return tensor;
  }

  [[nodiscard]] BundleValue value(const json& value, const Place& place, int depth = 0) const {
    if (depth > kDeepestValue) {
      throw FormatError(place.where() + ": values nested deeper than " +
                        std::to_string(kDeepestValue) + " levels");
    }
    if (value.is_object()) return tagged_value(value, place, depth);
    BundleValue out;
    if (value.is_null()) {
      out.kind = BundleValueKind::none;
    } else if (value.is_boolean()) {
      out.kind = BundleValueKind::boolean;
      out.boolean = value.get<bool>();
    } else if (value.is_string()) {
      out.kind = BundleValueKind::text;
      out.text = value.get<std::string>();
    } else if (value.is_array()) {
      out.kind = BundleValueKind::list;
      std::size_t index = 0;
      for (const auto& item : value) {
        out.items.push_back(this->value(item, place.element(index++), depth + 1));
      }
    } else {
      out.kind = BundleValueKind::integer;
      out.integer = json_integer(value, place.where(), std::numeric_limits<std::int64_t>::min());
    }
    return out;
  }

  [[nodiscard]] std::vector<BundleValue> values(const JsonObject& object, const char* key,
                                                int depth = 0) const {
    return read_array(object, key, [this, depth](const auto& item, const Place& place) {
      return value(item, place, depth);
    });
  }

 private:
  [[nodiscard]] BundleValue tagged_value(const json& value, const Place& place, int depth) const {
    const JsonObject object = place.object(value);
    BundleValue out;
    const std::string kind = object.text(keys::kKind);
    const auto number = [&](const char* key) {
      return std::bit_cast<double>(bits_from_json(object.member(key), object.where(key)));
    };
    if (kind == keys::kKindTensor) {
      out.kind = BundleValueKind::tensor;
      out.tensor = tensor(value, place);
    } else if (kind == keys::kKindUndefinedTensor) {
      out.kind = BundleValueKind::undefined_tensor;
    } else if (kind == keys::kKindReal) {
      out.kind = BundleValueKind::real;
      out.real = number(keys::kBits);
    } else if (kind == keys::kKindComplex) {
      out.kind = BundleValueKind::complex;
      out.real = number(keys::kBits);
      out.imaginary = number(keys::kImaginaryBits);
    } else if (kind == keys::kKindDevice) {
      out.kind = BundleValueKind::device;
      out.text = object.text(keys::kText);
    } else if (kind == keys::kKindGenerator) {
      out.kind = BundleValueKind::generator;
      out.text = object.text(keys::kText);
    } else if (kind == keys::kKindUnsupported) {
      out.kind = BundleValueKind::unsupported;
      out.text = object.text(keys::kText);
    } else if (kind == keys::kKindTuple) {
      out.kind = BundleValueKind::tuple;
      out.items = values(object, keys::kItems, depth + 1);
    } else if (kind == keys::kKindDictionary || kind == keys::kKindObject) {
      const bool is_object = kind == keys::kKindObject;
      out.kind = is_object ? BundleValueKind::object : BundleValueKind::dictionary;
      if (is_object) out.text = object.text(keys::kText);
      out.names = texts_from_json(object, keys::kNames);
      out.items = values(object, keys::kItems, depth + 1);
      if (out.names.size() != out.items.size()) {
        throw FormatError(place.where() + ": " + std::to_string(out.names.size()) + " names for " +
                          std::to_string(out.items.size()) + " items");
      }
    } else {
      throw_unexpected_json(object.where(keys::kKind), object.member(keys::kKind),
                            "a kind of value such as \"tensor\"");
    }
    return out;
  }

  const SafetensorsFile& tensors_;
};

BundleOperatorCall operator_call_from_json(const JsonObject& object, const Reader& reader) {
  BundleOperatorCall call;
  call.op = object.text(keys::kOperator);
  call.schema = object.text(keys::kSchema);
  call.arguments = reader.values(object, keys::kArguments);
  call.outputs = reader.values(object, keys::kOutputs);
  call.generator_states =
      read_map(object, keys::kGeneratorStates,
               [&](const json& value, const Place& place) { return reader.tensor(value, place); });
  return call;
}

BundleModuleCall module_call_from_json(const JsonObject& object, const Reader& reader) {
  BundleModuleCall call;
  call.name = object.text(keys::kName);
  call.class_name = object.text(keys::kClass);
  call.is_training = object.boolean(keys::kIsTraining);
  call.arguments = reader.values(object, keys::kArguments);
  call.keywords = read_array(object, keys::kKeywords, [&](const json& value, const Place& place) {
    const JsonObject keyword = place.object(value);
    return std::pair(keyword.text(keys::kName),
                     reader.value(keyword.member(keys::kValue), place_of(keyword, keys::kValue)));
  });
  call.outputs = reader.value(object.member(keys::kOutputs), place_of(object, keys::kOutputs));
  call.weights = read_array(object, keys::kWeights, [&](const json& value, const Place& place) {
    const JsonObject weight = place.object(value);
    return std::pair(weight.text(keys::kName),
                     reader.tensor(weight.member(keys::kTensor), place_of(weight, keys::kTensor)));
  });
  call.grad_outputs = reader.values(object, keys::kGradOutputs);
  call.grad_inputs = reader.values(object, keys::kGradInputs);
  call.pickle = text_or_empty(object, keys::kPickle);
  call.pickle_problem = text_or_empty(object, keys::kPickleProblem);
  return call;
}

/// The checksums of the storages, once it is clear that they are those of tensors.safetensors.
std::map<std::string, std::uint32_t> storages_from_json(const JsonObject& object,
                                                        const SafetensorsFile& tensors) {
  auto checksums = checksums_from_json(object, keys::kStorages);
  for (const auto& entry : tensors.entries()) {
    const Place place = place_of(object, keys::kStorages).member(entry.name);
    if (!checksums.contains(entry.name)) {
      throw FormatError(place.where() + ": missing, though " + keys::kTensorsFile +
                        " has this tensor");
    }
    const JsonObject storage = place.object(object.member(keys::kStorages).at(entry.name));
    if (storage.text(keys::kDtype) != entry.dtype ||
        sizes_from_json(storage, keys::kShape) != entry.shape) {
      throw FormatError(place.where() + ": dtype or shape are not those of the tensor in " +
                        keys::kTensorsFile);
    }
  }
  if (checksums.size() != tensors.entries().size()) {
    throw FormatError(object.where(keys::kStorages) + ": " + std::to_string(checksums.size()) +
                      " storages, but " + keys::kTensorsFile + " has " +
                      std::to_string(tensors.entries().size()) + " tensors");
  }
  return checksums;
}

std::map<std::string, std::uint32_t> files_from_json(const JsonObject& object) {
  auto files = checksums_from_json(object, keys::kFiles);
  for (const auto& [name, checksum] : files) {
    if (!is_plain_file_name(name)) {
      throw FormatError(object.where(keys::kFiles) + ": " + in_quotes(name) +
                        " is not a plain file name of this folder");
    }
  }
  return files;
}

/// The file's text: each key of the top level on a line of its own, for grep and diff.
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
  const Writer writer(contents);
  ordered_json out;
  out[keys::kVersion] = keys::kBundleVersion;
  out[keys::kRun] = bundle.run_id;
  out[keys::kCoordinates] = coordinates_to_json(bundle.coordinates);
  out[keys::kBirth] = birth_to_json(bundle.birth);
  out[keys::kOperatorCall] =
      bundle.operator_call ? call_to_json(*bundle.operator_call, writer) : ordered_json();
  out[keys::kModuleCall] =
      bundle.module_call ? call_to_json(*bundle.module_call, writer) : ordered_json();
  out[keys::kSettings] = bundle.settings;
  out[keys::kVersions] = bundle.versions;
  out[keys::kCppStack] = bundle.cpp_stack;
  out[keys::kNotes] = bundle.notes;
  out[keys::kStorages] = ordered_json::object();
  for (const auto& storage : contents.storages) {
    out[keys::kStorages][storage.name] = {{keys::kDtype, storage.dtype},
                                          {keys::kShape, storage.shape},
                                          {keys::kCrc32, checksum_text(crc32_of(storage.bytes))}};
  }
  out[keys::kFiles] = ordered_json::object();
  for (const auto& [name, bytes] : contents.files) {
    out[keys::kFiles][name] = {{keys::kCrc32, checksum_text(crc32_of(std::string_view(bytes)))}};
  }
  return one_key_per_line(out);
}

BundleText read_bundle_json(std::string_view text, const std::string& source,
                            const SafetensorsFile& tensors) {
  const json root = parse_json(text, source);
  const JsonObject object(root, source);
  require_version(object, keys::kBundleVersion);
  const Reader reader(tensors);
  BundleText out;
  out.storage_checksums = storages_from_json(object, tensors);
  out.file_checksums = files_from_json(object);
  Bundle& bundle = out.bundle;
  bundle.run_id = object.text(keys::kRun);
  bundle.coordinates = coordinates_from_json(object.object(keys::kCoordinates));
  bundle.birth = birth_from_json(object.object(keys::kBirth));
  if (!object.member(keys::kOperatorCall).is_null()) {
    bundle.operator_call = operator_call_from_json(object.object(keys::kOperatorCall), reader);
  }
  if (!object.member(keys::kModuleCall).is_null()) {
    bundle.module_call = module_call_from_json(object.object(keys::kModuleCall), reader);
    const std::string& pickle = bundle.module_call->pickle;
    if (!pickle.empty() && !out.file_checksums.contains(pickle)) {
      throw FormatError(object.where(keys::kModuleCall) + "." + keys::kPickle + ": " +
                        in_quotes(pickle) + " is not among the bundle's files");
    }
  }
  bundle.settings = texts_by_name(object, keys::kSettings);
  bundle.versions = texts_by_name(object, keys::kVersions);
  bundle.cpp_stack = texts_from_json(object, keys::kCppStack);
  bundle.notes = texts_from_json(object, keys::kNotes);
  return out;
}

bool is_plain_file_name(std::string_view name) noexcept {
  return !name.empty() && name.size() <= 255 && name.front() != '.' && is_utf8(name) &&
         std::ranges::none_of(name, [](char byte) {
           const auto code = static_cast<unsigned char>(byte);
           return byte == '/' || byte == '\\' || code < 0x20 || code == 0x7f;
         });
}

}  // namespace nanlocator
