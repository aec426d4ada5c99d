#include "report/tensor_windows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "nanlocator/scan/cpu_scan.hpp"
#include "nanlocator/scan/element_bits.hpp"
#include "record/element_types.hpp"

namespace nanlocator::inline report_room {
namespace {

constexpr std::int64_t kMostRows = 32;
constexpr std::int64_t kMostColumns = 48;
constexpr std::size_t kMostOutputs = 2;
constexpr std::size_t kMostInputs = 4;

/// A view of a few bytes may claim 2^62 elements; larger expanded views are not scanned.
constexpr std::int64_t kMostElements = std::int64_t{1} << 32;

using Index = std::vector<std::int64_t>;

struct NamedTensor {
  std::string name;
  const BundleTensor* tensor = nullptr;
};

void add_tensors(const std::string& name, const BundleValue& value, std::vector<NamedTensor>& out) {
  if (value.kind == BundleValueKind::tensor) out.push_back({name, &value.tensor});
  for (std::size_t i = 0; i < value.items.size(); ++i) {
    add_tensors(name + "[" + std::to_string(i) + "]", value.items[i], out);
  }
}

std::vector<NamedTensor> tensors_of(const std::string& name,
                                    const std::vector<BundleValue>& values) {
  std::vector<NamedTensor> tensors;
  for (std::size_t i = 0; i < values.size(); ++i) {
    add_tensors(name + "[" + std::to_string(i) + "]", values[i], tensors);
  }
  return tensors;
}

template <typename Number>
double integer_at(const std::byte* element) {
  Number number{};
  std::memcpy(&number, element, sizeof number);
  return static_cast<double>(number);
}

template <DType dtype>
double float_at(const std::byte* element) {
  ElementWord<dtype> bits{};
  std::memcpy(&bits, element, sizeof bits);
  return value_as_double<dtype>(bits);
}

using ReadElement = double (*)(const std::byte*);

/// Null for complex and quantised types.
ReadElement reader_of(std::string_view dtype) {
  constexpr std::pair<std::string_view, ReadElement> kReaders[] = {
      {"float64", float_at<DType::float64>},
      {"float32", float_at<DType::float32>},
      {"float16", float_at<DType::float16>},
      {"bfloat16", float_at<DType::bfloat16>},
      {"float8_e4m3fn", float_at<DType::float8_e4m3fn>},
      {"float8_e5m2", float_at<DType::float8_e5m2>},
      {"int64", integer_at<std::int64_t>},
      {"int32", integer_at<std::int32_t>},
      {"int16", integer_at<std::int16_t>},
      {"int8", integer_at<std::int8_t>},
      {"uint8", integer_at<std::uint8_t>},
      {"bool", integer_at<std::uint8_t>}};
  for (const auto& [name, read] : kReaders) {
    if (name == dtype) return read;
  }
  return nullptr;
}

std::optional<DType> scanned_dtype(std::string_view dtype) {
  for (int index = 0; index < kDTypeCount; ++index) {
    if (name_of(static_cast<DType>(index)) == dtype) return static_cast<DType>(index);
  }
  return std::nullopt;
}

/// A tensor of an opened bundle, whose views have been checked against their storage.
class StoredTensor {
 public:
  StoredTensor(const OpenBundle& bundle, const BundleTensor& tensor)
      : tensor_(tensor),
        read_(reader_of(tensor.dtype)),
        element_size_(torch_element_size(tensor.dtype)) {
    for (const std::int64_t size : tensor.sizes) {
      if (size == 0) numel_ = 0;
    }
    for (const std::int64_t size : tensor.sizes) {
      numel_ = size > 0 && numel_ > kMostElements / size ? kMostElements + 1 : numel_ * size;
    }
    if (can_be_shown()) {
      bytes_ = bundle.tensors()
                   .at(tensor.storage)
                   .bytes.subspan(static_cast<std::size_t>(tensor.offset) * element_size_);
    }
  }

  [[nodiscard]] bool can_be_shown() const {
    return read_ != nullptr && numel_ > 0 && numel_ <= kMostElements;
  }

  [[nodiscard]] const Index& sizes() const { return tensor_.sizes; }

  [[nodiscard]] double at(const Index& index) const {
    std::int64_t position = 0;
    for (std::size_t axis = 0; axis < index.size(); ++axis) {
      position += index[axis] * tensor_.strides[axis];
    }
    const double value = read_(bytes_.data() + position * static_cast<std::int64_t>(element_size_));
    return tensor_.is_negative ? -value : value;
  }

