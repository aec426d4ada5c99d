#include "locate/detail.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "record/operator_name.hpp"

namespace nanlocator::inline locate_room {
namespace {

std::optional<double> operand(const Birth& birth, std::string_view name) {
  const auto found = std::ranges::find(birth.operands, name, &Operand::name);
  if (found == birth.operands.end()) return std::nullopt;
  return found->at_first_bad ? found->at_first_bad : found->number;
}

Detail of_logarithm(std::optional<double> argument, double zero_at) {
  if (!argument) return Detail::none;
  if (*argument == zero_at) return Detail::log_of_zero;
  return *argument < zero_at ? Detail::log_of_negative : Detail::none;
}

Detail of_quotient(std::optional<double> dividend, std::optional<double> divisor) {
  if (divisor != 0.0) return Detail::none;
  return dividend == 0.0 ? Detail::zero_over_zero : Detail::division_by_zero;
}

Detail of_root(const Birth& birth, bool is_inverse) {
  const auto self = operand(birth, "self");
  if (self < 0.0 && self) return Detail::sqrt_of_negative;
  return is_inverse && self == 0.0 ? Detail::division_by_zero : Detail::none;
}

Detail of_power(const Birth& birth) {
  const auto self = operand(birth, "self");
  const auto exponent = operand(birth, "exponent");
  if (!self) return Detail::none;
  if (*self < 0) return Detail::power_of_negative;
  return *self == 0 && (!exponent || *exponent < 0) ? Detail::power_of_zero : Detail::none;
}

struct Domain {
  std::string_view function;
  bool (*has)(double argument);
};

/// Of functions of one argument, poles excluded. No factor of the argument makes them finite.
constexpr auto kDomains = std::to_array<Domain>({
    {"acos", [](double x) { return std::abs(x) <= 1; }},
    {"asin", [](double x) { return std::abs(x) <= 1; }},
    {"acosh", [](double x) { return x >= 1; }},
    {"atanh", [](double x) { return std::abs(x) < 1; }},
    {"erfinv", [](double x) { return std::abs(x) < 1; }},
    {"logit", [](double x) { return x > 0 && x < 1; }},
    {"ndtri", [](double x) { return x > 0 && x < 1; }},
    {"entr", [](double x) { return x >= 0; }},
    {"lgamma", [](double x) { return x > 0 || x != std::floor(x); }},
    {"gammaln", [](double x) { return x > 0 || x != std::floor(x); }},
    {"digamma", [](double x) { return x > 0 || x != std::floor(x); }},
    {"polygamma", [](double x) { return x > 0 || x != std::floor(x); }},
});

bool is_outside_domain(const Birth& birth) {
  std::string_view name = function_of(birth.sighting.op);
  if (constexpr std::string_view kBackward = "_backward"; name.ends_with(kBackward)) {
    name.remove_suffix(kBackward.size());  // of logit, which takes the same argument
  }
  const auto domain = std::ranges::find(kDomains, name, &Domain::function);
  const auto self = operand(birth, "self");
  return domain != kDomains.end() && self && !domain->has(*self);
}

/// True if each deviation is of no more elements than its correction, 1 unless it was recorded.
bool is_of_too_few(const Birth& birth) {
  const auto self = std::ranges::find(birth.operands, "self", &Operand::name);
  if (self == birth.operands.end()) return false;
  const double correction = operand(birth, "correction").value_or(1);
  double elements = 1;
  for (const std::int64_t size : self->shape) elements *= static_cast<double>(size);
  for (const std::int64_t size : birth.sighting.shape) elements /= static_cast<double>(size);
  return elements <= correction;
}

bool is_empty(const Operand& operand) {
  return std::ranges::find(operand.shape, 0) != operand.shape.end();
}

Detail of_operator(const Birth& birth) {
  const std::string_view name = base_name(birth.sighting.op);
  if (name == "sqrt") return of_root(birth, false);
  if (name == "rsqrt") return of_root(birth, true);
  if (name == "log" || name == "log2" || name == "log10") {
    return of_logarithm(operand(birth, "self"), 0);
  }
  if (name == "log1p") return of_logarithm(operand(birth, "self"), -1);
  if (name == "xlogy" || name == "special_xlogy") return of_logarithm(operand(birth, "other"), 0);
  if (name == "special_xlog1py") return of_logarithm(operand(birth, "other"), -1);
  if (name == "div" || name == "divide" || name == "true_divide" || name == "floor_divide" ||
      name == "fmod" || name == "remainder") {
    return of_quotient(operand(birth, "self"), operand(birth, "other"));
  }
  if (name == "addcdiv") return of_quotient(operand(birth, "tensor1"), operand(birth, "tensor2"));
  if (name == "reciprocal") return of_quotient(1.0, operand(birth, "self"));
  if (name == "pow") return of_power(birth);
  if (is_outside_domain(birth)) return Detail::outside_domain;
  if (name == "_softmax" || name == "softmax" || name == "_log_softmax" || name == "log_softmax") {
    return birth.kind == BirthKind::nan_from_inf ? Detail::masked_row : Detail::none;
  }
  if (name == "std" || name == "var" || name == "std_mean" || name == "var_mean") {
    return is_of_too_few(birth) ? Detail::too_few_elements : Detail::none;
  }
  if (name == "_linalg_slogdet" && birth.kind == BirthKind::inf) return Detail::log_of_zero;
  // The norm of a row of zeros, without an epsilon.
  if (name == "_fused_rms_norm" || name == "_weight_norm_interface") return Detail::zero_over_zero;
  // A mean, or a loss that ends in one.
  const bool is_of_nothing = !birth.operands.empty() && is_empty(birth.operands.front());
  if (is_of_nothing && birth.kind == BirthKind::nan) return Detail::mean_of_nothing;
  return Detail::none;
}

/// True for operators that are finite in forward but whose slope is not: sqrt and norms at 0, acos
/// at 1.
bool has_pole_in_slope(std::string_view forward_op) {
  static constexpr std::array<std::string_view, 13> kPoles = {"sqrt",
                                                              "norm",
                                                              "linalg_vector_norm",
                                                              "frobenius_norm",
                                                              "pow",
                                                              "acos",
                                                              "asin",
                                                              "acosh",
                                                              "atanh",
                                                              "std",
                                                              "cdist",
                                                              "_euclidean_dist",
                                                              "atan2"};
  return std::ranges::find(kPoles, base_name(forward_op)) != kPoles.end();
}

}  // namespace

Detail detail_of(const Birth& birth) {
  const bool is_computed = birth.kind == BirthKind::nan || birth.kind == BirthKind::inf ||
                           birth.kind == BirthKind::nan_from_inf;
  if ((birth.kind == BirthKind::buffer || birth.kind == BirthKind::weight) &&
      !birth.writer.empty() && birth.writer == birth.sighting.op) {
    return Detail::made_earlier;
  }
  if (birth.kind == BirthKind::data && birth.last_seen == LastSeen::rewritten) {
    return Detail::rewritten;
  }
  if (!is_computed) return Detail::none;
  const Detail masked = birth.kind == BirthKind::nan_from_inf ? of_operator(birth) : Detail::none;
  if (birth.kind == BirthKind::nan_from_inf) {
    return masked == Detail::none ? Detail::from_infinity : masked;
  }
  if (birth.is_custom_operator) return Detail::custom_code;
  if (birth.replay == ReplayConclusion::deterministic_overflow && !is_outside_domain(birth)) {
    return Detail::exceeds_range;
  }
  const Detail own = of_operator(birth);
  if (birth.sighting.phase != Phase::backward || !has_pole_in_slope(birth.forward_op)) return own;
  // The root of 1 - x^2 in the derivative of acos is of a negative number where acos itself is NaN.
  const bool is_of_undefined = own == Detail::sqrt_of_negative || own == Detail::power_of_negative;
  return is_of_undefined ? Detail::outside_domain : Detail::derivative_at_pole;
}

}  // namespace nanlocator::inline locate_room
