// The arithmetic of the CUDA scan, one word at a time. Compiled by nvcc and, for tests without a
// GPU, by the host compiler; C++17.
//
// Memory is read in 16-byte vectors of four little-endian 32-bit words. A word holds one fp32, two
// 16-bit or four fp8 elements; float64 is read in units of two words. A batch of vectors gets a
// quick scan of three integer reductions over raw bits (the largest as unsigned, the largest as
// signed, the smallest magnitude). They give minimum, maximum, absmin and absmax, and whether there
// is a zero, a NaN or an Inf. Only a batch that fails the quick scan is read again, element by
// element.
//
// Squares. float32 and float64 are squared and summed in fp64, where a product of two fp32 values
// is exact and cannot overflow: one conversion and one DFMA per element. An SM of an A100, H100 or
// H200 converts 16 and multiplies 32 to 64 per clock and is fed less than 5 fp32 elements per clock
// at 4.3 TB/s, so this is free there. On consumer parts (2 fp64 operations per clock and SM) it
// costs about as much as the memory. The narrow types would need two to four conversions per word,
// so the 8 or 16 squares of one vector are summed in fp32, each exact, and then widened: a relative
// error below 1e-6 in the worst case, in practice near 1e-8 and falling with the tensor's size.
// Only bf16 has squares outside fp32's range. Batches that have them (above 2^60, or nothing but
// zeros and values below 2^-55) fail the quick scan on purpose and are summed in fp64.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "nanlocator/scan/element_bits.hpp"
#include "nanlocator/scan/fingerprint.hpp"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace nanlocator::cuda {

template <class T>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline T larger(T a, T b) {
  return a < b ? b : a;
}

template <class T>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline T smaller(T a, T b) {
  return b < a ? b : a;
}

// ---------------------------------------------------------------------------------------------
// Accumulators. Everything but `squares` is an integer and merges exactly in any order.

/// Extremes over raw bits of finite elements; Bits is uint32_t, or uint64_t for float64 and for
/// slots. If there is a negative element, `unsigned_max` is the most negative one; if there is a
/// non-negative one, `signed_max` is the largest one.
template <class Bits>
struct Extremes {
  using Signed = std::make_signed_t<Bits>;
  Bits unsigned_max = 0;  // zero-extended from the element's width
  Signed signed_max = static_cast<Signed>(Bits{1} << (8 * sizeof(Bits) - 1));  // sign-extended
  Bits magnitude_min = static_cast<Bits>(~Bits{0});

  NANLOCATOR_HOST_DEVICE void merge(const Extremes& other) {
    unsigned_max = larger(unsigned_max, other.unsigned_max);
    signed_max = larger(signed_max, other.signed_max);
    magnitude_min = smaller(magnitude_min, other.magnitude_min);
  }
};

inline constexpr std::uint32_t kNoIndex = 0xffffffffu;

/// One thread's share of a chunk, later the whole chunk.
template <class Bits>
struct ChunkPartial {
  Extremes<Bits> extremes;
  std::uint32_t s0 = 0;  // the fingerprint's sums; words count from the tensor's start
  std::uint32_t s1 = 0;
  double squares = 0.0;
  std::uint32_t zeros = 0;
  std::uint32_t nan = 0;
  std::uint32_t pos_inf = 0;
  std::uint32_t neg_inf = 0;
  std::uint32_t first_bad = kNoIndex;  // counted from the chunk's first element

  NANLOCATOR_HOST_DEVICE void merge(const ChunkPartial& other) {
    extremes.merge(other.extremes);
    s0 += other.s0;
    s1 += other.s1;
    squares += other.squares;
    zeros += other.zeros;
    nan += other.nan;
    pos_inf += other.pos_inf;
    neg_inf += other.neg_inf;
    first_bad = smaller(first_bad, other.first_bad);
  }
};

