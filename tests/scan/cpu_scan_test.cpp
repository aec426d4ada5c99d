#include "nanlocator/scan/cpu_scan.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "nanlocator/error.hpp"
#include "scan/cpu_kernels.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator {
namespace {

using testing::expect_stats;
using testing::reference_scan;
using testing::same_bits;
using Random = std::mt19937_64;

constexpr DType kAllDTypes[] = {DType::float64,  DType::float32,       DType::float16,
                                DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2};

/// Bits of NaN, +Inf, -Inf, +0 and -0, taken from the formats' definitions.
struct SpecialBits {
  std::vector<std::uint64_t> nan;
  std::vector<std::uint64_t> pos_inf;
  std::vector<std::uint64_t> neg_inf;
};

SpecialBits special_bits(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return {{0x7ff8000000000000u, 0xfff8000000000000u, 0x7ff0000000000001u, 0xffffffffffffffffu},
              {0x7ff0000000000000u},
              {0xfff0000000000000u}};
    case DType::float32:
      return {{0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu}, {0x7f800000u}, {0xff800000u}};
    case DType::float16:
      return {{0x7e00, 0xfe00, 0x7c01, 0xffff}, {0x7c00}, {0xfc00}};
    case DType::bfloat16:
      return {{0x7fc0, 0xffc0, 0x7f81, 0xffff}, {0x7f80}, {0xff80}};
    case DType::float8_e4m3fn:
      return {{0x7f, 0xff}, {}, {}};
    case DType::float8_e5m2:
      return {{0x7e, 0xfe, 0x7d, 0xff}, {0x7c}, {0xfc}};
  }
  return {};
}

/// Memory of a contiguous tensor.
struct Tensor {
  DType dtype;
  std::vector<unsigned char> bytes;

  Tensor(DType type, std::size_t numel) : dtype(type), bytes(numel * size_of(type)) {}

  std::size_t numel() const { return bytes.size() / size_of(dtype); }
  TensorView view() const {
    return {bytes.data(), static_cast<std::int64_t>(numel()), dtype, {}, {}};
  }
  void set(std::size_t index, std::uint64_t bits) {
    std::memcpy(bytes.data() + index * size_of(dtype), &bits, size_of(dtype));
  }
  std::uint64_t get(std::size_t index) const {
    return testing::bits_at(bytes.data() + index * size_of(dtype), dtype);
  }
};

enum class Content { any_bits, finite, moderate, mostly_zero };

/// Any bits: bad elements everywhere. Finite: every exponent. Moderate: magnitudes around 1.
Tensor random_tensor(DType dtype, std::size_t numel, Content content, Random& random) {
  Tensor tensor(dtype, numel);
  for (unsigned char& byte : tensor.bytes) byte = static_cast<unsigned char>(random());
  if (content == Content::any_bits) return tensor;
  for (std::size_t i = 0; i < numel; ++i) {
    std::uint64_t bits = tensor.get(i);
    const double value = testing::decode(bits, dtype);
    if (!std::isfinite(value)) bits = 0x25;
    if (content == Content::moderate && !(std::fabs(value) > 0x1p-6 && std::fabs(value) < 64)) {
      // The exponent of 1, or of 0.5 if the sum of the low bits says so.
      const std::uint64_t one_and_half = dtype == DType::float64       ? 0x3ff8000000000000u
                                         : dtype == DType::float32     ? 0x3fc00000u
                                         : dtype == DType::float16     ? 0x3e00u
                                         : dtype == DType::bfloat16    ? 0x3fc0u
                                         : dtype == DType::float8_e5m2 ? 0x3eu
                                                                       : 0x3cu;
      const std::uint64_t sign = (bits & 1) << (8 * size_of(dtype) - 1);
      bits = (one_and_half ^ (bits & 2)) | sign;
    }
    if (content == Content::mostly_zero && random() % 8 != 0) {
      bits = (random() & 1) << (8 * size_of(dtype) - 1);  // +0 or -0
    }
    tensor.set(i, bits);
  }
  return tensor;
}

struct NamedKernels {
  InstructionSet isa;
  const CpuKernels* kernels;
};

