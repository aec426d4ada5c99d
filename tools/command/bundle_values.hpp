// The values of a bundle one by one, with names, for `bundle show` and `bundle diff`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/bundle.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::command {

/// A leaf of the tree of arguments and outputs.
struct NamedValue {
  std::string name;                      // "self", "tensors[1]", "weight bias", "output[0]"
  const BundleTensor* tensor = nullptr;  // in the bundle; null if it is not a tensor
  std::string text;  // a value that is not a tensor, as text: "3", "\"ij,jk->ik\"", "none"
};

/// Arguments by the schema's names, outputs and generator states.
[[nodiscard]] std::vector<NamedValue> values_of(const BundleOperatorCall& call);
/// Arguments, keywords, outputs, weights and gradients.
[[nodiscard]] std::vector<NamedValue> values_of(const BundleModuleCall& call);
/// Arguments by name, keywords, the tensors among them after the call, results.
[[nodiscard]] std::vector<NamedValue> values_of(const BundleKernelCall& call);

/// Stats of the view's elements. Empty for integers, for floating-point types that the scan does
/// not know, and for a view that repeats its storage more than 2^30 times.
[[nodiscard]] std::optional<TensorStats> scan(const OpenBundle& bundle, const BundleTensor& tensor);

struct ElementDifference {
  std::int64_t count = 0;
  std::vector<std::int64_t> first;  // index of the first one, per dimension
  std::string left;                 // its values
  std::string right;
};

/// The first difference and the number of differences between two tensors of the same dtype and
/// shape, bit for bit, whatever their strides. Empty if they are equal. Views that repeat their
/// storage are compared up to 2^30 elements.
[[nodiscard]] std::optional<ElementDifference> compare_elements(const OpenBundle& left,
                                                                const BundleTensor& left_tensor,
                                                                const OpenBundle& right,
                                                                const BundleTensor& right_tensor);

}  // namespace nanlocator::command
