#include "replay/work.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string_view>
#include <vector>

#include "nanlocator/replay/capture.hpp"
#include "replay/values.hpp"

namespace nanlocator::inline replay_room {
namespace {

template <std::size_t n>
bool has_any(std::string_view name, const std::array<std::string_view, n>& parts) {
  return std::ranges::any_of(parts, [&](auto part) { return name.find(part) != name.npos; });
}

double elements(const at::Tensor& tensor) {
  return static_cast<double>(tensor.numel());
}

double last_size(const at::Tensor& tensor, std::int64_t from_last) {
  return tensor.dim() >= from_last ? static_cast<double>(tensor.size(-from_last)) : 1;
}

/// The number of matrices in it.
double batch_of(const at::Tensor& tensor) {
  return elements(tensor) / std::max(1.0, last_size(tensor, 1) * last_size(tensor, 2));
}

/// Two for each element of the product of every row of one with every column of the other: with
/// sizes m*k, k*n and m*n, m*k*n is the root of their product. For b products side by side, each of
/// the three contains b, and the root is too large by that of b.
double flops_of_product(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> matrices;
  for (const auto& tensor : tensors) {
    if (tensor.dim() >= 2) matrices.push_back(tensor);
  }
  if (matrices.size() < 3) return 0;
  std::ranges::sort(matrices, std::greater<>(), elements);
  double product = 1, batch = batch_of(matrices[0]);
  for (std::size_t i = 0; i < 3; ++i) {
    product *= elements(matrices[i]);
    batch = std::min(batch, batch_of(matrices[i]));
  }
  return 2 * std::sqrt(product / std::max(1.0, batch));
}

/// Elements of a convolution's weight that contribute to one output element.
double filter_size(const OperatorCall& call) {
  const auto& arguments = call_facts(call.name).handle.schema().arguments();
  for (std::size_t i = 0; i < arguments.size() && i < call.arguments.size(); ++i) {
    if (arguments[i].name() != "weight" || !call.arguments[i].isTensor()) continue;
    const auto& weight = call.arguments[i].toTensor();
    if (weight.dim() > 0 && weight.size(0) > 0) {
      return elements(weight) / static_cast<double>(weight.size(0));
    }
  }
  return 1;
}

}  // namespace

Work work_of(const OperatorCall& call) {
  std::vector<at::Tensor> tensors;
  for (const auto* values : {&call.arguments, &call.outputs}) {
    for (const auto& tensor : tensors_of(*values)) {
      if (has_plain_memory(tensor) || tensor.is_meta()) tensors.push_back(tensor);
    }
  }
  Work work;
  for (const auto& tensor : tensors) {
    work.bytes += elements(tensor) * static_cast<double>(tensor.element_size());
  }
  const std::string_view name = call.name.name;
  constexpr auto kProducts = std::to_array<std::string_view>(
      {"mm", "matmul", "linear", "addmv", "::mv", "einsum", "bilinear", "addr", "cdist"});
  constexpr auto kAlgebra = std::to_array<std::string_view>(
      {"linalg", "cholesky", "svd", "inverse", "triangular_solve", "lu_", "eig", "qr"});
  const double passes = name.find("backward") != name.npos ? 2 : 1;
  if (has_any(name, kAlgebra)) {
    for (const auto& tensor : tensors) {
      const double shorter = std::min(last_size(tensor, 1), last_size(tensor, 2));
      work.flops = std::max(work.flops, 10 * passes * elements(tensor) * shorter);
    }
  } else if (name.find("conv") != name.npos) {
    double most = 0;
    for (const auto& tensor : tensors) most = std::max(most, elements(tensor));
    work.flops = 2 * passes * most * filter_size(call);
  } else if (name.find("attention") != name.npos) {
    for (const auto& tensor : tensors) {
      if (tensor.dim() < 3) continue;
      work.flops = std::max(work.flops, 4 * passes * elements(tensor) * last_size(tensor, 2));
    }
  } else if (has_any(name, kProducts)) {
    work.flops = passes * flops_of_product(tensors);
  }
  return work;
}

}  // namespace nanlocator::inline replay_room