std::vector<NamedKernels> available_kernels() {
  std::vector<NamedKernels> found;
  for (const InstructionSet isa :
       {InstructionSet::plain, InstructionSet::avx2, InstructionSet::avx512}) {
    if (const CpuKernels* kernels = kernels_for(isa)) found.push_back({isa, kernels});
  }
  return found;
}

TensorStats scan_with(const CpuKernels& kernels, const TensorView& view, int threads = 1) {
  TensorStats stats;
  scan_cpu_with(kernels, std::span(&view, 1), std::span(&stats, 1), threads);
  return stats;
}

/// Asks every instruction set and expects one answer.
bool any_is_nonfinite(const TensorView& view) {
  const bool plain = has_nonfinite_with(*plain_kernels(), view);
  for (const auto& [isa, kernels] : available_kernels()) {
    EXPECT_EQ(has_nonfinite_with(*kernels, view), plain) << name_of(isa);
  }
  return plain;
}

/// Scans with every instruction set, expects equal bits, returns the stats.
TensorStats scan_with_all(const TensorView& view) {
  const TensorStats plain = scan_with(*plain_kernels(), view);
  for (const auto& [isa, kernels] : available_kernels()) {
    EXPECT_TRUE(same_bits(scan_with(*kernels, view), plain)) << name_of(isa);
  }
  return plain;
}

