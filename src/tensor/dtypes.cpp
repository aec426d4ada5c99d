#include "tensor/dtypes.hpp"

#include <utility>

#include "tensor/torch_versions.hpp"

namespace nanlocator::inline tensor_room {
namespace {

constexpr std::pair<at::ScalarType, std::string_view> kDtypeNames[] = {
    {at::kBool, "bool"},
    {at::kByte, "uint8"},
    {at::kChar, "int8"},
    {at::kShort, "int16"},
    {at::kInt, "int32"},
    {at::kLong, "int64"},
    {at::kUInt16, "uint16"},
    {at::kUInt32, "uint32"},
    {at::kUInt64, "uint64"},
    {at::kHalf, "float16"},
    {at::kBFloat16, "bfloat16"},
    {at::kFloat, "float32"},
    {at::kDouble, "float64"},
    {at::kFloat8_e4m3fn, "float8_e4m3fn"},
    {at::kFloat8_e5m2, "float8_e5m2"},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
#if !NANLOCATOR_TORCH_BEFORE(2, 7)
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu"},
#endif
    {at::kComplexHalf, "complex32"},
    {at::kComplexFloat, "complex64"},
    {at::kComplexDouble, "complex128"},
};

}  // namespace

std::string_view torch_name(at::ScalarType type) noexcept {
  for (const auto& [known, name] : kDtypeNames) {
    if (known == type) return name;
  }
  return {};
}

std::optional<at::ScalarType> scalar_type_from(std::string_view name) noexcept {
  for (const auto& [type, known] : kDtypeNames) {
    if (known == name) return type;
  }
  return std::nullopt;
}

}  // namespace nanlocator::inline tensor_room
