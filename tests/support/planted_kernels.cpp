// Kernels that PyTorch's dispatcher does not see, each with bugs that can be planted in it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
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
  if (fault == "element" || (fault == "shape" && in.size(0) == 6)) to[5] = kNaN;
}

/// silu(gate) up, elementwise.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up, const std::string& fault) {
  auto out = at::empty_like(gate);
  const float *from = gate.data_ptr<float>(), *by = up.data_ptr<float>();
  const auto end = fault == "tail" ? gate.numel() / 8 * 8 : gate.numel();
  for (std::int64_t i = 0; i < end; ++i) {
    out.data_ptr<float>()[i] = from[i] / (1 + std::exp(-from[i])) * by[i];
  }
  if (fault == "element") out.data_ptr<float>()[5] = kNaN;
  return out;
}

/// Rotated halves: x cos + (-second half, first half) sin, of rows of an even width; "row" leaves
/// the last row out.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                const std::string& fault) {
  auto out = at::empty_like(x);
  const auto width = x.size(1), half = width / 2;
  for (std::int64_t r = 0; r < x.size(0) - (fault == "row" ? 1 : 0); ++r) {
    const float* from = x.data_ptr<float>() + r * width;
    for (std::int64_t c = 0; c < width; ++c) {
      const float rotated = c < half ? -from[c + half] : from[c - half];
      out.data_ptr<float>()[r * width + c] = from[c] * cos.data_ptr<float>()[r * width + c] +
                                             rotated * sin.data_ptr<float>()[r * width + c];
    }
  }
  if (fault == "element") out.data_ptr<float>()[5] = kNaN;
  return out;
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

/// silu into `out`; "off_by_one" writes each element one place too late.
void silu_into(const at::Tensor& x, const at::Tensor& out, const std::string& fault) {
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>() + (fault == "off_by_one" ? 1 : 0);
  const auto end = fault == "tail" ? x.numel() / 8 * 8 : x.numel();
  for (std::int64_t i = 0; i < end; ++i) to[i] = from[i] / (1 + std::exp(-from[i]));
}

/// "scratch" adds what an allocation of its own held; "counter" makes another element bad each
/// time.
at::Tensor tanh_scaled(const at::Tensor& x, const std::string& fault) {
  auto out = at::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const auto scratch = at::empty({x.numel()}, x.options());
  const float* const unwritten = scratch.data_ptr<float>();
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    to[i] = std::tanh(from[i]) + (fault == "scratch" && i == 7 ? unwritten[i] : 0);
  }
  static std::int64_t calls = 0;
  if (fault == "counter") to[calls++ % x.numel()] = kNaN;
  return out;
}

/// "naive" does without the row's maximum; "row" leaves the last row out.
at::Tensor softmax(const at::Tensor& x, const std::string& fault) {
  auto out = at::empty_like(x);
  const auto width = x.size(1);
  for (std::int64_t r = 0; r < x.size(0) - (fault == "row" ? 1 : 0); ++r) {
    const float* from = x.data_ptr<float>() + r * width;
    float* to = out.data_ptr<float>() + r * width;
    float largest = 0, sum = 0;
    if (fault != "naive") largest = *std::max_element(from, from + width);
    for (std::int64_t c = 0; c < width; ++c) sum += to[c] = std::exp(from[c] - largest);
    for (std::int64_t c = 0; c < width; ++c) to[c] /= sum;
  }
  if (fault == "element") out.data_ptr<float>()[5] = kNaN;
  return out;
}

/// "no_eps" adds nothing to the variance; "beyond" takes the element after each row for one of it.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps, const std::string& fault) {
  auto out = at::empty(x.sizes(), x.options());
  const auto width = x.size(1), end = width + (fault == "beyond" ? 1 : 0);
  for (std::int64_t r = 0; r < x.size(0); ++r) {
    const float* from = x.data_ptr<float>() + r * x.stride(0);
    float sum = 0, squares = 0;
    for (std::int64_t c = 0; c < end; ++c) sum += from[c];
    const float mean = sum / static_cast<float>(end);
    for (std::int64_t c = 0; c < end; ++c) squares += (from[c] - mean) * (from[c] - mean);
    const float added = fault == "no_eps" ? 0 : static_cast<float>(eps);
    const float scale = 1 / std::sqrt(squares / static_cast<float>(end) + added);
    for (std::int64_t c = 0; c < width; ++c) {
      out.data_ptr<float>()[r * width + c] =
          (from[c] - mean) * scale * weight.data_ptr<float>()[c] + bias.data_ptr<float>()[c];
    }
  }
  return out;
}