class CpuScanOf : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(EveryDType, CpuScanOf, ::testing::ValuesIn(kAllDTypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(CpuScanOf, RandomLengthsAgreeWithTheReference) {
  Random random(11);
  for (int round = 0; round < 120; ++round) {
    const std::size_t numel = round < 40 ? static_cast<std::size_t>(round) : random() % 20001;
    for (const Content content :
         {Content::any_bits, Content::finite, Content::moderate, Content::mostly_zero}) {
      const Tensor tensor = random_tensor(GetParam(), numel, content, random);
      SCOPED_TRACE("numel " + std::to_string(numel) + ", content " +
                   std::to_string(static_cast<int>(content)));
      const TensorStats expected = reference_scan(tensor.view());
      expect_stats(scan_with_all(tensor.view()), expected, GetParam());
      EXPECT_EQ(any_is_nonfinite(tensor.view()), !expected.is_finite());
      if (HasFailure()) return;
    }
  }
}

TEST_P(CpuScanOf, SeveralChunksAgreeWithTheReference) {
  Random random(12);
  const std::size_t chunk = kChunkBytes / size_of(GetParam());
  for (const std::size_t numel : {chunk - 1, chunk, chunk + 1, 3 * chunk + 4711}) {
    for (const Content content : {Content::finite, Content::any_bits}) {
      const Tensor tensor = random_tensor(GetParam(), numel, content, random);
      SCOPED_TRACE("numel " + std::to_string(numel));
      expect_stats(scan_with_all(tensor.view()), reference_scan(tensor.view()), GetParam());
    }
  }
}

TEST_P(CpuScanOf, ReportsIndexAndClassOfOneBadElementAnywhere) {
  Random random(13);
  const SpecialBits special = special_bits(GetParam());
  const std::size_t numel = 1500;
  Tensor tensor = random_tensor(GetParam(), numel, Content::moderate, random);
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint64_t before = tensor.get(i);
    for (const auto* bits : {&special.nan, &special.pos_inf, &special.neg_inf}) {
      for (const std::uint64_t bad : *bits) {
        tensor.set(i, bad);
        EXPECT_TRUE(any_is_nonfinite(tensor.view()));
        const TensorStats stats = scan_with_all(tensor.view());
        EXPECT_EQ(stats.first_bad, static_cast<std::int64_t>(i));
        EXPECT_EQ(stats.nan, bits == &special.nan);
        EXPECT_EQ(stats.pos_inf, bits == &special.pos_inf);
        EXPECT_EQ(stats.neg_inf, bits == &special.neg_inf);
        EXPECT_LE(stats.absmax, 64);
        EXPECT_TRUE(std::isfinite(stats.sum_of_squares));
        if (HasFailure()) return;
      }
    }
    tensor.set(i, before);
  }
}

/// First, middle and last element, and both sides of every place at which the scan changes its
/// stride: rows of 64 bytes, blocks, the four streams of a chunk, chunks.
std::set<std::size_t> telling_positions(DType dtype, std::size_t numel) {
  const std::size_t size = size_of(dtype);
  const std::size_t bytes = numel * size;
  std::vector<std::size_t> edges = {0, bytes / 2, bytes - size};
  for (std::size_t chunk = 0; chunk < bytes; chunk += kChunkBytes) {
    const std::size_t length = std::min(kChunkBytes, bytes - chunk);
    const std::size_t stream = length / 256 * 64;
    for (std::size_t k = 0; k <= 4; ++k) {
      for (const std::size_t offset :
           {std::size_t{0}, std::size_t{64}, std::size_t{4096}, std::size_t{8192}, stream - 64}) {
        edges.push_back(chunk + k * stream + offset);
      }
    }
    edges.push_back(chunk + length / 64 * 64);
  }
  std::set<std::size_t> positions;
  for (const std::size_t edge : edges) {
    for (int step = -1; step <= 1; ++step) {
      const std::size_t index = edge / size + static_cast<std::size_t>(step);
      if (index < numel) positions.insert(index);
    }
  }
  return positions;
}

TEST_P(CpuScanOf, ReportsTheIndexOfABadElementAtEveryBoundaryOfALargeTensor) {
  Random random(14);
  const std::size_t size = size_of(GetParam());
  const std::size_t numel = (kChunkBytes + 150000) / size + 3;
  Tensor tensor = random_tensor(GetParam(), numel, Content::moderate, random);
  const TensorStats clean = reference_scan(tensor.view());
  const SpecialBits special = special_bits(GetParam());
  for (const std::size_t i : telling_positions(GetParam(), numel)) {
    const std::uint64_t before = tensor.get(i);
    const double value = testing::decode(before, GetParam());
    for (const auto* bits : {&special.nan, &special.pos_inf, &special.neg_inf}) {
      if (bits->empty()) continue;
      tensor.set(i, bits->front());
      for (const auto& [isa, kernels] : available_kernels()) {
        SCOPED_TRACE(std::string(name_of(isa)) + ", index " + std::to_string(i));
        const TensorStats stats = scan_with(*kernels, tensor.view());
        EXPECT_EQ(stats.first_bad, static_cast<std::int64_t>(i));
        EXPECT_EQ(stats.nan, bits == &special.nan);
        EXPECT_EQ(stats.pos_inf, bits == &special.pos_inf);
        EXPECT_EQ(stats.neg_inf, bits == &special.neg_inf);
        EXPECT_NEAR(stats.sum_of_squares, clean.sum_of_squares - value * value,
                    clean.sum_of_squares * testing::sum_tolerance(GetParam()));
      }
      if (HasFailure()) return;
    }
    tensor.set(i, before);
  }
}

TEST_P(CpuScanOf, ReportsTheEarlierOfTwoBadElementsWhicheverStreamFindsItFirst) {
  Random random(15);
  const std::size_t numel = 200000;
  Tensor tensor = random_tensor(GetParam(), numel, Content::moderate, random);
  const std::uint64_t nan = special_bits(GetParam()).nan.front();
  for (int round = 0; round < 200; ++round) {
    const std::size_t a = random() % numel;
    const std::size_t b = random() % numel;
    const std::uint64_t before_a = tensor.get(a);
    const std::uint64_t before_b = tensor.get(b);
    tensor.set(a, nan);
    tensor.set(b, nan);
    const TensorStats stats = scan_with_all(tensor.view());
    EXPECT_EQ(stats.first_bad, static_cast<std::int64_t>(std::min(a, b)));
    EXPECT_EQ(stats.nan, a == b ? 1 : 2);
    tensor.set(b, before_b);
    tensor.set(a, before_a);
    if (HasFailure()) return;
  }
}

TEST_P(CpuScanOf, OnlyBadElementsGiveNoExtremes) {
  const SpecialBits special = special_bits(GetParam());
  for (const auto* bits : {&special.nan, &special.pos_inf, &special.neg_inf}) {
    for (const std::uint64_t bad : *bits) {
      for (const std::size_t numel : {std::size_t{1}, std::size_t{63}, std::size_t{20000}}) {
        Tensor tensor(GetParam(), numel);
        for (std::size_t i = 0; i < numel; ++i) tensor.set(i, bad);
        const TensorStats stats = scan_with_all(tensor.view());
        expect_stats(stats, reference_scan(tensor.view()), GetParam());
        EXPECT_EQ(stats.nonfinite(), static_cast<std::int64_t>(numel));
        EXPECT_FALSE(stats.has_finite());
        EXPECT_EQ(stats.finite_min, std::numeric_limits<double>::infinity());
        EXPECT_EQ(stats.finite_max, -std::numeric_limits<double>::infinity());
        EXPECT_EQ(stats.absmax, 0);
        EXPECT_EQ(stats.sum_of_squares, 0);
      }
    }
  }
}

TEST_P(CpuScanOf, ElementsOfOneSignHaveTheirExtremesOnThatSide) {
  Random random(16);
  const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(GetParam()) - 1);
  for (const bool negative : {false, true}) {
    Tensor tensor = random_tensor(GetParam(), 5000, Content::finite, random);
    for (std::size_t i = 0; i < tensor.numel(); ++i) {
      tensor.set(i, negative ? tensor.get(i) | sign : tensor.get(i) & ~sign);
    }
    expect_stats(scan_with_all(tensor.view()), reference_scan(tensor.view()), GetParam());
  }
}