/// The result of a chunk, kept for the ordered merge, and that of a whole tensor.
struct SlotPartial {
  Extremes<std::uint64_t> extremes;
  double squares = 0.0;
  std::uint64_t zeros = 0;
  std::uint64_t nan = 0;
  std::uint64_t pos_inf = 0;
  std::uint64_t neg_inf = 0;
  std::uint64_t first_bad = ~std::uint64_t{0};  // counted from the tensor's first element
  std::uint32_t s0 = 0;
  std::uint32_t s1 = 0;

  NANLOCATOR_HOST_DEVICE void merge(const SlotPartial& other) {
    extremes.merge(other.extremes);
    squares += other.squares;
    zeros += other.zeros;
    nan += other.nan;
    pos_inf += other.pos_inf;
    neg_inf += other.neg_inf;
    first_bad = smaller(first_bad, other.first_bad);
    s0 += other.s0;
    s1 += other.s1;
  }
};

/// `first_element` is the index in the tensor of the chunk's first element.
template <class Bits>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline SlotPartial widen(const ChunkPartial<Bits>& chunk,
                                                              std::uint64_t first_element) {
  SlotPartial slot;
  slot.extremes.unsigned_max = chunk.extremes.unsigned_max;
  slot.extremes.signed_max = chunk.extremes.signed_max;
  slot.extremes.magnitude_min = chunk.extremes.magnitude_min;
  slot.squares = chunk.squares;
  slot.zeros = chunk.zeros;
  slot.nan = chunk.nan;
  slot.pos_inf = chunk.pos_inf;
  slot.neg_inf = chunk.neg_inf;
  if (chunk.first_bad != kNoIndex) slot.first_bad = first_element + chunk.first_bad;
  slot.s0 = chunk.s0;
  slot.s1 = chunk.s1;
  return slot;
}

// ---------------------------------------------------------------------------------------------
// Units and vectors.

/// The step of the loops: a 32-bit word, or one float64 element.
template <DType dtype>
using Unit = std::conditional_t<dtype == DType::float64, std::uint64_t, std::uint32_t>;

template <DType dtype>
inline constexpr std::uint32_t kElementsPerUnit = sizeof(Unit<dtype>) / sizeof(ElementWord<dtype>);
template <DType dtype>
inline constexpr std::uint32_t kUnitsPerVector = 16 / sizeof(Unit<dtype>);
template <DType dtype>
inline constexpr int kElementBits = 8 * sizeof(ElementWord<dtype>);

struct alignas(16) Vector {
  std::uint32_t words[4];
};

template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline Unit<dtype> unit_of(const Vector& vector,
                                                                std::uint32_t index) {
  if constexpr (dtype == DType::float64) {
    return vector.words[2 * index] | static_cast<std::uint64_t>(vector.words[2 * index + 1]) << 32;
  } else {
    return vector.words[index];
  }
}

// ---------------------------------------------------------------------------------------------
// The fingerprint.

/// Four consecutive words, beginning with word `first_word` of the tensor (modulo 2^32).
template <class Partial>
NANLOCATOR_HOST_DEVICE inline void add_vector_to_fingerprint(const Vector& vector,
                                                             std::uint32_t first_word,
                                                             Partial& partial) {
  const std::uint32_t from_3 = vector.words[3] ^ (vector.words[3] >> 16);
  const std::uint32_t from_2 = from_3 + (vector.words[2] ^ (vector.words[2] >> 16));
  const std::uint32_t from_1 = from_2 + (vector.words[1] ^ (vector.words[1] >> 16));
  const std::uint32_t all = from_1 + (vector.words[0] ^ (vector.words[0] >> 16));
  partial.s0 += all;
  partial.s1 += first_word * all + from_1 + from_2 + from_3;
}

