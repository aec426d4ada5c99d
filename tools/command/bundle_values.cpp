#include "bundle_values.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/scan/element_bits.hpp"
#include "record/element_types.hpp"

namespace nanlocator::command {
namespace {

/// A view of a few bytes may claim 2^62 elements (an expanded tensor); reading each would take
/// forever.
constexpr std::int64_t kMostRepeatedElements = std::int64_t{1} << 30;

// ---- names ----

/// "self", "other": the argument names of "aten::div.Tensor(Tensor self, Tensor other=None) ->
/// ...".
std::vector<std::string> argument_names(std::string_view schema) {
  const auto open = schema.find('(');
  if (open == std::string_view::npos) return {};
  std::vector<std::string> names;
  std::string current;
  bool is_default = false;
  const auto take = [&] {
    while (!current.empty() && current.back() == ' ') current.pop_back();
    const auto name = current.substr(current.find_last_of(' ') + 1);
    if (!name.empty() && name != "*") names.push_back(name);
    current.clear();
    is_default = false;
  };
  int depth = 0;
  char quote = '\0';
  for (const char byte : schema.substr(open + 1)) {
    if (quote != '\0') {
      if (byte == quote) quote = '\0';
    } else if (byte == '"' || byte == '\'') {
      quote = byte;
    } else if (byte == '(' || byte == '[') {
      ++depth;
    } else if (depth == 0 && byte == ')') {
      take();
      return names;
    } else if (byte == ')' || byte == ']') {
      --depth;
    } else if (depth == 0 && byte == ',') {
      take();
      continue;
    } else if (depth == 0 && byte == '=') {
      is_default = true;
    }
    if (!is_default) current += byte;
  }
  return {};  // no closing parenthesis
}

std::string indexed(const std::string& name, std::size_t index) {
  return name + "[" + std::to_string(index) + "]";
}

// ---- values as text ----

std::string shortest_text(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

std::string text_of(const BundleValue& value) {
  switch (value.kind) {
    case BundleValueKind::none:
      return "none";
    case BundleValueKind::undefined_tensor:
      return "undefined tensor";
    case BundleValueKind::boolean:
      return value.boolean ? "true" : "false";
    case BundleValueKind::integer:
      return std::to_string(value.integer);
    case BundleValueKind::real:
      return shortest_text(value.real);
    case BundleValueKind::complex:
      return "complex(" + shortest_text(value.real) + ", " + shortest_text(value.imaginary) + ")";
    case BundleValueKind::text:
      return '"' + value.text + '"';
    case BundleValueKind::device:
      return "device " + value.text;
    case BundleValueKind::generator:
      return "generator " + value.text;
    case BundleValueKind::unsupported:
      return "not kept: " + value.text;
    case BundleValueKind::list:
    case BundleValueKind::tuple: {
      std::string items;
      for (const auto& item : value.items) items += (items.empty() ? "" : ", ") + text_of(item);
      return value.kind == BundleValueKind::list ? "[" + items + "]" : "(" + items + ")";
    }
    case BundleValueKind::dictionary:
    case BundleValueKind::object:
    case BundleValueKind::tensor:
      break;
  }
  return {};
}

bool has_structure(const BundleValue& value) {
  return value.kind == BundleValueKind::tensor || value.kind == BundleValueKind::dictionary ||
         value.kind == BundleValueKind::object || std::ranges::any_of(value.items, has_structure);
}

/// Appends the leaves of `value`; a list of plain numbers is one leaf.
void add_leaves(const std::string& name, const BundleValue& value, std::vector<NamedValue>& out) {
  if (value.kind == BundleValueKind::tensor) {
    out.push_back({name, &value.tensor, {}});
  } else if (!has_structure(value)) {
    out.push_back({name, nullptr, text_of(value)});
  } else {
    for (std::size_t index = 0; index < value.items.size(); ++index) {
      const bool is_named = index < value.names.size();
      add_leaves(is_named ? name + "." + value.names[index] : indexed(name, index),
                 value.items[index], out);
    }
    if (value.items.empty()) out.push_back({name, nullptr, "empty " + value.text});
  }
}

void add_list(const std::string& name, const std::vector<BundleValue>& values,
              std::vector<NamedValue>& out) {
  for (std::size_t index = 0; index < values.size(); ++index) {
    add_leaves(indexed(name, index), values[index], out);
  }
}

// ---- elements ----

struct ElementLayout {
  DType dtype;
  bool is_complex;
};

std::optional<ElementLayout> layout_of(std::string_view torch_dtype) {
  if (torch_dtype == "complex32") return ElementLayout{DType::float16, true};
  if (torch_dtype == "complex64") return ElementLayout{DType::float32, true};
  if (torch_dtype == "complex128") return ElementLayout{DType::float64, true};
  for (int index = 0; index < kDTypeCount; ++index) {
    const auto dtype = static_cast<DType>(index);
    if (name_of(dtype) == torch_dtype) return ElementLayout{dtype, false};
  }
  return std::nullopt;
}

std::int64_t numel_of(const BundleTensor& tensor) {
  std::int64_t numel = 1;
  for (const std::int64_t size : tensor.sizes) numel *= size;  // checked when it was opened
  return numel;
}

/// The storage from the view's first element on.
std::span<const std::byte> bytes_from_first_element(const OpenBundle& bundle,
                                                    const BundleTensor& tensor) {
  const auto bytes = bundle.tensors().at(tensor.storage).bytes;
  return bytes.subspan(static_cast<std::size_t>(tensor.offset) * torch_element_size(tensor.dtype));
}

bool repeats_too_often(const OpenBundle& bundle, const BundleTensor& tensor) {
  const std::size_t stored = bundle.tensors().at(tensor.storage).bytes.size();
  const std::int64_t numel = numel_of(tensor);
  return numel > kMostRepeatedElements &&
         static_cast<std::uint64_t>(numel) > stored / torch_element_size(tensor.dtype);
}

/// Walks the elements of a view in logical (row-major) order.
class ElementWalk {
 public:
  explicit ElementWalk(const BundleTensor& tensor)
      : tensor_(tensor), index_(tensor.sizes.size(), 0) {}
  /// Of the current element, in elements from the view's first.
  [[nodiscard]] std::int64_t position() const { return position_; }
  [[nodiscard]] const std::vector<std::int64_t>& index() const { return index_; }
  void advance() {
    for (std::size_t axis = index_.size(); axis-- > 0;) {
      position_ += tensor_.strides[axis];
      if (++index_[axis] < tensor_.sizes[axis]) return;
      position_ -= tensor_.strides[axis] * tensor_.sizes[axis];
      index_[axis] = 0;
    }
  }

 private:
  const BundleTensor& tensor_;
  std::vector<std::int64_t> index_;
  std::int64_t position_ = 0;
};

template <typename Integer>
std::string integer_text(const std::byte* element) {
  Integer value{};
  std::memcpy(&value, element, sizeof value);
  return std::to_string(value);
}

template <DType dtype>
std::string float_text(const std::byte* element) {
  ElementWord<dtype> bits{};
  std::memcpy(&bits, element, sizeof bits);
  return shortest_text(value_as_double<dtype>(bits));
}

std::string float_text(DType dtype, const std::byte* element) {
  switch (dtype) {
    case DType::float64:
      return float_text<DType::float64>(element);
    case DType::float32:
      return float_text<DType::float32>(element);
    case DType::float16:
      return float_text<DType::float16>(element);
    case DType::bfloat16:
      return float_text<DType::bfloat16>(element);
    case DType::float8_e4m3fn:
      return float_text<DType::float8_e4m3fn>(element);
    case DType::float8_e5m2:
      return float_text<DType::float8_e5m2>(element);
  }
  return {};
}

std::string bits_text(const std::byte* element, std::size_t size) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "0x";
  for (std::size_t index = size; index-- > 0;) {  // the most significant byte first
    const auto byte = std::to_integer<unsigned>(element[index]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string element_text(const std::string& dtype, const std::byte* element) {
  if (const auto layout = layout_of(dtype)) {
    if (!layout->is_complex) return float_text(layout->dtype, element);
    return "(" + float_text(layout->dtype, element) + ", " +
           float_text(layout->dtype, element + size_of(layout->dtype)) + ")";
  }
  if (dtype == "int64") return integer_text<std::int64_t>(element);
  if (dtype == "int32") return integer_text<std::int32_t>(element);
  if (dtype == "int16") return integer_text<std::int16_t>(element);
  if (dtype == "int8") return integer_text<std::int8_t>(element);
  if (dtype == "uint64") return integer_text<std::uint64_t>(element);
  if (dtype == "uint32") return integer_text<std::uint32_t>(element);
  if (dtype == "uint16") return integer_text<std::uint16_t>(element);
  if (dtype == "uint8") return integer_text<std::uint8_t>(element);
  if (dtype == "bool") return std::to_integer<int>(*element) != 0 ? "true" : "false";
  return bits_text(element, torch_element_size(dtype));
}

}  // namespace

std::vector<NamedValue> values_of(const BundleOperatorCall& call) {
  const auto names = argument_names(call.schema);
  std::vector<NamedValue> values;
  for (std::size_t index = 0; index < call.arguments.size(); ++index) {
    const bool is_named = names.size() == call.arguments.size();
    add_leaves(is_named ? names[index] : indexed("argument", index), call.arguments[index], values);
  }
  add_list("output", call.outputs, values);
  for (const auto& [device, state] : call.generator_states) {
    values.push_back({"generator " + device, &state, {}});
  }
  return values;
}

std::vector<NamedValue> values_of(const BundleModuleCall& call) {
  std::vector<NamedValue> values;
  add_list("input", call.arguments, values);
  for (const auto& [name, value] : call.keywords) add_leaves("keyword " + name, value, values);
  for (const auto& [name, tensor] : call.weights) values.push_back({"weight " + name, &tensor, {}});
  add_leaves("output", call.outputs, values);
  add_list("grad_output", call.grad_outputs, values);
  add_list("grad_input", call.grad_inputs, values);
  return values;
}

std::vector<NamedValue> values_of(const BundleKernelCall& call) {
  std::vector<NamedValue> values;
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const auto name = i < call.names.size() ? call.names[i] : "argument[" + std::to_string(i) + "]";
    add_leaves(name, call.arguments[i], values);
  }
  for (const auto& [name, value] : call.keywords) add_leaves(name, value, values);
  std::vector<std::string> tensors;
  for (const auto& value : values) {
    if (value.tensor != nullptr) tensors.push_back(value.name);
  }
  for (std::size_t i = 0; i < call.arguments_after.size(); ++i) {
    const auto name = i < tensors.size() ? tensors[i] : "argument[" + std::to_string(i) + "]";
    add_leaves(name + " after", call.arguments_after[i], values);
  }
  add_list("output", call.results, values);
  return values;
}

std::optional<TensorStats> scan(const OpenBundle& bundle, const BundleTensor& tensor) {
  const auto layout = layout_of(tensor.dtype);
  if (!layout || repeats_too_often(bundle, tensor)) return std::nullopt;
  auto bytes = bytes_from_first_element(bundle, tensor);
  TensorView view{.numel = numel_of(tensor),
                  .dtype = layout->dtype,
                  .sizes = tensor.sizes,
                  .strides = tensor.strides};
  if (layout->is_complex) {
    view.numel *= 2;
    for (std::size_t axis = 0; axis < view.strides.size(); ++axis) {
      // The stride of an axis with one element may be anything up to 2^63 - 1.
      view.strides[axis] = view.sizes[axis] > 1 ? 2 * view.strides[axis] : 0;
    }
    view.sizes.push_back(2);
    view.strides.push_back(1);
  }
  std::vector<std::byte> aligned;  // a range of mixed types may begin anywhere in the file
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % size_of(layout->dtype) != 0) {
    aligned.assign(bytes.begin(), bytes.end());
    bytes = aligned;
  }
  view.data = bytes.data();
  const auto threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  TensorStats stats = scan_cpu(view, threads);
  if (layout->is_complex && stats.first_bad >= 0) stats.first_bad /= 2;
  return stats;
}

std::optional<ElementDifference> compare_elements(const OpenBundle& left,
                                                  const BundleTensor& left_tensor,
                                                  const OpenBundle& right,
                                                  const BundleTensor& right_tensor) {
  const std::byte* const left_bytes = bytes_from_first_element(left, left_tensor).data();
  const std::byte* const right_bytes = bytes_from_first_element(right, right_tensor).data();
  const std::size_t size = torch_element_size(left_tensor.dtype);
  std::int64_t numel = numel_of(left_tensor);
  if (repeats_too_often(left, left_tensor) && repeats_too_often(right, right_tensor)) {
    numel = kMostRepeatedElements;
  }
  const auto at = [size](const std::byte* first, const ElementWalk& walk) {
    return first + walk.position() * static_cast<std::int64_t>(size);
  };
  ElementWalk left_walk(left_tensor);
  ElementWalk right_walk(right_tensor);
  ElementDifference difference;
  for (; numel > 0; --numel, left_walk.advance(), right_walk.advance()) {
    const std::byte* const left_element = at(left_bytes, left_walk);
    const std::byte* const right_element = at(right_bytes, right_walk);
    if (std::memcmp(left_element, right_element, size) == 0) continue;
    if (difference.count++ > 0) continue;
    difference.first = left_walk.index();
    difference.left = element_text(left_tensor.dtype, left_element);
    difference.right = element_text(right_tensor.dtype, right_element);
    if (difference.left == difference.right) {  // NaNs with different payloads
      difference.left.append(" ").append(bits_text(left_element, size));
      difference.right.append(" ").append(bits_text(right_element, size));
    }
  }
  if (difference.count == 0) return std::nullopt;
  return difference;
}

}  // namespace nanlocator::command