TEST_P(CpuScanOf, MinusZeroCountsAsZeroAndIsReportedAsZero) {
  const std::uint64_t sign = std::uint64_t{1} << (8 * size_of(GetParam()) - 1);
  Tensor tensor(GetParam(), 777);
  for (std::size_t i = 0; i < tensor.numel(); ++i) tensor.set(i, sign);
  const TensorStats stats = scan_with_all(tensor.view());
  EXPECT_EQ(stats.zeros, 777);
  for (const double value : {stats.finite_min, stats.finite_max, stats.absmin, stats.absmax}) {
    EXPECT_EQ(value, 0);
    EXPECT_FALSE(std::signbit(value));
  }
}

TEST_P(CpuScanOf, EveryFlippedBitChangesTheFingerprint) {
  Random random(17);
  for (const std::size_t numel : {std::size_t{1}, std::size_t{7}, std::size_t{1000}}) {
    Tensor tensor = random_tensor(GetParam(), numel, Content::moderate, random);
    const std::uint64_t before = scan_cpu(tensor.view()).fingerprint;
    for (std::size_t bit = 0; bit < tensor.bytes.size() * 8; ++bit) {
      tensor.bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
      ASSERT_NE(scan_cpu(tensor.view()).fingerprint, before) << "bit " << bit;
      tensor.bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    }
  }
}

TEST_P(CpuScanOf, MisalignedMemoryGivesTheSameBits) {
  Random random(18);
  const std::size_t size = size_of(GetParam());
  const Tensor tensor = random_tensor(GetParam(), 5003, Content::finite, random);
  const TensorStats expected = scan_with_all(tensor.view());
  std::vector<unsigned char> shifted(tensor.bytes.size() + 128);
  for (std::size_t offset = 0; offset < 64; ++offset) {
    std::memcpy(shifted.data() + offset * size % 127, tensor.bytes.data(), tensor.bytes.size());
    TensorView view = tensor.view();
    view.data = shifted.data() + offset * size % 127;
    EXPECT_TRUE(same_bits(scan_with_all(view), expected)) << offset;
  }
}

// ---- Threads -----------------------------------------------------------------------------------

