#include "replay/attention.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/replay/capture.hpp"

namespace nanlocator::inline replay_room {
namespace {

struct Kernel {
  std::string_view op;
  bool is_sequence_first;  // (batch, sequence, heads, head dimension)
  std::string_view bias;   // name of the argument, "" if it has none
};
constexpr std::array kKernels = {
    Kernel{"aten::_flash_attention_forward", true, ""},
    Kernel{"aten::_efficient_attention_forward", true, "bias"},
    Kernel{"aten::_cudnn_attention_forward", false, "attn_bias"},
    Kernel{"aten::_scaled_dot_product_flash_attention", false, ""},
    Kernel{"aten::_scaled_dot_product_efficient_attention", false, "attn_bias"},
    Kernel{"aten::_scaled_dot_product_cudnn_attention", false, "attn_bias"},
};
constexpr std::array kWithoutFormula = {
    "cum_seq_q",   "cum_seq_k", "cu_seqlens_q",      "cu_seqlens_k", "window_size_left",
    "window_size", "seqused_k", "window_size_right", "seqlen_k",     "alibi_slopes"};
constexpr const char* kFormula = "aten::_scaled_dot_product_attention_math";

/// Arguments by their names in the schema.
class AttentionArguments {
 public:
  explicit AttentionArguments(const OperatorCall& call)
      : call_(call), schema_(call_facts(call.name).handle.schema()) {}

  /// None if the operator has no such argument.
  [[nodiscard]] c10::IValue operator[](std::string_view name) const {
    const auto& known = schema_.arguments();
    for (std::size_t i = 0; i < std::min(known.size(), call_.arguments.size()); ++i) {
      if (known[i].name() == name) return call_.arguments[i];
    }
    return {};
  }

 private:
  const OperatorCall& call_;
  const c10::FunctionSchema& schema_;
};

bool has_formula(const AttentionArguments& arguments) {
  const auto is_given = [&](const char* name) { return !arguments[name].isNone(); };
  if (std::ranges::any_of(kWithoutFormula, is_given)) return false;
  const auto dropout = arguments["dropout_p"];
  return dropout.isNone() || dropout.toDouble() == 0.0;
}

bool is_causal(const AttentionArguments& arguments) {
  const auto causal = arguments["is_causal"];
  const auto mask = arguments["custom_mask_type"];  // 0: none; 1 and 2: causal, aligned to one or
                                                    // the other corner
  return (causal.isBool() && causal.toBool()) || (mask.isInt() && mask.toInt() != 0);
}

}  // namespace

std::optional<OperatorCall> attention_by_formula(const OperatorCall& call) {
  const auto kernel = std::ranges::find(kKernels, std::string_view(call.name.name), &Kernel::op);
  if (kernel == kKernels.end()) return std::nullopt;
  const AttentionArguments arguments(call);
  if (!has_formula(arguments)) return std::nullopt;
  const auto heads_first = [&](std::string_view name) {
    const at::Tensor tensor = arguments[name].toTensor();
    return kernel->is_sequence_first ? tensor.transpose(1, 2) : tensor;
  };
  const at::Tensor query = heads_first("query");
  const at::Tensor key = heads_first("key");
  if (query.dim() != 4 || key.dim() != 4) return std::nullopt;
  const bool causal = is_causal(arguments);
  const auto bias = kernel->bias.empty() ? c10::IValue() : arguments[kernel->bias];
  // For a rectangle, kernels differ in the corner at which the triangle begins.
  if (causal && (query.size(2) != key.size(2) || !bias.isNone())) return std::nullopt;

  OperatorCall formula = call;
  formula.name = {kFormula, ""};
  formula.outputs.clear();
  formula.arguments.clear();
  const auto value_of = [&](const c10::Argument& argument) -> c10::IValue {
    const std::string& name = argument.name();
    if (name == "query") return query;
    if (name == "key") return key;
    if (name == "value") return heads_first("value");
    if (name == "attn_mask") return bias;
    if (name == "is_causal") return causal;
    if (name == "scale") return arguments["scale"];
    if (name == "enable_gqa") return query.size(1) != key.size(1);
    return argument.default_value().value_or(c10::IValue());
  };
  for (const auto& argument : call_facts(formula.name).handle.schema().arguments()) {
    formula.arguments.push_back(value_of(argument));
  }
  return formula;
}

}  // namespace nanlocator::inline replay_room
