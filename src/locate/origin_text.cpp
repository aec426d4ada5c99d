#include "locate/origin_text.hpp"

#include <cstdio>
#include <limits>

#include "nanlocator/map/rank_coordinates.hpp"

namespace nanlocator {
namespace {

/// The largest finite number of a dtype; empty for an unknown one.
std::optional<double> largest_of(std::string_view dtype) {
  if (dtype == "float64") return std::numeric_limits<double>::max();
  if (dtype == "float32" || dtype == "complex64") return std::numeric_limits<float>::max();
  if (dtype == "bfloat16") return 3.3895313892515355e38;  // 0x7f7f
  if (dtype == "float16") return 65504.0;
  if (dtype == "float8_e5m2") return 57344.0;
  return std::nullopt;
}

/// Inf without NaN, next to finite elements within a factor `reach` of the dtype's largest.
bool is_near_overflow(const Sighting& sighting, double reach) {
  const auto largest = largest_of(sighting.dtype);
  const TensorStats& stats = sighting.stats;
  return largest && stats.nan == 0 && stats.has_finite() && stats.absmax > *largest / reach;
}

}  // namespace

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return product;
}

OriginTensor tensor_of(const Sighting& sighting) {
  const TensorStats& stats = sighting.stats;
  OriginTensor tensor;
  tensor.role = sighting.role;
  tensor.shape = sighting.shape;
  tensor.dtype = sighting.dtype;
  tensor.nan = stats.nan;
  tensor.pos_inf = stats.pos_inf;
  tensor.neg_inf = stats.neg_inf;
  if (stats.first_bad >= 0 && stats.first_bad < numel_of(sighting.shape)) {
    tensor.first_bad = stats.first_bad;
    tensor.first_bad_index = unravel_index(stats.first_bad, sighting.shape);
  }
  if (stats.has_finite()) tensor.absmax_finite = stats.absmax;
  return tensor;
}

std::string describe_bad(const TensorStats& stats) {
  std::string text;
  const auto add = [&](std::int64_t count, const char* what) {
    if (count > 0) text += (text.empty() ? "" : " and ") + std::to_string(count) + " " + what;
  };
  add(stats.nan, "NaN");
  add(stats.pos_inf, "+Inf");
  add(stats.neg_inf, "-Inf");
  return text;
}

std::string describe_operand(const Operand& operand) {
  std::string text = operand.name;
  if (operand.element) text += "[" + std::to_string(*operand.element) + "]";
  if (operand.number) return text + ": " + short_number(*operand.number);
  text += ": " + operand.dtype + " [";
  for (std::size_t i = 0; i < operand.shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(operand.shape[i]);
  }
  text += "]";
  if (!operand.stats) return text;
  const TensorStats& stats = *operand.stats;
  text += stats.is_finite() ? ", finite" : ", " + describe_bad(stats);
  if (stats.has_finite()) text += ", |x| <= " + short_number(stats.absmax);
  if (operand.negatives.value_or(0) > 0) text += ", " + counted(*operand.negatives) + " negative";
  if (stats.zeros > 0) text += ", " + counted(stats.zeros) + " zero";
  return text;
}

std::string describe_reached(const Reached& reached) {
  switch (reached.kind) {
    case ReachedKind::loss:
    case ReachedKind::parameter:
      return reached.name;
    case ReachedKind::other_ranks:
      return "other ranks";
    case ReachedKind::module:
      return "module " + reached.name;
  }
  return reached.name;
}

std::string describe_rank_count(const std::set<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") +
         describe_ranks(std::vector<int>(ranks.begin(), ranks.end()));
}

std::string counted(std::int64_t number) {
  std::string text = std::to_string(number);
  const std::size_t first_digit = number < 0 ? 1 : 0;
  for (std::size_t at = text.size(); at > first_digit + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

std::string short_number(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

std::optional<std::string> overflow_hint(const Sighting& sighting) {
  // 16: four binary orders; healthy gradients of any dtype stay far below.
  if (!is_near_overflow(sighting, 16)) return std::nullopt;
  return "no NaN, and its largest finite element " + short_number(sighting.stats.absmax) +
         " is close to the largest " + sighting.dtype + ": an overflow is likely";
}

std::optional<std::string> overflow_in_sum_hint(const Sighting& sighting, std::size_t members) {
  if (!is_near_overflow(sighting, 2.0 * static_cast<double>(members))) return std::nullopt;
  return "no NaN, and its largest finite element " + short_number(sighting.stats.absmax) +
         " is close to the largest " + sighting.dtype + ": the sum of " + std::to_string(members) +
         " finite addends may have overflowed";
}

Direction direction_of(Phase phase) noexcept {
  switch (phase) {
    case Phase::forward:
    case Phase::loss:
      return Direction::forward;
    case Phase::backward:
      return Direction::backward;
    default:
      return Direction::none;
  }
}

}  // namespace nanlocator