TEST_P(CpuScanOf, ManyTensorsGiveTheSameBitsForEveryThreadCountAndInstructionSet) {
  Random random(19);
  std::vector<Tensor> tensors;
  std::vector<TensorView> views;
  for (int i = 0; i < 60; ++i) {
    const std::size_t most = i % 10 == 0 ? 3 * kChunkBytes / size_of(GetParam()) : 20000;
    tensors.push_back(random_tensor(GetParam(), random() % most,
                                    i % 3 == 0 ? Content::any_bits : Content::finite, random));
    views.push_back(tensors.back().view());
  }
  std::vector<TensorStats> expected(views.size());
  scan_cpu_with(*plain_kernels(), views, expected, 1);
  for (std::size_t i = 0; i < views.size(); ++i) {
    expect_stats(expected[i], reference_scan(views[i]), GetParam());
  }
  for (const auto& [isa, kernels] : available_kernels()) {
    for (int threads = 1; threads <= 4; ++threads) {
      std::vector<TensorStats> found(views.size());
      scan_cpu_with(*kernels, views, found, threads);
      for (std::size_t i = 0; i < views.size(); ++i) {
        ASSERT_TRUE(same_bits(found[i], expected[i]))
            << name_of(isa) << ", " << threads << " threads, tensor " << i;
      }
    }
  }
}

TEST(CpuScan, SeveralCallersAtOnceGetTheSameBits) {
  Random random(20);
  const Tensor tensor = random_tensor(DType::float32, 1000003, Content::finite, random);
  const TensorStats expected = scan_cpu(tensor.view());
  std::vector<std::thread> callers;
  std::vector<int> differences(4, 0);
  for (std::size_t caller = 0; caller < differences.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round) {
        differences[caller] += !same_bits(scan_cpu(tensor.view(), 3), expected);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(std::accumulate(differences.begin(), differences.end(), 0), 0);
}

TEST(CpuScan, WorksInAForkedChildOfAProcessThatHasScanned) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
#endif
  Random random(21);
  const Tensor tensor = random_tensor(DType::bfloat16, 2000001, Content::finite, random);
  const TensorStats expected = scan_cpu(tensor.view(), 4);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // kills a child that waits for threads that it does not have
    const bool same = same_bits(scan_cpu(tensor.view(), 4), expected) &&
                      same_bits(scan_cpu(tensor.view(), 2), expected);
    _exit(same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(same_bits(scan_cpu(tensor.view(), 4), expected)) << "in the parent, after the fork";
}

// ---- Values at the edge of the arithmetic ------------------------------------------------------

TEST(CpuScan, SumsBfloat16SquaresOutsideFp32Range) {
  Random random(22);
  // Bits of bfloat16: exponent << 7 | mantissa; 2^e has the exponent 127 + e.
  const auto power = [](int e) { return static_cast<std::uint64_t>(127 + e) << 7; };
  const std::vector<std::pair<int, int>> ranges = {{-126, -100}, {-75, -68}, {-75, -64},
                                                   {-68, -39},   {-41, -39}, {58, 62},
                                                   {60, 70},     {100, 127}, {-126, 127}};
  for (const auto& [low, high] : ranges) {
    for (const std::size_t numel : {std::size_t{100}, std::size_t{40000}}) {
      Tensor tensor(DType::bfloat16, numel);
      for (std::size_t i = 0; i < numel; ++i) {
        const int e = low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
        tensor.set(i, power(e) | (random() & 0x807f));
      }
      SCOPED_TRACE("2^" + std::to_string(low) + " to 2^" + std::to_string(high));
      expect_stats(scan_with_all(tensor.view()), reference_scan(tensor.view()), DType::bfloat16);
      tensor.set(numel / 3, 0x7f80);  // the same with a +Inf among them
      expect_stats(scan_with_all(tensor.view()), reference_scan(tensor.view()), DType::bfloat16);
    }
  }
}

TEST(CpuScan, SumsSubnormalsOfEveryFormat) {
  Random random(23);
  for (const DType dtype : kAllDTypes) {
    Tensor tensor(dtype, 3000);
    // The upper byte without its exponent bits: at most the sign and the low mantissa remain.
    const std::uint64_t mask = dtype == DType::float64       ? 0x800fffffffffffffu
                               : dtype == DType::float32     ? 0x807fffffu
                               : dtype == DType::float16     ? 0x83ffu
                               : dtype == DType::bfloat16    ? 0x807fu
                               : dtype == DType::float8_e5m2 ? 0x83u
                                                             : 0x87u;
    for (std::size_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random() & mask);
    SCOPED_TRACE(std::string(name_of(dtype)));
    const TensorStats stats = scan_with_all(tensor.view());
    expect_stats(stats, reference_scan(tensor.view()), dtype);
    EXPECT_GT(stats.absmax, 0);
    if (dtype != DType::float64) {
      EXPECT_GT(stats.sum_of_squares, 0);  // of float64 they are below double's range
    }
  }
}

TEST(CpuScan, ASumOfSquaresBeyondDoubleIsInfinite) {
  Tensor tensor(DType::float64, 10);
  for (std::size_t i = 0; i < 10; ++i) tensor.set(i, 0x7fe0000000000000u);
  const TensorStats stats = scan_with_all(tensor.view());
  EXPECT_TRUE(stats.is_finite());
  EXPECT_EQ(stats.absmax, 0x1p1023);
  EXPECT_EQ(stats.sum_of_squares, std::numeric_limits<double>::infinity());
}

#if defined(__x86_64__)
TEST(CpuScan, TheCallersFloatingPointEnvironmentNeitherMattersNorChanges) {
  Random random(24);
  for (const DType dtype : kAllDTypes) {
    Tensor tensor = random_tensor(dtype, 700000, Content::finite, random);
    for (std::size_t i = 0; i < 1000; ++i) tensor.set(i, 1 + i % 3);  // subnormals
    const TensorStats alone = scan_cpu(tensor.view(), 1);
    const unsigned before = _mm_getcsr();
    const unsigned odd =
        (before | 0x8040) | 0x6000;  // flush to zero, subnormals are zero, truncate
    _mm_setcsr(odd);
    const TensorStats one = scan_cpu(tensor.view(), 1);
    const TensorStats three = scan_cpu(tensor.view(), 3);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after, odd);
    EXPECT_TRUE(same_bits(one, alone)) << name_of(dtype);
    EXPECT_TRUE(same_bits(three, alone)) << name_of(dtype);
  }
}
#endif

