// Tensors for the CUDA scan's tests, filled by raw bits, and the kernel's work on the host: the
// shares of the 256 threads one after the other, merged as by the kernel's shuffles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "nanlocator/scan/tensor_stats.hpp"
#include "nanlocator/scan/tensor_view.hpp"
#include "scan/chunk_table.hpp"
#include "scan/cuda_chunk.hpp"

namespace nanlocator::testing {

inline constexpr std::array<DType, kDTypeCount> kAllDTypes = {
    DType::float64,  DType::float32,       DType::float16,
    DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2};

/// The bits of a few numbers per format, written by hand from the formats' definitions.
struct NamedBits {
  std::uint64_t one, minus_two, quiet_nan, negative_nan, pos_inf, neg_inf, largest, smallest;
  bool has_infinity;
};

inline NamedBits named_bits(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return {0x3ff0000000000000,
              0xc000000000000000,
              0x7ff8000000000000,
              0xfff0000000000001,
              0x7ff0000000000000,
              0xfff0000000000000,
              0x7fefffffffffffff,
              1,
              true};
    case DType::float32:
      return {0x3f800000, 0xc0000000, 0x7fc00000, 0xff800001, 0x7f800000,
              0xff800000, 0x7f7fffff, 1,          true};
    case DType::float16:
      return {0x3c00, 0xc000, 0x7e00, 0xfc01, 0x7c00, 0xfc00, 0x7bff, 1, true};
    case DType::bfloat16:
      return {0x3f80, 0xc000, 0x7fc0, 0xff81, 0x7f80, 0xff80, 0x7f7f, 1, true};
    case DType::float8_e4m3fn:
      return {0x38, 0xc0, 0x7f, 0xff, 0, 0, 0x7e, 1, false};
    case DType::float8_e5m2:
      return {0x3c, 0xc0, 0x7e, 0xfd, 0x7c, 0xfc, 0x7b, 1, true};
  }
  return {};
}

/// Raw elements in memory that starts `offset` bytes after a 16-byte boundary.
class RawTensor {
 public:
  RawTensor(DType dtype, std::int64_t numel, std::size_t offset = 0)
      : dtype_(dtype),
        numel_(numel),
        offset_(offset),
        vectors_((offset + numel * size_of(dtype)) / 16 + 1) {}

  [[nodiscard]] unsigned char* data() {
    return reinterpret_cast<unsigned char*>(vectors_.data()) + offset_;
  }
  [[nodiscard]] const unsigned char* data() const { return const_cast<RawTensor*>(this)->data(); }
  [[nodiscard]] std::size_t bytes() const { return numel_ * size_of(dtype_); }
  [[nodiscard]] std::int64_t numel() const { return numel_; }
  [[nodiscard]] DType dtype() const { return dtype_; }

  void set(std::int64_t index, std::uint64_t bits) {  // little-endian, as every CUDA host is
    std::memcpy(data() + index * size_of(dtype_), &bits, size_of(dtype_));
  }
  void fill(std::uint64_t bits) {
    for (std::int64_t i = 0; i < numel_; ++i) set(i, bits);
  }
  /// Any bits at all, NaN and Inf among them.
  void fill_with_any_bits(std::mt19937_64& random) {
    for (std::int64_t i = 0; i < numel_; ++i) set(i, random());
  }
  /// Finite numbers of ordinary size (between about 2^-4 and 2^3) and zeros of both signs.
  void fill_with_ordinary_numbers(std::mt19937_64& random) {
    const NamedBits bits = named_bits(dtype_);
    const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(dtype_) - 1);
    const std::uint64_t doubling = (bits.minus_two & ~sign) - bits.one;
    for (std::int64_t i = 0; i < numel_; ++i) {
      std::uint64_t value = bits.one - 4 * doubling + random() % (7 * doubling);
      if (random() % 50 == 0) value = 0;
      set(i, value | (random() % 2 == 0 ? sign : 0));
    }
  }

  [[nodiscard]] TensorView view() const {
    return {.data = data(), .numel = numel_, .dtype = dtype_, .sizes = {}, .strides = {}};
  }

 private:
  DType dtype_;
  std::int64_t numel_;
  std::size_t offset_;
  std::vector<cuda::Vector> vectors_;
};

