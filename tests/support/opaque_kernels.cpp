// Kernels like TransformerEngine's: pybind functions that allocate memory through Torch and fill it
// themselves, so that the dispatcher sees only an allocation. Contiguous fp32 in host memory; plain
// loops.
#include <ATen/Functions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

namespace {

/// [rows, inner] and [columns, inner] give [rows, columns].
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight) {
  const auto rows = input.size(0), inner = input.size(1), columns = weight.size(0);
  at::Tensor output = at::empty({rows, columns}, input.options());
  const auto* x = input.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* y = output.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < inner; ++k) sum += x[i * inner + k] * w[j * inner + k];
      y[i * columns + j] = sum;
    }
  }
  return output;
}

/// Gradient of the input: [rows, columns] and [columns, inner] give [rows, inner].
at::Tensor linear_input_gradient(const at::Tensor& gradient, const at::Tensor& weight) {
  const auto rows = gradient.size(0), columns = gradient.size(1), inner = weight.size(1);
  at::Tensor output = at::empty({rows, inner}, gradient.options());
  const auto* g = gradient.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* y = output.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < inner; ++k) {
      float sum = 0;
      for (std::int64_t j = 0; j < columns; ++j) sum += g[i * columns + j] * w[j * inner + k];
      y[i * inner + k] = sum;
    }
  }
  return output;
}

/// Adds the gradient of the weight to `sum`, as a fused GEMM does to main_grad.
void add_weight_gradient(const at::Tensor& gradient, const at::Tensor& input,
                         const at::Tensor& sum) {
  const auto rows = gradient.size(0), columns = gradient.size(1), inner = input.size(1);
  const auto* g = gradient.const_data_ptr<float>();
  const auto* x = input.const_data_ptr<float>();
  auto* w = static_cast<float*>(sum.data_ptr());
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t k = 0; k < inner; ++k) {
      float total = 0;
      for (std::int64_t i = 0; i < rows; ++i) total += g[i * columns + j] * x[i * inner + k];
      w[j * inner + k] += total;
    }
  }
}

/// Layer norm of rows: the result, the rows' means and their inverse deviations.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm(const at::Tensor& input,
                                                    const at::Tensor& weight,
                                                    const at::Tensor& bias, double epsilon) {
  const auto rows = input.size(0), width = input.size(1);
  at::Tensor output = at::empty_like(input);
  at::Tensor means = at::empty({rows}, input.options());
  at::Tensor inverses = at::empty({rows}, input.options());
  const auto* x = input.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  const auto* b = bias.const_data_ptr<float>();
  auto* y = output.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < rows; ++i) {
    float mean = 0, variance = 0;
    for (std::int64_t k = 0; k < width; ++k) mean += x[i * width + k] / width;
    for (std::int64_t k = 0; k < width; ++k) {
      variance += (x[i * width + k] - mean) * (x[i * width + k] - mean) / width;
    }
    const float inverse = 1 / std::sqrt(variance + static_cast<float>(epsilon));
    for (std::int64_t k = 0; k < width; ++k) {
      y[i * width + k] = (x[i * width + k] - mean) * inverse * w[k] + b[k];
    }
    means.mutable_data_ptr<float>()[i] = mean;
    inverses.mutable_data_ptr<float>()[i] = inverse;
  }
  return {output, means, inverses};
}

