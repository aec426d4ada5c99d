// Names of PyTorch's operators, as sightings and births have them.
#pragma once

#include <string_view>

namespace nanlocator::inline record_room {

/// "sqrt" of "aten::sqrt_.out"; "" for another library's operator.
[[nodiscard]] inline std::string_view base_name(std::string_view op) {
  constexpr std::string_view kAten = "aten::";
  if (!op.starts_with(kAten)) return {};
  op.remove_prefix(kAten.size());
  op = op.substr(0, op.find('.'));
  if (op.ends_with('_') && op.size() > 1) op.remove_suffix(1);
  return op;
}

/// The same, "erfinv" also of "aten::special_erfinv".
[[nodiscard]] inline std::string_view function_of(std::string_view op) {
  constexpr std::string_view kSpecial = "special_";
  std::string_view name = base_name(op);
  if (name.starts_with(kSpecial)) name.remove_prefix(kSpecial.size());
  return name;
}

}  // namespace nanlocator::inline record_room