/// The result of reduce_block (cuda_kernels.cu) in thread 0.
template <class T>
T reduce_as_a_block(std::vector<T> threads) {
  std::vector<T> warps;
  for (std::size_t warp = 0; warp < threads.size() / 32; ++warp) {
    const auto lane = threads.begin() + 32 * static_cast<std::ptrdiff_t>(warp);
    for (int step = 16; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) lane[i].merge(lane[i + step]);
    }
    warps.push_back(lane[0]);
  }
  for (std::size_t step = warps.size() / 2; step > 0; step /= 2) {
    for (std::size_t i = 0; i < step; ++i) warps[i].merge(warps[i + step]);
  }
  return warps[0];
}

template <DType dtype>
cuda::SlotPartial scan_chunk_on_host(const cuda::ChunkEntry& chunk,
                                     const cuda::TensorEntry& tensor) {
  std::vector<cuda::ChunkPartial<cuda::Unit<dtype>>> threads;
  for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) {
    threads.push_back(cuda::scan_share<dtype>(chunk, tensor, thread));
  }
  return cuda::widen(reduce_as_a_block(threads), chunk.first_element);
}

inline cuda::SlotPartial scan_any_chunk_on_host(const cuda::ChunkEntry& chunk,
                                                const cuda::TensorEntry& tensor) {
  switch (tensor.dtype) {
    case DType::float64:
      return scan_chunk_on_host<DType::float64>(chunk, tensor);
    case DType::float32:
      return scan_chunk_on_host<DType::float32>(chunk, tensor);
    case DType::float16:
      return scan_chunk_on_host<DType::float16>(chunk, tensor);
    case DType::bfloat16:
      return scan_chunk_on_host<DType::bfloat16>(chunk, tensor);
    case DType::float8_e4m3fn:
      return scan_chunk_on_host<DType::float8_e4m3fn>(chunk, tensor);
    case DType::float8_e5m2:
      return scan_chunk_on_host<DType::float8_e5m2>(chunk, tensor);
  }
  return {};
}

/// The result of finish_tensor (cuda_kernels.cu), as stats.
inline TensorStats finish_on_host(const cuda::TensorEntry& tensor,
                                  const cuda::SlotPartial* partials, std::uint32_t count) {
  std::vector<cuda::SlotPartial> threads(cuda::kThreads);
  for (std::uint32_t i = 0; i < count; ++i) threads[i % cuda::kThreads].merge(partials[i]);
  cuda::RawSlot slot{};
  slot.partial = reduce_as_a_block(threads);
  slot.numel = tensor.numel;
  slot.dtype = static_cast<std::uint32_t>(tensor.dtype);
  return cuda::stats_of(slot);
}

/// Scans tensors as the kernel of a plan does, without a GPU.
inline std::vector<TensorStats> scan_on_host(const std::vector<TensorView>& views) {
  const cuda::ChunkTable table = cuda::make_chunk_table(views);
  std::vector<cuda::SlotPartial> partials(table.chunks.size());
  for (const cuda::ChunkEntry& chunk : table.chunks) {
    partials[chunk.partial] = scan_any_chunk_on_host(chunk, table.tensors[chunk.tensor]);
  }
  std::vector<TensorStats> results;
  for (const cuda::TensorEntry& tensor : table.tensors) {
    results.push_back(
        finish_on_host(tensor, partials.data() + tensor.first_partial, tensor.chunk_count));
  }
  return results;
}

/// Scans one tensor as the kernel without a plan does.
inline TensorStats scan_single_on_host(const TensorView& view) {
  const cuda::TensorEntry tensor = cuda::make_tensor_entry(view);
  const auto element_bytes = static_cast<std::uint32_t>(size_of(view.dtype));
  const std::uint32_t groups = std::min(tensor.chunk_count, cuda::kSinglePartials);
  std::vector<cuda::SlotPartial> partials(groups);
  for (std::uint32_t group = 0; group < groups; ++group) {
    for (std::uint32_t i = group; i < tensor.chunk_count; i += cuda::kSinglePartials) {
      const auto chunk = cuda::chunk_of(tensor, view.data, element_bytes, i);
      partials[group].merge(scan_any_chunk_on_host(chunk, tensor));
    }
  }
  return finish_on_host(tensor, partials.data(), groups);
}

}  // namespace nanlocator::testing