/// Gradients of input, weight and bias.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_gradients(const at::Tensor& gradient,
                                                              const at::Tensor& input,
                                                              const at::Tensor& weight,
                                                              const at::Tensor& means,
                                                              const at::Tensor& inverses) {
  const auto rows = input.size(0), width = input.size(1);
  at::Tensor output = at::empty_like(input);
  at::Tensor of_weight = at::empty_like(weight), of_bias = at::empty_like(weight);
  const auto* g = gradient.const_data_ptr<float>();
  const auto* x = input.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* dx = output.mutable_data_ptr<float>();
  auto* dw = of_weight.mutable_data_ptr<float>();
  auto* db = of_bias.mutable_data_ptr<float>();
  for (std::int64_t k = 0; k < width; ++k) dw[k] = db[k] = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float mean = means.const_data_ptr<float>()[i];
    const float inverse = inverses.const_data_ptr<float>()[i];
    float sum = 0, weighted = 0;
    for (std::int64_t k = 0; k < width; ++k) {
      const float scaled = (x[i * width + k] - mean) * inverse;
      const float passed = g[i * width + k] * w[k];
      dw[k] += g[i * width + k] * scaled;
      db[k] += g[i * width + k];
      sum += passed / width;
      weighted += passed * scaled / width;
    }
    for (std::int64_t k = 0; k < width; ++k) {
      const float scaled = (x[i * width + k] - mean) * inverse;
      dx[i * width + k] = inverse * (g[i * width + k] * w[k] - sum - scaled * weighted);
    }
  }
  return {output, of_weight, of_bias};
}

/// Causal attention, head by head, [heads, length, width]: the result and the probabilities [heads,
/// length, length].
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value) {
  const auto heads = query.size(0), length = query.size(1), width = query.size(2);
  at::Tensor output = at::empty_like(query);
  at::Tensor probabilities = at::empty({heads, length, length}, query.options());
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto* q = query.const_data_ptr<float>() + h * length * width;
    const auto* k = key.const_data_ptr<float>() + h * length * width;
    const auto* v = value.const_data_ptr<float>() + h * length * width;
    auto* p = probabilities.mutable_data_ptr<float>() + h * length * length;
    auto* o = output.mutable_data_ptr<float>() + h * length * width;
    for (std::int64_t i = 0; i < length; ++i) {
      float largest = -INFINITY, total = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        float score = 0;
        for (std::int64_t d = 0; d < width; ++d) score += q[i * width + d] * k[j * width + d];
        p[i * length + j] = score * scale;
        largest = std::max(largest, score * scale);
      }
      for (std::int64_t j = 0; j < length; ++j) {
        p[i * length + j] = j <= i ? std::exp(p[i * length + j] - largest) : 0;
        total += p[i * length + j];
      }
      for (std::int64_t j = 0; j < length; ++j) p[i * length + j] /= total;
      for (std::int64_t d = 0; d < width; ++d) {
        float sum = 0;
        for (std::int64_t j = 0; j <= i; ++j) sum += p[i * length + j] * v[j * width + d];
        o[i * width + d] = sum;
      }
    }
  }
  return {output, probabilities};
}

/// Gradients of query, key and value.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_gradients(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& probabilities) {
  const auto heads = query.size(0), length = query.size(1), width = query.size(2);
  at::Tensor of_query = at::empty_like(query);
  at::Tensor of_key = at::empty_like(query);
  at::Tensor of_value = at::empty_like(query);
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  std::vector<float> of_row(static_cast<std::size_t>(length));
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto head = h * length * width;
    const auto* g = gradient.const_data_ptr<float>() + head;
    const auto* q = query.const_data_ptr<float>() + head;
    const auto* k = key.const_data_ptr<float>() + head;
    const auto* v = value.const_data_ptr<float>() + head;
    const auto* p = probabilities.const_data_ptr<float>() + h * length * length;
    auto* dq = of_query.mutable_data_ptr<float>() + head;
    auto* dk = of_key.mutable_data_ptr<float>() + head;
    auto* dv = of_value.mutable_data_ptr<float>() + head;
    for (std::int64_t e = 0; e < length * width; ++e) dq[e] = dk[e] = dv[e] = 0;
    for (std::int64_t i = 0; i < length; ++i) {
      float weighted = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        float sum = 0;
        for (std::int64_t d = 0; d < width; ++d) {
          sum += g[i * width + d] * v[j * width + d];
          dv[j * width + d] += p[i * length + j] * g[i * width + d];
        }
        of_row[static_cast<std::size_t>(j)] = sum;
        weighted += sum * p[i * length + j];
      }
      for (std::int64_t j = 0; j <= i; ++j) {
        const float passed =
            p[i * length + j] * (of_row[static_cast<std::size_t>(j)] - weighted) * scale;
        for (std::int64_t d = 0; d < width; ++d) {
          dq[i * width + d] += passed * k[j * width + d];
          dk[j * width + d] += passed * q[i * width + d];
        }
      }
    }
  }
  return {of_query, of_key, of_value};
}

