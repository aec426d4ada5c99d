// Kernels that PyTorch's dispatcher does not see, each with bugs that can be planted in it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// y = x * sigmoid(x), elementwise, into memory that it allocates.
at::Tensor silu(const at::Tensor& x, const std::string& fault) {
  const auto in = x.contiguous();
  auto out = at::empty_like(in);
  const float* from = in.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const auto size = in.numel();
  const auto end = fault == "tail" ? size / 8 * 8 : size;  // the last vector's worth and no more
  for (std::int64_t i = 0; i < end; ++i) to[i] = from[i] / (1 + std::exp(-from[i]));
  if (fault == "element") to[5] = kNaN;
  if (fault == "shape" && in.size(0) == 7) to[0] = std::numeric_limits<float>::infinity();
  return out;
}

/// In place, as the callers of fused kernels hand over their outputs.
void silu_gradient(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& of_x,
                   const std::string& fault) {
  const auto grad = gradient.contiguous(), in = x.contiguous();
  const float *g = grad.data_ptr<float>(), *from = in.data_ptr<float>();
  float* to = of_x.data_ptr<float>();
  const auto size = in.numel();
  const auto end = fault == "tail" ? size / 8 * 8 : size;
  for (std::int64_t i = 0; i < end; ++i) {
    const float s = 1 / (1 + std::exp(-from[i]));
    to[i] = g[i] * s * (1 + from[i] * (1 - s));
  }
  if (fault == "element") to[5] = kNaN;
}

/// out[rows of expert e] = x[rows of e] w[e]^T; `counts` rows each, in order.
at::Tensor grouped_gemm(const at::Tensor& x, const at::Tensor& w,
                        const std::vector<int64_t>& counts) {
  auto out = at::empty({x.size(0), w.size(1)}, x.options());
  std::int64_t begin = 0;
  const at::NoGradGuard no_grad;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    out.narrow(0, begin, counts[e]).copy_(x.narrow(0, begin, counts[e]).matmul(w[e].t()));
    begin += counts[e];
  }
  return out;
}

/// Of each expert's weight, into `of_w`; by hand, off the dispatcher. "expert": one without tokens
/// keeps what was there.
void grouped_gemm_gradient(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& of_w,
                           const std::vector<int64_t>& counts, const std::string& fault) {
  const auto g = gradient.contiguous(), in = x.contiguous();
  const auto rows = of_w.size(1), columns = of_w.size(2);
  float* to = of_w.data_ptr<float>();
  std::int64_t begin = 0;
  for (std::size_t e = 0; e < counts.size(); ++e, to += rows * columns) {
    if (counts[e] == 0 && fault == "expert") continue;
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      float sum = 0;
      for (std::int64_t t = begin; t < begin + counts[e]; ++t) {
        sum += g.data_ptr<float>()[t * rows + i / columns] *
               in.data_ptr<float>()[t * columns + i % columns];
      }
      to[i] = sum;
    }
    begin += counts[e];
  }
}

/// Sums of rows; "beyond" reads one element after the last row, which belongs to somebody else.
at::Tensor row_sums(const at::Tensor& x, const std::string& fault) {
  auto out = at::zeros({x.size(0)}, x.options());
  const float* from = x.data_ptr<float>();
  const auto width = x.size(1) + (fault == "beyond" ? 1 : 0);
  for (std::int64_t r = 0; r < x.size(0); ++r) {
    for (std::int64_t c = 0; c < width; ++c) out.data_ptr<float>()[r] += from[r * x.stride(0) + c];
  }
  return out;
}

class Workspace {
 public:
  void scale(const at::Tensor& x, double by) const {
    float* to = x.data_ptr<float>();
    for (std::int64_t i = 0; i < x.numel(); ++i) to[i] *= static_cast<float>(by);
  }
};

}  // namespace

PYBIND11_MODULE(planted_kernels, m) {
  namespace py = pybind11;
  m.def("silu", &silu, py::arg("x"), py::arg("fault") = "");
  m.def("silu_gradient", &silu_gradient, py::arg("gradient"), py::arg("x"), py::arg("of_x"),
        py::arg("fault") = "");
  m.def("grouped_gemm", &grouped_gemm, py::arg("x"), py::arg("w"), py::arg("counts"));
  m.def("grouped_gemm_gradient", &grouped_gemm_gradient, py::arg("gradient"), py::arg("x"),
        py::arg("of_w"), py::arg("counts"), py::arg("fault") = "");
  m.def("row_sums", &row_sums, py::arg("x"), py::arg("fault") = "");
  py::class_<Workspace>(m, "Workspace").def(py::init<>()).def("scale", &Workspace::scale);
}
