// Torch's Python names of dtypes: "float32", "int64", "bool".
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace nanlocator::inline tensor_room {

/// "" if it has no Python name.
[[nodiscard]] std::string_view torch_name(at::ScalarType type) noexcept;
[[nodiscard]] std::optional<at::ScalarType> scalar_type_from(std::string_view name) noexcept;

}  // namespace nanlocator::inline tensor_room
