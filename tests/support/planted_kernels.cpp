// Kernels that PyTorch's dispatcher does not see, each with bugs that tests can plant.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
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

/// y = x * sigmoid(x), elementwise, into memory that the kernel allocates.
at::Tensor silu(const at::Tensor& x, const std::string& fault) {
  const auto in = x.contiguous();
  auto out = at::empty_like(in);
  const float* from = in.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const auto size = in.numel();
  const auto end = fault == "tail" ? size / 8 * 8 : size;  // whole vectors only
  for (std::int64_t i = 0; i < end; ++i) to[i] = from[i] / (1 + std::exp(-from[i]));
  if (fault == "element") to[5] = kNaN;
  if (fault == "shape" && in.size(0) == 7) to[0] = std::numeric_limits<float>::infinity();
  return out;
}

/// In place: callers of fused kernels pass the output.
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

/// Rotated halves: x cos + (-second half, first half) sin, for rows of an even width; "row" leaves
/// out the last row.
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

/// The gradient of each expert's weight, written into `of_w` off the dispatcher. "expert": an
/// expert without tokens keeps its old values.
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

/// Sums of rows; "beyond" reads one element after the last row, outside the argument.
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

/// "scratch" adds the old contents of its own allocation; "counter" makes a different element bad
/// each time.
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

/// "naive" does not subtract the row's maximum; "row" leaves out the last row.
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

/// "no_eps" adds nothing to the variance; "beyond" counts the element after each row as part of it.
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

/// In float32, as its callers expect; "row" leaves out row 2.
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

/// weight[ids]; "last" leaves out the last id.
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

/// The loss of each row; "ignored" divides by the number of valid labels in the row.
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

/// x w^T; "column" leaves out the last column, "element" makes one element bad if there are more
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

/// (tokens, heads, width) of packed sequences; "rows" leaves out the last two tokens of the last
/// one.
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

/// Copies PyTorch's result by hand: "row" leaves out the last row.
at::Tensor written(const at::Tensor& healthy, const std::string& fault) {
  const auto from = healthy.contiguous();
  auto out = at::empty_like(from);
  const auto rows = from.size(0) - (fault == "row" ? 1 : 0);
  std::copy_n(from.data_ptr<float>(), rows * from.numel() / from.size(0), out.data_ptr<float>());
  return out;
}

std::vector<at::Tensor> swiglu_backward(const at::Tensor& dc, const at::Tensor& a,
                                        const at::Tensor& b, const std::string& fault) {
  return {written(at::silu_backward(dc * b, a), fault), written(dc * at::silu(a), "")};
}

std::vector<at::Tensor> geglu_backward(const at::Tensor& dc, const at::Tensor& a,
                                       const at::Tensor& b, const std::string& fault) {
  return {written(at::gelu_backward(dc * b, a), fault), written(dc * at::gelu(a), "")};
}

std::vector<at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x,
                                          const at::Tensor& weight, double eps,
                                          const std::string& fault) {
  const auto rstd = at::rsqrt(x.square().mean(1, true) + eps);
  const auto normed = x * rstd, slope = dy * weight;
  const auto dx = (slope - normed * (slope * normed).mean(1, true)) * rstd;
  return {written(dx, fault), written((dy * normed).sum(0), "")};
}

// ---- stand-ins for libraries that bind arguments without names, so that `planted` names the fault
// ----

std::string& planted() {
  static std::string fault;
  return fault;
}

/// flash-attn's packed sequences: tokens x heads x width, with the sequences' ends in int32.
struct PackedAttention {
  PackedAttention(const at::Tensor& q_, const at::Tensor& k_, const at::Tensor& v_,
                  const at::Tensor& ends_q_, const at::Tensor& ends_k_, float scale_,
                  bool is_causal_)
      : q(q_.contiguous()),
        k(k_.contiguous()),
        v(v_.contiguous()),
        ends_q(ends_q_.data_ptr<int>()),
        ends_k(ends_k_.data_ptr<int>()),
        sequences(ends_q_.numel() - 1),
        heads(q.size(1)),
        shared_by(heads / k.size(1)),
        width(q.size(2)),
        scale(scale_),
        is_causal(is_causal_) {}

  [[nodiscard]] const float* at_row(const at::Tensor& of, std::int64_t row, std::int64_t h) const {
    return of.data_ptr<float>() + (row * of.size(1) + h / (heads / of.size(1))) * width;
  }

