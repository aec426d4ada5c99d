// A custom C++ operator that returns NaN for negative numbers, in a Python extension module, which
// is imported or loaded by torch.ops.load_library.
#include <ATen/Functions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cmath>

namespace {

at::Tensor root(const at::Tensor& x) {
  const auto in = x.contiguous();
  auto out = at::empty_like(in);
  for (std::int64_t i = 0; i < in.numel(); ++i) {
    out.data_ptr<float>()[i] = std::sqrt(in.data_ptr<float>()[i]);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(planted_operators, m) {
  m.def("root(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(planted_operators, CPU, m) {
  m.impl("root", root);
}

PYBIND11_MODULE(planted_operators, m) {
  m.doc() = "Registers torch.ops.planted_operators.root.";
}
