#include "replay/attention.hpp"

#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "replay/execute.hpp"

namespace nanlocator {
namespace {

using c10::IValue;

constexpr int kBatch = 2, kHeads = 3, kLength = 5, kWidth = 4;

OperatorCall call_of(const char* name, std::vector<IValue> arguments) {
  OperatorCall call;
  call.name = {name, ""};
  call.arguments = std::move(arguments);
  return call;
}

struct AttentionTensors {  // heads before the sequence, as in scaled_dot_product_attention
  at::Tensor query = at::randn({kBatch, kHeads, kLength, kWidth}, at::kHalf);
  at::Tensor key = at::randn({kBatch, kHeads, kLength, kWidth}, at::kHalf);
  at::Tensor value = at::randn({kBatch, kHeads, kLength, kWidth}, at::kHalf);
  at::Tensor bias = at::randn({kBatch, kHeads, kLength, kLength}, at::kHalf);

  static IValue sequence_first(const at::Tensor& tensor) { return tensor.transpose(1, 2); }
  [[nodiscard]] OperatorCall flash(double dropout, bool causal) const {
    return call_of(
        "aten::_flash_attention_forward",
        {sequence_first(query), sequence_first(key), sequence_first(value), IValue(), IValue(),
         kLength, kLength, dropout, causal, false, 0.3, IValue(), IValue(), IValue(), IValue()});
  }
  [[nodiscard]] OperatorCall efficient(const IValue& with_bias, int mask) const {
    return call_of(
        "aten::_efficient_attention_forward",
        {sequence_first(query), sequence_first(key), sequence_first(value), with_bias, IValue(),
         IValue(), IValue(), IValue(), 0.0, mask, true, IValue(), IValue(), IValue()});
  }
  [[nodiscard]] at::Tensor expected(const std::optional<at::Tensor>& mask, bool causal,
                                    std::optional<double> scale) const {
    return at::scaled_dot_product_attention(query.to(at::kDouble), key.to(at::kDouble),
                                            value.to(at::kDouble), mask, 0.0, causal, scale);
  }
};

at::Tensor in_float64(const OperatorCall& call) {
  const auto formula = attention_by_formula(call);
  if (!formula) return {};
  std::vector<std::string> problems;
  return execute(with_precision(*formula, at::kDouble), problems).at(0).toTensor();
}

TEST(AttentionByFormula, EqualsEachKernelInFloat64) {
  const AttentionTensors t;
  EXPECT_TRUE(in_float64(t.flash(0.0, false)).allclose(t.expected({}, false, 0.3)));
  EXPECT_TRUE(in_float64(t.flash(0.0, true)).allclose(t.expected({}, true, 0.3)));
  EXPECT_TRUE(in_float64(t.efficient(IValue(), 1)).allclose(t.expected({}, true, {})));
  EXPECT_TRUE(
      in_float64(t.efficient(t.bias, 0)).allclose(t.expected(t.bias.to(at::kDouble), false, {})));
  const auto cudnn = call_of("aten::_scaled_dot_product_cudnn_attention",
                             {t.query, t.key, t.value, IValue(), true, 0.0, true, false, IValue()});
  EXPECT_TRUE(in_float64(cudnn).allclose(t.expected({}, true, {})));
}

TEST(AttentionByFormula, IsFiniteIfProductsExceedTheKernelsDtype) {
  AttentionTensors t;
  t.query.fill_(60000.0);
  t.key.fill_(60000.0);
  EXPECT_TRUE(in_float64(t.flash(0.0, false)).isfinite().all().item<bool>());
}

TEST(AttentionByFormula, IsEmptyIfTheCallNeedsMore) {
  const AttentionTensors t;
  EXPECT_FALSE(attention_by_formula(t.flash(0.1, false)));
  EXPECT_FALSE(attention_by_formula(t.efficient(t.bias, 1)));
  auto packed = t.flash(0.0, false);
  packed.arguments[3] = at::tensor({0, kLength});
  EXPECT_FALSE(attention_by_formula(packed));
  EXPECT_FALSE(attention_by_formula(call_of("aten::mul.Tensor", {t.query, t.key})));
}

}  // namespace
}  // namespace nanlocator