  /// The attention weights of row `t` of sequence `s`, one per key. "mask": row 2 attends to all
  /// keys.
  [[nodiscard]] std::vector<float> probabilities(std::int64_t s, std::int64_t t,
                                                 std::int64_t h) const {
    std::int64_t end = ends_k[s + 1];
    if (is_causal && !(planted() == "mask" && t == 2)) end -= ends_q[s + 1] - 1 - t;
    std::vector<float> scores;
    for (std::int64_t u = ends_k[s]; u < end; ++u) {
      const float* query = at_row(q, t, h);
      scores.push_back(scale * std::inner_product(query, query + width, at_row(k, u, h), 0.0F));
    }
    if (scores.empty()) return scores;
    const float largest = *std::max_element(scores.begin(), scores.end());
    float sum = 0;
    for (float& score : scores) sum += score = std::exp(score - largest);
    for (float& score : scores) score /= sum;
    return scores;
  }

  template <typename Row>
  void for_each_row(const Row& row) const {
    for (std::int64_t s = 0; s < sequences; ++s) {
      for (std::int64_t t = ends_q[s]; t < ends_q[s + 1]; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) row(s, t, h, probabilities(s, t, h));
      }
    }
  }

  at::Tensor q, k, v;
  const int *ends_q, *ends_k;
  std::int64_t sequences, heads, shared_by, width;
  float scale;
  bool is_causal;
};

/// Has the signature of mha_varlen_fwd in csrc/flash_attn/flash_api.cpp, v2.6.1 to v2.8.3.
std::vector<at::Tensor> varlen_fwd(
    at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<at::Tensor>& out_,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    std::optional<at::Tensor>& /*seqused_k*/, std::optional<const at::Tensor>& /*leftpad_k*/,
    std::optional<at::Tensor>& /*block_table*/, std::optional<at::Tensor>& /*alibi_slopes*/,
    int /*max_seqlen_q*/, int /*max_seqlen_k*/, float p_dropout, float softmax_scale,
    bool /*zero_tensors*/, bool is_causal, int /*window_size_left*/, int /*window_size_right*/,
    float /*softcap*/, bool /*return_softmax*/, std::optional<at::Generator> /*gen*/) {
  const PackedAttention attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, is_causal);
  auto out = out_.has_value() ? *out_ : at::empty(q.sizes(), q.options());
  const auto lse = at::zeros({q.size(1), q.size(0)}, q.options());
  attention.for_each_row([&](auto s, auto t, auto h, const std::vector<float>& probabilities) {
    float* to = out.data_ptr<float>() + (t * attention.heads + h) * attention.width;
    std::fill(to, to + attention.width, 0.0F);
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
      const float* value = attention.at_row(attention.v, attention.ends_k[s] + i, h);
      for (std::int64_t c = 0; c < attention.width; ++c) {
        to[c] += probabilities[i] * value[c] / (1 - p_dropout);
      }
    }
  });
  return {out, lse, at::empty({0}, q.options()), at::zeros({2}, at::kLong)};
}

/// Has the signature of mha_varlen_bwd, v2.6.0 to v2.8.3. "rows" leaves dq of the last four tokens
/// unwritten; "row" makes dv of token 5 bad.
std::vector<at::Tensor> varlen_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& /*out*/, const at::Tensor& /*softmax_lse*/, std::optional<at::Tensor>& dq_,
    std::optional<at::Tensor>& dk_, std::optional<at::Tensor>& dv_, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, std::optional<at::Tensor>& /*alibi_slopes*/,
    const int /*max_seqlen_q*/, const int /*max_seqlen_k*/, const float /*p_dropout*/,
    const float softmax_scale, const bool /*zero_tensors*/, const bool is_causal,
    int /*window_size_left*/, int /*window_size_right*/, const float /*softcap*/,
    const bool /*deterministic*/, std::optional<at::Generator> /*gen*/,
    std::optional<at::Tensor>& /*rng_state*/) {
  const PackedAttention attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, is_causal);
  const auto gradient = dout.contiguous();
  const at::Tensor of[] = {*dq_, *dk_, *dv_};
  std::vector<float> sums[3];
  for (int i = 0; i < 3; ++i) sums[i].assign(of[i].numel(), 0.0F);
  const auto width = attention.width;
  attention.for_each_row([&](auto s, auto t, auto h, const std::vector<float>& probabilities) {
    const float* of_row = attention.at_row(gradient, t, h);
    std::vector<float> slopes;
    float mean = 0;
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
      const float* value = attention.at_row(attention.v, attention.ends_k[s] + i, h);
      slopes.push_back(std::inner_product(of_row, of_row + width, value, 0.0F));
      mean += probabilities[i] * slopes.back();
    }
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
      const auto u = attention.ends_k[s] + static_cast<std::int64_t>(i);
      const float slope = probabilities[i] * (slopes[i] - mean) * softmax_scale;
      const auto shared = (u * k.size(1) + h / attention.shared_by) * width;
      for (std::int64_t c = 0; c < width; ++c) {
        sums[0][(t * attention.heads + h) * width + c] +=
            slope * attention.at_row(attention.k, u, h)[c];
        sums[1][shared + c] += slope * attention.at_row(attention.q, t, h)[c];
        sums[2][shared + c] += probabilities[i] * of_row[c];
      }
    }
  });
  for (int i = 0; i < 3; ++i) {
    const auto row = of[i].size(1) * width;
    const auto ends = i == 0 ? attention.ends_q : attention.ends_k;
    const auto rows = ends[attention.sequences] - (planted() == "rows" && i == 0 ? 4 : 0);
    std::copy_n(sums[i].data(), rows * row, of[i].data_ptr<float>());
    if (planted() == "row" && i == 2) std::fill_n(of[i].data_ptr<float>() + 5 * row, row, kNaN);
  }
  // flash-attn, too, does not write the padding of each sequence in softmax_d.
  auto softmax_d = at::empty({q.size(1), q.size(0) + 128 * attention.sequences}, q.options());
  return {of[0], of[1], of[2], softmax_d};
}

