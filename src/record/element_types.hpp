// Torch's element types: their sizes and safetensors' names.
#pragma once

#include <cstddef>
#include <string_view>

namespace nanlocator::inline record_room {

/// Bytes of one element of a Torch dtype ("float32", "complex128", "qint8"); 0 if unknown.
[[nodiscard]] std::size_t torch_element_size(std::string_view torch_dtype) noexcept;

}  // namespace nanlocator::inline record_room
