#include "scan/chunk_table.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "nanlocator/error.hpp"
#include "scan/tensor_view_check.hpp"

namespace nanlocator::cuda {
namespace {

std::string describe(const TensorView& tensor, std::size_t position) {
  return "tensor " + std::to_string(position) + " of the scan plan (" +
         std::string(name_of(tensor.dtype)) + ", " + std::to_string(tensor.numel) + " elements)";
}

void check(const TensorView& tensor, std::size_t position) {
  check_view(tensor);
  const std::size_t element_size = size_of(tensor.dtype);
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % element_size != 0) {
    throw UsageError(describe(tensor, position) + " is not aligned to its element size of " +
                     std::to_string(element_size) + " bytes");
  }
}

/// Fills dims, sizes and strides with the fewest dimensions that give the same addresses in the
/// same order; with none if the elements are contiguous.
void collapse(const TensorView& tensor, std::size_t position, TensorEntry& entry) {
  entry.dims = 0;
  if (tensor.is_contiguous() || tensor.numel <= 1) return;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  for (std::size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    const std::int64_t size = tensor.sizes[dim];
    const std::int64_t stride = tensor.strides[dim];
    if (size == 1) continue;
    if (!sizes.empty() && strides.back() == size * stride) {
      sizes.back() *= size;
      strides.back() = stride;
    } else {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  }
  if (sizes.size() == 1 && strides[0] == 1) return;
  if (sizes.size() > kMaxDims) {
    throw UnsupportedError(describe(tensor, position) + " needs " + std::to_string(sizes.size()) +
                           " dimensions after adjacent ones are joined; the CUDA scan supports at "
                           "most " +
                           std::to_string(kMaxDims) + ". Scan a contiguous copy");
  }
  entry.dims = static_cast<std::int32_t>(sizes.size());
  std::ranges::copy(sizes, entry.sizes);
  std::ranges::copy(strides, entry.strides);
}

TensorEntry entry_of(const TensorView& tensor, std::size_t position) {
  check(tensor, position);
  TensorEntry entry{};
  collapse(tensor, position, entry);
  entry.numel = static_cast<std::uint64_t>(tensor.numel);
  entry.dtype = tensor.dtype;
  const std::uint64_t chunk_count =
      std::max<std::uint64_t>(1, (entry.numel + kChunkElements - 1) / kChunkElements);
  if (chunk_count > std::numeric_limits<std::uint32_t>::max()) {
    throw UsageError(describe(tensor, position) +
                     " has more than 2^48 elements; split it into several views");
  }
  entry.chunk_count = static_cast<std::uint32_t>(chunk_count);
  return entry;
}

double value_of(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::float64:
      return value_as_double<DType::float64>(bits);
    case DType::float32:
      return value_as_double<DType::float32>(static_cast<std::uint32_t>(bits));
    case DType::float16:
      return value_as_double<DType::float16>(static_cast<std::uint16_t>(bits));
    case DType::bfloat16:
      return value_as_double<DType::bfloat16>(static_cast<std::uint16_t>(bits));
    case DType::float8_e4m3fn:
      return value_as_double<DType::float8_e4m3fn>(static_cast<std::uint8_t>(bits));
    case DType::float8_e5m2:
      return value_as_double<DType::float8_e5m2>(static_cast<std::uint8_t>(bits));
  }
  return 0.0;
}

}  // namespace

ChunkTable make_chunk_table(std::span<const TensorView> tensors) {
  ChunkTable table;
  table.tensors.reserve(tensors.size());
  for (std::size_t position = 0; position < tensors.size(); ++position) {
    const TensorView& tensor = tensors[position];
    TensorEntry entry = entry_of(tensor, position);
    entry.first_partial = static_cast<std::uint32_t>(table.chunks.size());
    if (table.chunks.size() + entry.chunk_count > std::numeric_limits<std::uint32_t>::max()) {
      throw UsageError("the scan plan has more than 2^48 elements up to " +
                       describe(tensor, position) + "; split it into several plans");
    }
    const auto element_bytes = static_cast<std::uint32_t>(size_of(tensor.dtype));
    for (std::uint32_t i = 0; i < entry.chunk_count; ++i) {
      ChunkEntry chunk = chunk_of(entry, tensor.data, element_bytes, i);
      chunk.tensor = static_cast<std::uint32_t>(position);
      chunk.partial = entry.first_partial + i;
      table.chunks.push_back(chunk);
    }
    table.tensors.push_back(entry);
  }
  const auto bytes = [&](const ChunkEntry& chunk) {
    return chunk.numel * size_of(table.tensors[chunk.tensor].dtype);
  };
  std::ranges::stable_sort(table.chunks, std::greater{}, bytes);
  return table;
}

TensorEntry make_tensor_entry(const TensorView& tensor) {
  return entry_of(tensor, 0);
}

TensorStats stats_of(const RawSlot& slot) {
  TensorStats stats;
  if (slot.numel == 0) return stats;
  const SlotPartial& partial = slot.partial;
  const auto dtype = static_cast<DType>(slot.dtype);
  stats.numel = static_cast<std::int64_t>(slot.numel);
  stats.nan = static_cast<std::int64_t>(partial.nan);
  stats.pos_inf = static_cast<std::int64_t>(partial.pos_inf);
  stats.neg_inf = static_cast<std::int64_t>(partial.neg_inf);
  stats.zeros = static_cast<std::int64_t>(partial.zeros);
  if (!stats.is_finite()) stats.first_bad = static_cast<std::int64_t>(partial.first_bad);
  stats.sum_of_squares = partial.squares;
  stats.fingerprint = make_fingerprint(partial.s0, partial.s1);
  if (!stats.has_finite()) return stats;

  const Extremes<std::uint64_t>& bits = partial.extremes;
  const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(dtype) - 1);
  const bool any_negative = (bits.unsigned_max & sign) != 0;
  const bool any_non_negative = bits.signed_max >= 0;
  stats.absmin = value_of(dtype, bits.magnitude_min);
  // If no element is negative, the minimum is the smallest magnitude; likewise the maximum. Adding
  // +0 turns -0 into +0.
  stats.finite_min = (any_negative ? value_of(dtype, bits.unsigned_max) : stats.absmin) + 0.0;
  stats.finite_max =
      (any_non_negative ? value_of(dtype, static_cast<std::uint64_t>(bits.signed_max))
                        : -stats.absmin) +
      0.0;
  stats.absmax = std::max(std::abs(stats.finite_min), std::abs(stats.finite_max));
  return stats;
}

}  // namespace nanlocator::cuda