  /// Empty if every element is finite.
  [[nodiscard]] std::optional<Index> first_bad() const {
    const auto dtype = scanned_dtype(tensor_.dtype);
    if (!dtype || !can_be_shown()) return std::nullopt;
    std::span<const std::byte> bytes = bytes_;
    std::vector<std::byte> aligned;  // a range of mixed types may begin at any byte of the file
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % size_of(*dtype) != 0) {
      aligned.assign(bytes.begin(), bytes.end());
      bytes = aligned;
    }
    const TensorView view{.data = bytes.data(),
                          .numel = numel_,
                          .dtype = *dtype,
                          .sizes = tensor_.sizes,
                          .strides = tensor_.strides};
    if (!has_nonfinite(view)) return std::nullopt;
    return unravel_index(scan_cpu(view).first_bad, tensor_.sizes);
  }

 private:
  const BundleTensor& tensor_;
  ReadElement read_;
  std::size_t element_size_;
  std::int64_t numel_ = 1;
  std::span<const std::byte> bytes_;  // beginning at the first element
};

struct Cut {
  std::int64_t begin = 0;
  std::int64_t length = 1;
};

/// At most `most` of `size` elements, centred on `centre` where the edges allow it.
Cut cut_around(std::int64_t centre, std::int64_t size, std::int64_t most) {
  const std::int64_t length = std::min(size, most);
  return {std::clamp<std::int64_t>(centre - length / 2, 0, size - length), length};
}

TensorWindow window_at(const NamedTensor& named, const StoredTensor& stored, const Index& centre) {
  TensorWindow window;
  window.name = named.name;
  window.dtype = named.tensor->dtype;
  window.shape = stored.sizes();
  window.first_bad = centre;
  const std::size_t dimensions = centre.size();
  const Cut columns = dimensions < 1 ? Cut{}
                                     : cut_around(centre[dimensions - 1],
                                                  stored.sizes()[dimensions - 1], kMostColumns);
  const Cut rows = dimensions < 2 ? Cut{}
                                  : cut_around(centre[dimensions - 2],
                                               stored.sizes()[dimensions - 2], kMostRows);
  window.first_row = rows.begin;
  window.first_column = columns.begin;
  window.rows = rows.length;
  window.columns = columns.length;
  Index index = centre;
  if (dimensions > 2) window.fixed.assign(centre.begin(), centre.end() - 2);
  for (std::int64_t row = 0; row < rows.length; ++row) {
    for (std::int64_t column = 0; column < columns.length; ++column) {
      if (dimensions >= 2) index[dimensions - 2] = rows.begin + row;
      if (dimensions >= 1) index[dimensions - 1] = columns.begin + column;
      window.values.push_back(stored.at(index));
    }
  }
  return window;
}

}  // namespace

std::vector<TensorWindow> windows_of(const OpenBundle& open) {
  const Bundle& bundle = open.bundle();
  std::vector<NamedTensor> outputs;
  std::vector<NamedTensor> inputs;
  if (bundle.operator_call) {
    outputs = tensors_of("output", bundle.operator_call->outputs);
    inputs = tensors_of("input", bundle.operator_call->arguments);
  } else if (bundle.kernel_call) {
    outputs = tensors_of("output", bundle.kernel_call->results);
    std::ranges::move(tensors_of("argument after", bundle.kernel_call->arguments_after),
                      std::back_inserter(outputs));
    inputs = tensors_of("argument", bundle.kernel_call->arguments);
  } else if (bundle.module_call) {
    add_tensors("output", bundle.module_call->outputs, outputs);
    std::ranges::move(tensors_of("grad_input", bundle.module_call->grad_inputs),
                      std::back_inserter(outputs));
    inputs = tensors_of("input", bundle.module_call->arguments);
    std::ranges::move(tensors_of("grad_output", bundle.module_call->grad_outputs),
                      std::back_inserter(inputs));
  }

  std::vector<TensorWindow> windows;
  std::optional<Index> bad_output;
  Index output_sizes;
  for (const NamedTensor& named : outputs) {
    if (windows.size() == kMostOutputs) break;
    const StoredTensor stored(open, *named.tensor);
    const auto first_bad = stored.first_bad();
    if (!first_bad) continue;
    windows.push_back(window_at(named, stored, *first_bad));
    if (!bad_output) output_sizes = stored.sizes();
    if (!bad_output) bad_output = first_bad;
  }
  const std::size_t most = windows.size() + kMostInputs;
  for (const NamedTensor& named : inputs) {
    if (windows.size() == most) break;
    const StoredTensor stored(open, *named.tensor);
    if (!stored.can_be_shown()) continue;
    if (const auto first_bad = stored.first_bad()) {
      windows.push_back(window_at(named, stored, *first_bad));
    } else if (bad_output && stored.sizes() == output_sizes) {
      windows.push_back(window_at(named, stored, *bad_output));
    }
  }
  return windows;
}

}  // namespace nanlocator::inline report_room