// ---- Views -------------------------------------------------------------------------------------

/// The strides of a contiguous tensor of these sizes.
std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

void expect_like_its_contiguous_copy(const TensorView& view) {
  const std::vector<unsigned char> copy = testing::contiguous_copy(view);
  const TensorStats of_copy = scan_cpu({copy.data(), view.numel, view.dtype, {}, {}});
  EXPECT_TRUE(same_bits(scan_with_all(view), of_copy));
  EXPECT_TRUE(same_bits(scan_cpu(view, 3), of_copy)) << "3 threads";
  EXPECT_EQ(any_is_nonfinite(view), !of_copy.is_finite());
  expect_stats(of_copy, reference_scan(view), view.dtype);
}

TEST_P(CpuScanOf, StridedViewsGiveTheBitsOfTheirContiguousCopy) {
  Random random(25);
  const Tensor memory = random_tensor(GetParam(), 300000, Content::any_bits, random);
  for (int round = 0; round < 60; ++round) {
    TensorView view = memory.view();
    const std::size_t dimensions = 1 + random() % 5;
    std::int64_t room = 299999;  // elements that offsets may still reach
    view.numel = 1;
    for (std::size_t i = 0; i < dimensions; ++i) {
      const auto size = static_cast<std::int64_t>(1 + random() % (dimensions == 1 ? 20000 : 12));
      const auto stride = static_cast<std::int64_t>(
          random() % static_cast<std::uint64_t>(std::min<std::int64_t>(room / size + 1, 5000)));
      view.sizes.push_back(size);
      view.strides.push_back(stride);
      view.numel *= size;
      room -= (size - 1) * stride;
    }
    if (random() % 2 == 0) view.strides.back() = std::min<std::int64_t>(1, view.strides.back());
    SCOPED_TRACE("round " + std::to_string(round));
    expect_like_its_contiguous_copy(view);
    if (HasFailure()) return;
  }
}