template <DType dtype, class Partial>
NANLOCATOR_HOST_DEVICE inline void add_unit_to_fingerprint(Unit<dtype> unit,
                                                           std::uint64_t unit_index,
                                                           Partial& partial) {
  constexpr int words = sizeof(Unit<dtype>) / 4;
  for (int i = 0; i < words; ++i) {
    const auto word = static_cast<std::uint32_t>(static_cast<std::uint64_t>(unit) >> (32 * i));
    const std::uint32_t mixed = word ^ (word >> 16);
    partial.s0 += mixed;
    partial.s1 += static_cast<std::uint32_t>(unit_index * words + i) * mixed;
  }
}

// ---------------------------------------------------------------------------------------------
// The quick scan.

/// For any GPU. Moves each element to the top of a register, where an integer comparison ignores
/// the neighbours below it: a shift, an AND and three comparisons per element.
template <DType dtype>
class SplitScan {
 public:
  NANLOCATOR_HOST_DEVICE void add(Unit<dtype> unit) {
    using Bits = Unit<dtype>;
    constexpr int unit_bits = 8 * sizeof(Bits);
    constexpr Bits all_but_sign = static_cast<Bits>(~Bits{0}) >> 1;
#pragma unroll
    for (int used = kElementBits<dtype>; used <= unit_bits; used += kElementBits<dtype>) {
      const Bits top = unit << (unit_bits - used);
      top_.unsigned_max = larger(top_.unsigned_max, top);
      top_.signed_max = larger(top_.signed_max, static_cast<std::make_signed_t<Bits>>(top));
      top_.magnitude_min = smaller(top_.magnitude_min, static_cast<Bits>(top & all_but_sign));
    }
  }

  [[nodiscard]] NANLOCATOR_HOST_DEVICE Extremes<Unit<dtype>> settle() const {
    constexpr int below = 8 * sizeof(Unit<dtype>) - kElementBits<dtype>;
    Extremes<Unit<dtype>> result;
    result.unsigned_max = top_.unsigned_max >> below;
    result.signed_max = top_.signed_max >> below;
    result.magnitude_min = top_.magnitude_min >> below;
    return result;
  }

 private:
  Extremes<Unit<dtype>> top_;
};

#if defined(__CUDA_ARCH__)
__device__ inline std::uint32_t max_u16x2(std::uint32_t a, std::uint32_t b) {
  return __vmaxu2(a, b);
}
__device__ inline std::uint32_t max_s16x2(std::uint32_t a, std::uint32_t b) {
  return __vmaxs2(a, b);
}
__device__ inline std::uint32_t min_u16x2(std::uint32_t a, std::uint32_t b) {
  return __vminu2(a, b);
}
#else
inline std::uint32_t max_u16x2(std::uint32_t a, std::uint32_t b) {
  return (larger(a >> 16, b >> 16) << 16) | larger(a & 0xffffu, b & 0xffffu);
}
inline std::uint32_t max_s16x2(std::uint32_t a, std::uint32_t b) {
  constexpr std::uint32_t signs = 0x80008000u;  // swaps the two halves of the number line
  return max_u16x2(a ^ signs, b ^ signs) ^ signs;
}
inline std::uint32_t min_u16x2(std::uint32_t a, std::uint32_t b) {
  return ~max_u16x2(~a, ~b);
}
#endif

/// For sm_90 and above, 16- and 8-bit elements: VIMNMX compares two 16-bit lanes in one instruction
/// (before sm_90 the compiler spends four on it). fp8 elements use the upper bytes of two such
/// words.
template <DType dtype>
class PackedScan {
 public:
  NANLOCATOR_HOST_DEVICE void add(std::uint32_t word) {
    add_lanes(word);
    if constexpr (kElementBits<dtype> == 8) add_lanes(word << 8);
  }