/// The largest logit of each row.
at::Tensor largest(const at::Tensor& logits) {
  at::Tensor output = at::empty({logits.size(0)}, logits.options());
  for (std::int64_t i = 0; i < logits.size(0); ++i) {
    const auto* row = logits.const_data_ptr<float>() + i * logits.size(1);
    float most = -INFINITY;
    for (std::int64_t j = 0; j < logits.size(1); ++j) {
      most = std::isnan(row[j]) || row[j] > most ? row[j] : most;
    }
    output.mutable_data_ptr<float>()[i] = most;
  }
  return output;
}

/// exp(logits - largest). Per row also the label's logit minus the largest, or 0 if another rank
/// has the label, and the sum of the exponentials.
std::tuple<at::Tensor, at::Tensor> exponentials(const at::Tensor& logits, const at::Tensor& most,
                                                const at::Tensor& labels, std::int64_t first) {
  const auto rows = logits.size(0), width = logits.size(1);
  at::Tensor output = at::empty_like(logits);
  at::Tensor sums = at::empty({2, rows}, logits.options());
  auto* label_and_sum = sums.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto* row = logits.const_data_ptr<float>() + i * width;
    const float above = most.const_data_ptr<float>()[i];
    const std::int64_t label = labels.const_data_ptr<std::int64_t>()[i] - first;
    label_and_sum[i] = label >= 0 && label < width ? row[label] - above : 0;
    label_and_sum[rows + i] = 0;
    for (std::int64_t j = 0; j < width; ++j) {
      const float power = std::exp(row[j] - above);
      output.mutable_data_ptr<float>()[i * width + j] = power;
      label_and_sum[rows + i] += power;
    }
  }
  return {output, sums};
}

/// The loss of each row, from `exponentials`' results summed over ranks.
at::Tensor losses(const at::Tensor& sums) {
  const auto rows = sums.size(1);
  const auto* values = sums.const_data_ptr<float>();
  at::Tensor output = at::empty({rows}, sums.options());
  for (std::int64_t i = 0; i < rows; ++i) {
    output.mutable_data_ptr<float>()[i] = std::log(values[rows + i]) - values[i];
  }
  return output;
}

at::Tensor logit_gradients(const at::Tensor& gradient, const at::Tensor& powers,
                           const at::Tensor& sums, const at::Tensor& labels, std::int64_t first) {
  const auto rows = powers.size(0), width = powers.size(1);
  at::Tensor output = at::empty_like(powers);
  for (std::int64_t i = 0; i < rows; ++i) {
    const float passed = gradient.const_data_ptr<float>()[i];
    const float sum = sums.const_data_ptr<float>()[rows + i];
    const std::int64_t label = labels.const_data_ptr<std::int64_t>()[i] - first;
    for (std::int64_t j = 0; j < width; ++j) {
      const float probability = powers.const_data_ptr<float>()[i * width + j] / sum;
      output.mutable_data_ptr<float>()[i * width + j] =
          (probability - (j == label ? 1.0F : 0.0F)) * passed;
    }
  }
  return output;
}

}  // namespace

PYBIND11_MODULE(opaque_kernels, m) {
  m.def("linear", &linear);
  m.def("linear_input_gradient", &linear_input_gradient);
  m.def("add_weight_gradient", &add_weight_gradient);
  m.def("norm", &norm);
  m.def("norm_gradients", &norm_gradients);
  m.def("attention", &attention);
  m.def("attention_gradients", &attention_gradients);
  m.def("largest", &largest);
  m.def("exponentials", &exponentials);
  m.def("losses", &losses);
  m.def("logit_gradients", &logit_gradients);
}