TEST_P(CpuScanOf, LargeStridedViewsGiveTheBitsOfTheirContiguousCopy) {
  Random random(26);
  const Tensor memory = random_tensor(GetParam(), 1200 * 1100, Content::finite, random);
  const auto view = [&](std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides) {
    std::int64_t numel = 1;
    for (const std::int64_t size : sizes) numel *= size;
    return TensorView{memory.bytes.data(), numel, GetParam(), std::move(sizes), std::move(strides)};
  };
  expect_like_its_contiguous_copy(view({1100, 1200}, {1, 1100}));     // transposed
  expect_like_its_contiguous_copy(view({1200, 777}, {1100, 1}));      // sliced columns
  expect_like_its_contiguous_copy(view({600, 1100}, {2200, 1}));      // every second row
  expect_like_its_contiguous_copy(view({7, 900, 100}, {0, 100, 1}));  // expanded
  expect_like_its_contiguous_copy(view({5, 130001}, {100000, 1}));    // rows that overlap
  expect_like_its_contiguous_copy(view({900000}, {0}));               // one element, expanded
  expect_like_its_contiguous_copy(view({30, 20, 10, 40}, {8000, 1, 800, 20}));       // permuted
  expect_like_its_contiguous_copy(view({1, 1200, 1, 1100, 1}, {3, 1100, 9, 1, 5}));  // size 1
}

TEST(CpuScan, ContiguousStridesMeanTheContiguousTensor) {
  Random random(27);
  const Tensor tensor = random_tensor(DType::float32, 24 * 35 * 11, Content::finite, random);
  TensorView view = tensor.view();
  const TensorStats expected = scan_cpu(view);
  view.sizes = {24, 35, 11};
  view.strides = row_major(view.sizes);
  EXPECT_TRUE(same_bits(scan_cpu(view), expected));
}

TEST(CpuScan, AnEmptyTensorHasEmptyStats) {
  for (const DType dtype : kAllDTypes) {
    EXPECT_TRUE(same_bits(scan_cpu({nullptr, 0, dtype, {}, {}}), TensorStats{}));
    EXPECT_FALSE(has_nonfinite({nullptr, 0, dtype, {}, {}}));
    EXPECT_TRUE(same_bits(scan_cpu({nullptr, 0, dtype, {5, 0, 3}, {9, 9, 9}}, 4), TensorStats{}));
  }
}

TEST(CpuScan, TheLastElementOfManyBlocksIsScannedToo) {
  Random random(29);
  for (const DType dtype : kAllDTypes) {
    const std::size_t numel = 3 * (kChunkBytes / size_of(dtype)) + 77;
    Tensor tensor = random_tensor(dtype, numel, Content::finite, random);
    EXPECT_FALSE(any_is_nonfinite(tensor.view())) << name_of(dtype);
    tensor.set(numel - 1, special_bits(dtype).nan.front());
    EXPECT_TRUE(any_is_nonfinite(tensor.view())) << name_of(dtype);
    TensorView every_second = tensor.view();
    every_second.sizes = {static_cast<std::int64_t>((numel + 1) / 2)};
    every_second.strides = {2};
    every_second.numel = every_second.sizes[0];
    EXPECT_EQ(any_is_nonfinite(every_second), numel % 2 == 1) << name_of(dtype);
  }
}

TEST(CpuScan, AZeroDimensionalTensorIsOneElement) {
  const float value = -2.5f;
  const TensorStats stats = scan_cpu({&value, 1, DType::float32, {}, {}});
  EXPECT_EQ(stats.numel, 1);
  EXPECT_EQ(stats.finite_min, -2.5);
  EXPECT_EQ(stats.finite_max, -2.5);
  EXPECT_EQ(stats.absmin, 2.5);
  EXPECT_EQ(stats.absmax, 2.5);
  EXPECT_EQ(stats.sum_of_squares, 6.25);
  EXPECT_EQ(stats.zeros, 0);
}