  [[nodiscard]] NANLOCATOR_HOST_DEVICE Extremes<std::uint32_t> settle() const {
    constexpr int below = 16 - kElementBits<dtype>;
    Extremes<std::uint32_t> result;
    result.unsigned_max = larger(unsigned_max_ >> 16, unsigned_max_ & 0xffffu) >> below;
    result.signed_max = larger(static_cast<std::int32_t>(signed_max_) >> 16,
                               static_cast<std::int32_t>(signed_max_ << 16) >> 16) >>
                        below;
    result.magnitude_min = smaller(magnitude_min_ >> 16, magnitude_min_ & 0xffffu) >> below;
    return result;
  }

 private:
  NANLOCATOR_HOST_DEVICE void add_lanes(std::uint32_t lanes) {
    unsigned_max_ = max_u16x2(unsigned_max_, lanes);
    signed_max_ = max_s16x2(signed_max_, lanes);
    magnitude_min_ = min_u16x2(magnitude_min_, lanes & 0x7fff7fffu);
  }

  std::uint32_t unsigned_max_ = 0;
  std::uint32_t signed_max_ = 0x80008000u;
  std::uint32_t magnitude_min_ = 0xffffffffu;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <DType dtype>
using QuickScan =
    std::conditional_t<(kElementBits<dtype> <= 16), PackedScan<dtype>, SplitScan<dtype>>;
#else
template <DType dtype>
using QuickScan = SplitScan<dtype>;
#endif

/// True if a batch must be read again element by element: it holds a NaN or Inf, or it is bf16 and
/// fp32 cannot hold its squares.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline bool needs_care(const Extremes<Unit<dtype>>& extremes) {
  using Bits = ElementBits<dtype>;
  using Signed = std::make_signed_t<Unit<dtype>>;
  const Signed negative_side = static_cast<Signed>(extremes.unsigned_max & Bits::abs_mask);
  const Signed absmax = larger(negative_side, extremes.signed_max);
  if constexpr (dtype == DType::bfloat16) {
    constexpr Signed power_60 = (Bits::exponent_bias + 60) << Bits::mantissa_bits;
    constexpr Signed power_minus_55 = (Bits::exponent_bias - 55) << Bits::mantissa_bits;
    // 8 squares below 2^120 sum to less than 2^123. Squares below fp32's normal numbers (of values
    // below 2^-63) are rounded by at most 2^-150 each, negligible beside the square of an absmax of
    // 2^-55.
    return absmax >= power_60 || (absmax > 0 && absmax < power_minus_55);
  } else {
    return absmax >= static_cast<Signed>(Bits::first_bad);
  }
}

/// The number of elements of a unit that are +0 or -0.
template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline std::uint32_t count_zeros(Unit<dtype> unit) {
  if constexpr (kElementsPerUnit<dtype> == 1) {
    return static_cast<Unit<dtype>>(unit << 1) == 0 ? 1 : 0;
  } else {
    // Adding abs_mask to a magnitude carries into the sign bit unless the magnitude is zero, and
    // never beyond it.
    constexpr std::uint32_t magnitudes = kElementBits<dtype> == 16 ? 0x7fff7fffu : 0x7f7f7f7fu;
    const std::uint32_t nonzero = ((unit & magnitudes) + magnitudes) & ~magnitudes;
#if defined(__CUDA_ARCH__)
    return kElementsPerUnit<dtype> - static_cast<std::uint32_t>(__popc(nonzero));
#else
    return kElementsPerUnit<dtype> - static_cast<std::uint32_t>(__builtin_popcount(nonzero));
#endif
  }
}

// ---------------------------------------------------------------------------------------------
// Squares of units that passed the quick scan.

/// The type in which the squares of one vector are summed.
template <DType dtype>
using VectorSum =
    std::conditional_t<dtype == DType::float64 || dtype == DType::float32, double, float>;

/// The unit of a vector's sum of squares: e4m3fn is squared as the fp16 number of the same
/// mantissa, whose exponent bias is 8 larger.
template <DType dtype>
inline constexpr double kSquareUnit = dtype == DType::float8_e4m3fn ? 65536.0 : 1.0;