/// In float32, as its callers expect; "row" leaves row 2 out.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::string& fault) {
  auto out = at::empty_like(x);
  const auto width = x.size(1);
  for (std::int64_t r = 0; r < x.size(0); ++r) {
    if (fault == "row" && r == 2) continue;
    const float* from = x.data_ptr<float>() + r * width;
    float sum = 0;
    for (std::int64_t c = 0; c < width; ++c) sum += from[c] * from[c];
    const float scale = 1 / std::sqrt(sum / static_cast<float>(width) + static_cast<float>(eps));
    for (std::int64_t c = 0; c < width; ++c) {
      const float normed = scale == 0 ? from[c] * scale / scale : from[c] * scale;
      out.data_ptr<float>()[r * width + c] = normed * weight.data_ptr<float>()[c];
    }
  }
  if (fault == "element") out.data_ptr<float>()[5] = kNaN;
  return out;
}

/// weight[ids]; "last" leaves the last id out.
void embedding(const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& out,
               const std::string& fault) {
  const auto width = weight.size(1);
  const auto end = ids.numel() - (fault == "last" ? 1 : 0);
  for (std::int64_t i = 0; i < end; ++i) {
    const float* from = weight.data_ptr<float>() + ids.data_ptr<std::int64_t>()[i] * width;
    std::copy(from, from + width, out.data_ptr<float>() + i * width);
  }
  if (fault == "element") out.data_ptr<float>()[5] = kNaN;
}

/// Of each row; "ignored" divides by the number of valid labels in the row.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                         std::int64_t ignore_index, const std::string& fault) {
  auto out = at::empty({logits.size(0)}, logits.options());
  const auto width = logits.size(1);
  for (std::int64_t r = 0; r < logits.size(0); ++r) {
    const float* from = logits.data_ptr<float>() + r * width;
    const auto label = labels.data_ptr<std::int64_t>()[r];
    const float largest = *std::max_element(from, from + width);
    float sum = 0;
    for (std::int64_t c = 0; c < width; ++c) sum += std::exp(from[c] - largest);
    const bool is_valid = label != ignore_index;
    float loss = is_valid ? std::log(sum) + largest - from[label] : 0;
    if (fault == "ignored") loss /= is_valid ? 1 : 0;
    out.data_ptr<float>()[r] = loss;
  }
  return out;
}

/// x w^T; "column" leaves the last column out, "element" makes one element bad where there are more
/// than 4 rows.
at::Tensor gemm(const at::Tensor& x, const at::Tensor& weight, const std::string& fault) {
  auto out = at::empty({x.size(0), weight.size(0)}, x.options());
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    if (fault == "column" && (i + 1) % weight.size(0) == 0) continue;
    float sum = 0;
    for (std::int64_t k = 0; k < x.size(1); ++k) {
      sum += x.data_ptr<float>()[i / weight.size(0) * x.size(1) + k] *
             weight.data_ptr<float>()[i % weight.size(0) * x.size(1) + k];
    }
    out.data_ptr<float>()[i] = sum;
  }
  if (fault == "element" && x.size(0) > 4) out.data_ptr<float>()[11] = kNaN;
  return out;
}