TEST(CpuScan, IndexesMoreThanTwoToThe31ElementsSlow) {
  // Zero pages that are never written cost no memory.
  constexpr std::int64_t kNumel = (std::int64_t{1} << 31) + 5;
  void* memory = mmap(nullptr, kNumel, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* bytes = static_cast<unsigned char*>(memory);
  bytes[kNumel - 3] = 0x7c;  // +Inf
  bytes[kNumel - 2] = 0xfe;  // NaN
  bytes[kNumel - 1] = 0xbc;  // -1
  const TensorStats stats = scan_cpu({memory, kNumel, DType::float8_e5m2, {}, {}}, 2);
  // The same memory as a view whose rows are one element apart: the last one begins past 2^31.
  const TensorStats rows =
      scan_cpu({memory, 6, DType::float8_e5m2, {2, 3}, {(std::int64_t{1} << 31) + 2, 1}});
  munmap(memory, kNumel);
  EXPECT_EQ(stats.numel, kNumel);
  EXPECT_EQ(stats.zeros, kNumel - 3);
  EXPECT_EQ(stats.nan, 1);
  EXPECT_EQ(stats.pos_inf, 1);
  EXPECT_EQ(stats.first_bad, kNumel - 3);
  EXPECT_EQ(stats.finite_min, -1);
  EXPECT_EQ(stats.finite_max, 0);
  EXPECT_EQ(stats.sum_of_squares, 1);
  // The last bytes are words 2^29 (00 00 7c fe, little-endian) and 2^29 + 1 (bc).
  const std::uint32_t m0 = 0xfe7c0000u ^ 0xfe7cu;
  const std::uint32_t m1 = 0xbcu;
  const std::uint64_t s1 = (std::uint64_t{1} << 29) * m0 + ((std::uint64_t{1} << 29) + 1) * m1;
  EXPECT_EQ(stats.fingerprint, (s1 << 32) | (m0 + m1));
  EXPECT_EQ(rows.first_bad, 3);
  EXPECT_EQ(rows.nonfinite(), 2);
  EXPECT_EQ(rows.zeros, 3);
}

// ---- Wrong use ---------------------------------------------------------------------------------

template <class ErrorType>
void expect_refused(const TensorView& view, const std::string& words) {
  try {
    (void)scan_cpu(view);
    ADD_FAILURE() << "expected an error that says: " << words;
  } catch (const ErrorType& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(CpuScan, RefusesViewsThatDescribeNoTensor) {
  const float data[8] = {};
  expect_refused<UsageError>({nullptr, 3, DType::float32, {}, {}}, "data is null");
  expect_refused<UsageError>({data, -1, DType::float32, {}, {}}, "numel is -1");
  expect_refused<UsageError>({data, 4, DType::float32, {2, 2}, {1}}, "2 sizes, but 1 strides");
  expect_refused<UsageError>({data, 4, DType::float32, {2, 3}, {3, 1}}, "multiply to 6");
  expect_refused<UsageError>({data, 4, DType::float32, {4}, {-1}}, "stride -1");
  expect_refused<UsageError>({data, 4, DType::float32, {-4}, {1}}, "size -4");
  expect_refused<UsageError>({data, 4, DType::float32, {2, 2}, {std::int64_t{1} << 62, 1}},
                             "64-bit");
  expect_refused<UsageError>(
      {data, 4, DType::float32, {std::int64_t{1} << 40, std::int64_t{1} << 40}, {1, 1}}, "64-bit");
  expect_refused<UnsupportedError>({data, 4, static_cast<DType>(77), {}, {}}, "dtype number 77");
}

TEST(CpuScan, RefusesAThreadCountBelowOneAndUnequalSpans) {
  const float value = 1;
  const TensorView view = {&value, 1, DType::float32, {}, {}};
  EXPECT_THROW((void)scan_cpu(view, 0), UsageError);
  std::vector<TensorStats> two(2);
  EXPECT_THROW(scan_cpu(std::span(&view, 1), two, 1), UsageError);
}

using CpuScanDeathTest = ::testing::Test;

TEST(CpuScanDeathTest, TheEnvironmentVariableChoosesTheInstructionSet) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fresh process, which has not read it yet
  for (const auto& [isa, kernels] : available_kernels()) {
    EXPECT_EXIT(
        {
          setenv("NANLOCATOR_CPU_ISA", std::string(name_of(isa)).c_str(), 1);
          _exit(active_instruction_set() == isa ? 0 : 1);
        },
        ::testing::ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        setenv("NANLOCATOR_CPU_ISA", "sse9", 1);
        try {
          (void)active_instruction_set();
        } catch (const UsageError& error) {
          std::fprintf(stderr, "%s", error.what());
          _exit(7);
        }
      },
      ::testing::ExitedWithCode(7), "NANLOCATOR_CPU_ISA is \"sse9\".*plain");
}

}  // namespace
}  // namespace nanlocator