// memcpy, because nvcc 13.0's front end aborts on __builtin_bit_cast of a value that is not
// constant.
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline float float_from_bits(std::uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

[[nodiscard]] NANLOCATOR_HOST_DEVICE inline double double_from_bits(std::uint64_t bits) {
  double value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/// Adds the squares of two fp16 elements; each is exact in fp32.
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline float add_squares_of_halves(std::uint32_t halves,
                                                                        float sum) {
#if defined(__CUDA_ARCH__)
  const float low = __half2float(__ushort_as_half(static_cast<unsigned short>(halves)));
  const float high = __half2float(__ushort_as_half(static_cast<unsigned short>(halves >> 16)));
#else
  const auto low =
      static_cast<float>(value_as_double<DType::float16>(static_cast<std::uint16_t>(halves)));
  const auto high =
      static_cast<float>(value_as_double<DType::float16>(static_cast<std::uint16_t>(halves >> 16)));
#endif
  return sum + low * low + high * high;
}

template <DType dtype>
[[nodiscard]] NANLOCATOR_HOST_DEVICE inline VectorSum<dtype> add_squares(Unit<dtype> unit,
                                                                         VectorSum<dtype> sum) {
  if constexpr (dtype == DType::float64) {
    const double value = double_from_bits(unit);
    return sum + value * value;
  } else if constexpr (dtype == DType::float32) {
    const double value = float_from_bits(unit);
    return sum + value * value;
  } else if constexpr (dtype == DType::bfloat16) {
    const float low = float_from_bits(unit << 16);
    const float high = float_from_bits(unit & 0xffff0000u);
    return sum + low * low + high * high;
  } else if constexpr (dtype == DType::float16) {
    return add_squares_of_halves(unit, sum);
  } else if constexpr (dtype == DType::float8_e5m2) {  // the upper byte of an fp16
    sum = add_squares_of_halves(unit & 0xff00ff00u, sum);
    return add_squares_of_halves((unit << 8) & 0xff00ff00u, sum);
  } else {
    sum = add_squares_of_halves((unit & 0x7f007f00u) >> 1, sum);
    return add_squares_of_halves((unit & 0x007f007fu) << 7, sum);
  }
}

// ---------------------------------------------------------------------------------------------
// The careful scan.

/// One element; `index` counts from the chunk's first element.
template <DType dtype>
NANLOCATOR_HOST_DEVICE inline void add_element(ElementWord<dtype> bits, std::uint32_t index,
                                               ChunkPartial<Unit<dtype>>& partial) {
  const ElementClass what = classify<dtype>(bits);
  if (what == ElementClass::finite) {
    Extremes<Unit<dtype>> own;
    own.unsigned_max = bits;
    own.signed_max = static_cast<std::make_signed_t<ElementWord<dtype>>>(bits);
    own.magnitude_min = magnitude<dtype>(bits);
    partial.extremes.merge(own);
    partial.zeros += is_zero<dtype>(bits) ? 1 : 0;
    const double value = value_as_double<dtype>(bits);
    partial.squares += value * value;
  } else {
    partial.nan += what == ElementClass::nan ? 1 : 0;
    partial.pos_inf += what == ElementClass::pos_inf ? 1 : 0;
    partial.neg_inf += what == ElementClass::neg_inf ? 1 : 0;
    partial.first_bad = smaller(partial.first_bad, index);
  }
}

/// The first `elements` elements of a unit.
template <DType dtype>
NANLOCATOR_HOST_DEVICE inline void add_unit_carefully(Unit<dtype> unit, std::uint32_t elements,
                                                      std::uint32_t first_index,
                                                      ChunkPartial<Unit<dtype>>& partial) {
#pragma unroll 1
  for (std::uint32_t i = 0; i < elements; ++i) {
    add_element<dtype>(static_cast<ElementWord<dtype>>(unit >> (kElementBits<dtype> * i)),
                       first_index + i, partial);
  }
}

}  // namespace nanlocator::cuda