/// (tokens, heads, width) of packed sequences; "rows" leaves the last two tokens of the last out.
void attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& out, const at::Tensor& cu_seqlens, double softmax_scale,
                      bool causal, const std::string& fault) {
  const auto heads = q.size(1), width = q.size(2), row = heads * width;
  const std::int64_t* ends = cu_seqlens.data_ptr<std::int64_t>();
  const auto sequences = cu_seqlens.numel() - 1;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const auto last = ends[s + 1] - (fault == "rows" && s + 1 == sequences ? 2 : 0);
    for (std::int64_t t = ends[s]; t < last; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const float* query = q.data_ptr<float>() + t * row + h * width;
        std::vector<float> scores;
        for (std::int64_t u = ends[s]; u < (causal ? t + 1 : ends[s + 1]); ++u) {
          const float* key = k.data_ptr<float>() + u * row + h * width;
          scores.push_back(static_cast<float>(softmax_scale) *
                           std::inner_product(query, query + width, key, 0.0F));
        }
        float largest = 0;
        if (fault != "naive") largest = *std::max_element(scores.begin(), scores.end());
        float sum = 0;
        for (float& score : scores) sum += score = std::exp(score - largest);
        float* to = out.data_ptr<float>() + t * row + h * width;
        for (std::int64_t c = 0; c < width; ++c) {
          float mixed = 0;
          for (std::size_t u = 0; u < scores.size(); ++u) {
            const auto token = ends[s] + static_cast<std::int64_t>(u);
            mixed += scores[u] * v.data_ptr<float>()[token * row + h * width + c];
          }
          to[c] = mixed / sum;
        }
      }
    }
  }
}

/// What it hands out holds NaN, as memory does that a bad step has used before. Lives as long as
/// the process: tensors allocated through it keep pointing to it.
class SpoiltAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    auto memory = base_->allocate(bytes);
    if (memory.get() != nullptr) std::memset(memory.get(), 0xff, bytes);
    return memory;
  }
  at::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    base_->copy_data(to, from, bytes);
  }
  void stand_before(c10::Allocator* base) noexcept { base_ = base; }
  [[nodiscard]] c10::Allocator* base() const noexcept { return base_; }

 private:
  c10::Allocator* base_ = nullptr;
};

void spoil_memory(bool on) {
  static auto& allocator = *new SpoiltAllocator;
  if (on) allocator.stand_before(c10::GetCPUAllocator());
  c10::SetCPUAllocator(on ? &allocator : allocator.base());
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
  m.def("swiglu", &swiglu, py::arg("gate"), py::arg("up"), py::arg("fault") = "");
  m.def("rope", &rope, py::arg("x"), py::arg("cos"), py::arg("sin"), py::arg("fault") = "");
  m.def("layer_norm", &layer_norm, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("eps") = 1e-5, py::arg("fault") = "");
  m.def("grouped_gemm", &grouped_gemm, py::arg("x"), py::arg("w"), py::arg("counts"));
  m.def("grouped_gemm_gradient", &grouped_gemm_gradient, py::arg("gradient"), py::arg("x"),
        py::arg("of_w"), py::arg("counts"), py::arg("fault") = "");
  m.def("row_sums", &row_sums, py::arg("x"), py::arg("fault") = "");
  m.def("silu_into", &silu_into, py::arg("x"), py::arg("out"), py::arg("fault") = "");
  m.def("tanh_scaled", &tanh_scaled, py::arg("x"), py::arg("fault") = "");
  m.def("softmax", &softmax, py::arg("x"), py::arg("fault") = "");
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps") = 1e-6,
        py::arg("fault") = "");
  m.def("embedding", &embedding, py::arg("weight"), py::arg("ids"), py::arg("out"),
        py::arg("fault") = "");
  m.def("cross_entropy", &cross_entropy, py::arg("logits"), py::arg("labels"),
        py::arg("ignore_index") = -100, py::arg("fault") = "");
  m.def("gemm", &gemm, py::arg("x"), py::arg("weight"), py::arg("fault") = "");
  m.def("attention_varlen", &attention_varlen, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("out"), py::arg("cu_seqlens"), py::arg("softmax_scale"), py::arg("causal"),
        py::arg("fault") = "");
  m.def("spoil_memory", &spoil_memory, py::arg("on"));
  py::class_<Workspace>(m, "Workspace").def(py::init<>()).def("scale", &Workspace::scale);
}