/// Has the signature of GroupedGemm in grouped_gemm's csrc/grouped_gemm.h, v1.0 to v1.1.4.
/// "expert": the gradient of an expert without tokens is not written; "tail": nor is the last row
/// of a product.
void gmm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
         const at::Tensor& batch_sizes, bool trans_a, bool trans_b) {
  std::int64_t begin = 0;
  const at::NoGradGuard no_grad;
  for (std::int64_t e = 0; e < batch_sizes.numel(); ++e) {
    const auto count = batch_sizes.data_ptr<std::int64_t>()[e];
    const auto rows = a.narrow(0, begin, count);
    const auto product = trans_a ? rows.t().matmul(b.narrow(0, begin, count))
                                 : rows.matmul(trans_b ? b[e].t() : b[e]).contiguous();
    auto to = trans_a ? c[e] : c.narrow(0, begin, count);
    auto size = static_cast<std::size_t>(product.numel());
    if (trans_a && count == 0 && planted() == "expert") size = 0;
    const bool is_last = begin + count == a.size(0);
    if (!trans_a && is_last && planted() == "tail") size -= product.size(1);
    std::copy_n(product.data_ptr<float>(), size, to.data_ptr<float>());
    begin += count;
  }
}

/// Has the signature of layer_norm_affine in Apex's csrc/layer_norm_cuda.cpp. "no_eps" adds none.
std::vector<at::Tensor> layer_norm_affine(const at::Tensor& input,
                                          std::vector<std::int64_t> normalized_shape,
                                          const at::Tensor& gamma, const at::Tensor& beta,
                                          double epsilon) {
  const at::NoGradGuard no_grad;
  const auto width = normalized_shape.back();
  const auto rows = input.reshape({-1, width});
  const auto mean = rows.mean(1);
  const auto variance = (rows - mean.unsqueeze(1)).square().mean(1);
  const auto invvar = at::empty_like(variance);
  const double added = planted() == "no_eps" ? 0 : epsilon;
  for (std::int64_t r = 0; r < rows.size(0); ++r) {
    invvar.data_ptr<float>()[r] =
        1 / std::sqrt(variance.data_ptr<float>()[r] + static_cast<float>(added));
  }
  return {layer_norm(input.contiguous(), gamma, beta, added, ""), mean, invvar};
}

/// Has the signature of layer_norm_gradient_affine since 23.11. "row" leaves the last row of dx
/// unwritten.
std::vector<at::Tensor> layer_norm_gradient_affine(
    const at::Tensor& dout, std::optional<at::Tensor> mean, const at::Tensor& invvar,
    const at::Tensor& input_or_output, std::vector<std::int64_t> /*normalized_shape*/,
    const at::Tensor& gamma, const at::Tensor& /*beta*/, double /*epsilon*/,
    bool /*memory_efficient*/) {
  const at::NoGradGuard no_grad;
  const auto normed = (input_or_output - mean->unsqueeze(1)) * invvar.unsqueeze(1);
  const auto slope = dout * gamma;
  const auto found = ((slope - slope.mean(1, true) - normed * (slope * normed).mean(1, true)) *
                      invvar.unsqueeze(1))
                         .contiguous();
  auto dx = at::empty_like(found);
  const auto rows = found.size(0) - (planted() == "row" ? 1 : 0);
  std::copy_n(found.data_ptr<float>(), rows * found.size(1), dx.data_ptr<float>());
  return {dx, (dout * normed).sum(0), dout.sum(0)};
}

/// Its memory holds NaN, like memory that a bad step used before. Lives as long as the process,
/// because tensors keep pointing to it.
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
  if (on && c10::GetCPUAllocator() != &allocator) allocator.stand_before(c10::GetCPUAllocator());
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
  const auto of_one = [&](const char* name, at::Tensor (*compute)(const at::Tensor&)) {
    m.def(
        name,
        [compute](const at::Tensor& x, const std::string& fault) {
          return written(compute(x), fault);
        },
        py::arg("x"), py::arg("fault") = "");
  };
  of_one("relu", &at::relu);
  of_one("sigmoid", &at::sigmoid);
  of_one("tanh", &at::tanh);
  of_one("exp", &at::exp);
  of_one("gelu", [](const at::Tensor& x) { return at::gelu(x); });
  of_one("log_softmax", [](const at::Tensor& x) { return at::log_softmax(x, -1); });
  const auto of_gradient = [&](const char* name,
                               at::Tensor (*compute)(const at::Tensor&, const at::Tensor&)) {
    m.def(
        name,
        [compute](const at::Tensor& dy, const at::Tensor& x, const std::string& fault) {
          return written(compute(dy, x), fault);
        },
        py::arg("dy"), py::arg("x"), py::arg("fault") = "");
  };
  using Tensor = const at::Tensor&;
  of_gradient("relu_backward", [](Tensor dy, Tensor x) { return dy * x.gt(0); });
  of_gradient("sigmoid_backward",
              [](Tensor dy, Tensor x) { return at::sigmoid_backward(dy, at::sigmoid(x)); });
  of_gradient("tanh_backward",
              [](Tensor dy, Tensor x) { return at::tanh_backward(dy, at::tanh(x)); });
  of_gradient("exp_backward", [](Tensor dy, Tensor x) { return dy * at::exp(x); });
  of_gradient("gelu_backward", [](Tensor dy, Tensor x) { return at::gelu_backward(dy, x); });
  of_gradient("softmax_backward", [](Tensor dy, Tensor x) {
    return at::_softmax_backward_data(dy, at::softmax(x, -1), -1, at::kFloat);
  });
  of_gradient("log_softmax_backward", [](Tensor dy, Tensor x) {
    return at::_log_softmax_backward_data(dy, at::log_softmax(x, -1), -1, at::kFloat);
  });
  m.def(
      "geglu",
      [](Tensor a, Tensor b, const std::string& fault) { return written(at::gelu(a) * b, fault); },
      py::arg("a"), py::arg("b"), py::arg("fault") = "");
  m.def("swiglu_backward", &swiglu_backward, py::arg("dc"), py::arg("a"), py::arg("b"),
        py::arg("fault") = "");
  m.def("geglu_backward", &geglu_backward, py::arg("dc"), py::arg("a"), py::arg("b"),
        py::arg("fault") = "");
  m.def("rms_norm_backward", &rms_norm_backward, py::arg("dy"), py::arg("x"), py::arg("weight"),
        py::arg("eps") = 1e-6, py::arg("fault") = "");
  m.def(
      "embedding_backward",
      [](Tensor dy, Tensor weight, Tensor ids, const std::string& fault) {
        return written(at::embedding_dense_backward(dy, ids, weight.size(0), -1, false), fault);
      },
      py::arg("dy"), py::arg("weight"), py::arg("ids"), py::arg("fault") = "");
  m.def(
      "rope_backward",
      [](Tensor dy, Tensor cos, Tensor sin, const std::string& fault) {
        return rope(dy.contiguous(), cos, -sin, fault);
      },
      py::arg("dy"), py::arg("cos"), py::arg("sin"), py::arg("fault") = "");
  m.def(
      "plant", [](const std::string& fault) { planted() = fault; }, py::arg("fault"));
  m.def("spoil_memory", &spoil_memory, py::arg("on"));
  py::class_<Workspace>(m, "Workspace").def(py::init<>()).def("scale", &Workspace::scale);
}

// Bound as in the libraries, in modules of their names, for which this file is loaded.
PYBIND11_MODULE(flash_attn_2_cuda, m) {
  m.def("varlen_fwd", &varlen_fwd, "Forward pass (variable length)");
  m.def("varlen_bwd", &varlen_bwd, "Backward pass (variable length)");
}

PYBIND11_MODULE(grouped_gemm_backend, m) {
  m.def("gmm", &gmm, "Grouped GEMM.");
}

PYBIND11_MODULE(fused_layer_norm_cuda, m) {
  m.def("forward_affine", &layer_norm_affine, "LayerNorm forward (CUDA)");
  m.def("backward_affine", &layer_norm_gradient_affine, "LayerNorm backward (CUDA)");
}
