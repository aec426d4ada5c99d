#include "nanlocator/scan/cpu_scan.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include "nanlocator/error.hpp"
#include "nanlocator/scan/content.hpp"
#include "nanlocator/scan/element_bits.hpp"
#include "nanlocator/scan/fingerprint.hpp"
#include "scan/cpu_kernels.hpp"
#include "scan/tensor_view_check.hpp"
#include "scan/worker_pool.hpp"

namespace nanlocator::inline scan_room {
namespace {

/// For less memory, waking a thread costs more than it saves.
constexpr std::size_t kBytesWorthThreads = std::size_t{1} << 20;
/// Chunks that a thread claims at once from the common counter, if enough are left: 2 MiB of a
/// large tensor.
constexpr std::size_t kChunksPerClaim = 4;

/// Sets the floating-point environment that the kernels expect, during its lifetime. The caller's
/// may flush subnormals to zero (torch.set_flush_denormal), round differently or trap.
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() noexcept : before_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);
  }
  ~DefaultFloatingPoint() {
    _mm_setcsr(before_);
  }

 private:
  unsigned before_;
#else
  DefaultFloatingPoint() noexcept {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() {
    std::fesetenv(&before_);
  }

 private:
  std::fenv_t before_;
#endif
 public:
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;  // restores once
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;
};

InstructionSet choose_instruction_set() {
  constexpr InstructionSet best_first[] = {InstructionSet::avx512, InstructionSet::avx2,
                                           InstructionSet::plain};
  const char* wish = std::getenv("NANLOCATOR_CPU_ISA");
  std::string available;
  for (const InstructionSet isa : best_first) {
    if (kernels_for(isa) == nullptr) continue;
    if (wish == nullptr || *wish == '\0' || wish == name_of(isa)) return isa;
    available += (available.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  throw UsageError("NANLOCATOR_CPU_ISA is \"" + std::string(wish) +
                   "\"; this processor and build have " + available +
                   ". Set one of these, or unset it for the best one.");
}

// ---- A tensor's elements in logical order ------------------------------------------------------

/// Reads a view's elements in row-major order, whatever their strides.
class ElementReader {
 public:
  explicit ElementReader(const TensorView& view)
      : data_(static_cast<const char*>(view.data)), element_bytes_(size_of(view.dtype)) {
    // Joins neighbouring dimensions that are contiguous in memory, and drops those of size 1.
    for (std::size_t i = view.strides.size(); i-- > 0;) {
      const Dimension next{view.sizes[i], view.strides[i]};
      if (next.size == 1) continue;
      if (!dimensions_.empty() &&
          next.stride == dimensions_.back().stride * dimensions_.back().size) {
        dimensions_.back().size *= next.size;
      } else {
        dimensions_.push_back(next);
      }
    }
    if (dimensions_.size() == 1 && dimensions_.front().stride == 1) dimensions_.clear();
  }

  [[nodiscard]] bool is_contiguous() const noexcept { return dimensions_.empty(); }

  /// `count` elements from logical index `first` on, contiguous: in place, or copied to `buffer`.
  const char* read(std::int64_t first, std::int64_t count, char* buffer) const {
    if (is_contiguous()) return at(first);
    const Dimension inner = dimensions_.front();
    if (inner.stride == 1 && first % inner.size + count <= inner.size) return at(offset_of(first));
    // Division finds the first row of a plane (the two innermost dimensions); its other rows follow
    // by their stride, so that short rows do not cost a division each.
    const Dimension outer = dimensions_.size() > 1 ? dimensions_[1] : Dimension{1, 0};
    const bool is_transposed = outer.size > 1 && outer.stride < inner.stride;
    char* out = buffer;
    while (count > 0) {
      const std::int64_t column = first % inner.size;
      const std::int64_t offset = offset_of(first - column);
      const std::int64_t rows_left = outer.size - first / inner.size % outer.size;
      std::int64_t copied = 0;
      if (column != 0 || count < inner.size) {
        copied = std::min(count, inner.size - column);
        copy_row(at(offset + column * inner.stride), inner.stride, copied, out);
      } else {
        const std::int64_t rows = std::min(rows_left, count / inner.size);
        copied = rows * inner.size;
        if (is_transposed) {
          copy_transposed(at(offset), rows, out);
        } else {
          for (std::int64_t row = 0; row < rows; ++row) {
            copy_row(at(offset + row * outer.stride), inner.stride, inner.size,
                     out + static_cast<std::size_t>(row * inner.size) * element_bytes_);
          }
        }
      }
      out += static_cast<std::size_t>(copied) * element_bytes_;
      first += copied;
      count -= copied;
    }
    return buffer;
  }

 private:
  struct Dimension {
    std::int64_t size;
    std::int64_t stride;  // in elements
  };

  const char* at(std::int64_t offset) const {
    return data_ + static_cast<std::size_t>(offset) * element_bytes_;
  }

  std::int64_t offset_of(std::int64_t index) const {
    std::int64_t offset = 0;
    for (const Dimension& dimension : dimensions_) {
      offset += index % dimension.size * dimension.stride;
      index /= dimension.size;
    }
    return offset;
  }

  void copy_row(const char* from, std::int64_t stride, std::int64_t count, char* out) const {
    if (stride == 1) {
      std::memcpy(out, from, static_cast<std::size_t>(count) * element_bytes_);
      return;
    }
    with_word([&]<class Word>(Word) {
      const std::size_t step = static_cast<std::size_t>(stride) * sizeof(Word);
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        std::memcpy(out + i * sizeof(Word), from + i * step, sizeof(Word));
      }
    });
  }

  /// Whole rows whose elements are further apart than the rows: eight columns at a time, so that
  /// the cache lines of a column serve all rows. Eight, because columns a power of two apart fall
  /// into one set of the L1 cache, which has eight ways.
  void copy_transposed(const char* from, std::int64_t rows, char* out) const {
    with_word([&]<class Word>(Word) {
      const auto columns = static_cast<std::size_t>(dimensions_[0].size);
      const std::size_t column_step =
          static_cast<std::size_t>(dimensions_[0].stride) * sizeof(Word);
      const std::size_t row_step = static_cast<std::size_t>(dimensions_[1].stride) * sizeof(Word);
      for (std::size_t begin = 0; begin < columns; begin += 8) {
        const std::size_t end = std::min(begin + 8, columns);
        for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
          for (std::size_t column = begin; column < end; ++column) {
            std::memcpy(out + (row * columns + column) * sizeof(Word),
                        from + row * row_step + column * column_step, sizeof(Word));
          }
        }
      }
    });
  }

  /// Calls `copy` with an integer of an element's size.
  template <class Copy>
  void with_word(const Copy& copy) const {
    switch (element_bytes_) {
      case 8:
        return copy(std::uint64_t{});
      case 4:
        return copy(std::uint32_t{});
      case 2:
        return copy(std::uint16_t{});
      default:
        return copy(std::uint8_t{});
    }
  }

  const char* data_;
  std::size_t element_bytes_;
  std::vector<Dimension> dimensions_;  // innermost first; empty: contiguous
};

// ---- Chunks into a tensor's stats --------------------------------------------------------------

std::int64_t chunk_elements(DType dtype) {
  return static_cast<std::int64_t>(kChunkBytes / size_of(dtype));
}

std::int64_t chunk_count(const TensorView& view) {
  const std::int64_t elements = chunk_elements(view.dtype);
  return view.numel / elements + (view.numel % elements != 0);
}

void scan_one_chunk(const ElementReader& reader, const TensorView& view, std::int64_t chunk,
                    const CpuKernels& kernels, char* buffer, ChunkStats& stats) {
  const std::int64_t first = chunk * chunk_elements(view.dtype);
  const std::int64_t count = std::min(chunk_elements(view.dtype), view.numel - first);
  const ScanChunk scan = kernels.scan_chunk[static_cast<int>(view.dtype)];
  scan(reader.read(first, count, buffer), static_cast<std::size_t>(count), stats);
}

/// Builds a tensor's stats from its chunks, added in order.
template <DType dtype>
class StatsBuilder {
  using Bits = ElementBits<dtype>;
  using Word = typename Bits::Word;

 public:
  void add(const ChunkStats& chunk, std::int64_t first) {
    stats_.nan += chunk.nan;
    stats_.pos_inf += chunk.pos_inf;
    stats_.neg_inf += chunk.neg_inf;
    stats_.zeros += chunk.zeros;
    if (stats_.first_bad < 0 && chunk.first_bad >= 0) stats_.first_bad = first + chunk.first_bad;
    stats_.sum_of_squares += chunk.sum_of_squares;
    const auto base =
        static_cast<std::uint32_t>(static_cast<std::uint64_t>(first) * sizeof(Word) / 4);
    stats_.fingerprint =
        add_fingerprints(stats_.fingerprint, shift_fingerprint(chunk.fingerprint, base));
    unsigned_max_ = std::max(unsigned_max_, static_cast<Word>(chunk.unsigned_max));
    signed_max_ = std::max(signed_max_, order_of_signed(static_cast<Word>(chunk.signed_max)));
    magnitude_min_ = std::min(magnitude_min_, static_cast<Word>(chunk.magnitude_min));
  }

  TensorStats finish(std::int64_t numel) {
    stats_.numel = numel;
    if (!stats_.has_finite()) return stats_;
    const Word signed_max = order_of_signed(signed_max_);
    stats_.absmin = value_as_double<dtype>(magnitude_min_);
    // If no element has a sign bit, the smallest is the one of smallest magnitude; likewise the
    // largest.
    stats_.finite_min =
        is_negative<dtype>(unsigned_max_) ? value_as_double<dtype>(unsigned_max_) : stats_.absmin;
    stats_.finite_max =
        is_negative<dtype>(signed_max) ? -stats_.absmin : value_as_double<dtype>(signed_max);
    stats_.absmax = std::max(-stats_.finite_min, stats_.finite_max);
    // -0 becomes 0, so that equal stats also print alike.
    for (double* extreme : {&stats_.finite_min, &stats_.finite_max, &stats_.absmax}) {
      if (*extreme == 0) *extreme = 0.0;
    }
    return stats_;
  }

 private:
  /// Maps two's complement order to unsigned order, and back.
  static Word order_of_signed(Word bits) { return static_cast<Word>(bits ^ Bits::sign_mask); }

  TensorStats stats_;
  Word unsigned_max_ = 0;
  Word signed_max_ = 0;  // mapped by order_of_signed
  Word magnitude_min_ = static_cast<Word>(~Word{0});
};

/// Builds the stats of `view`; `next_chunk(i)` gives the stats of chunk i, for i in order. Not
/// inlined, so that no addition is moved out of the scan's floating-point environment.
template <DType dtype, class NextChunk>
[[gnu::noinline]] TensorStats build_stats_of(const TensorView& view, const NextChunk& next_chunk) {
  StatsBuilder<dtype> builder;
  for (std::int64_t chunk = 0; chunk < chunk_count(view); ++chunk) {
    builder.add(next_chunk(chunk), chunk * chunk_elements(dtype));
  }
  return builder.finish(view.numel);
}

template <class NextChunk>
TensorStats build_stats(const TensorView& view, const NextChunk& next_chunk) {
  switch (view.dtype) {
    case DType::float64:
      return build_stats_of<DType::float64>(view, next_chunk);
    case DType::float32:
      return build_stats_of<DType::float32>(view, next_chunk);
    case DType::float16:
      return build_stats_of<DType::float16>(view, next_chunk);
    case DType::bfloat16:
      return build_stats_of<DType::bfloat16>(view, next_chunk);
    case DType::float8_e4m3fn:
      return build_stats_of<DType::float8_e4m3fn>(view, next_chunk);
    case DType::float8_e5m2:
      return build_stats_of<DType::float8_e5m2>(view, next_chunk);
  }
  throw UnsupportedError("unknown dtype");  // unreachable: check_view refused it
}

// ---- One thread, or many -----------------------------------------------------------------------

/// Buffers that the calling thread keeps, so that a step's scans allocate once.
struct Workspace {
  struct Chunk {
    std::size_t tensor;
    std::int64_t index;
  };
  std::vector<Chunk> chunks;
  std::vector<ChunkStats> stats;  // one per chunk
  std::vector<ElementReader> readers;
  std::vector<std::unique_ptr<char[]>> gather_buffers;  // kChunkBytes each, for strided views

  char* gather_buffer(std::size_t thread) {
    while (gather_buffers.size() <= thread) {
      gather_buffers.push_back(std::make_unique_for_overwrite<char[]>(kChunkBytes));
    }
    return gather_buffers[thread].get();
  }
};

Workspace& this_thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

TensorStats scan_alone(const TensorView& view, const CpuKernels& kernels) {
  const ElementReader reader(view);
  char* buffer = reader.is_contiguous() ? nullptr : this_thread_workspace().gather_buffer(0);
  ChunkStats stats;
  return build_stats(view, [&](std::int64_t chunk) -> const ChunkStats& {
    scan_one_chunk(reader, view, chunk, kernels, buffer, stats);
    return stats;
  });
}

void scan_together(std::span<const TensorView> tensors, std::span<TensorStats> results, int threads,
                   const CpuKernels& kernels) {
  Workspace& space = this_thread_workspace();
  space.chunks.clear();
  space.readers.clear();
  bool all_contiguous = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    space.readers.emplace_back(tensors[i]);
    all_contiguous = all_contiguous && space.readers.back().is_contiguous();
    for (std::int64_t c = 0; c < chunk_count(tensors[i]); ++c) space.chunks.push_back({i, c});
  }
  space.stats.resize(space.chunks.size());
  const std::size_t most_threads = std::min(static_cast<std::size_t>(threads), space.chunks.size());
  const std::size_t claim =
      std::clamp<std::size_t>(space.chunks.size() / (4 * most_threads), 1, kChunksPerClaim);
  if (!all_contiguous) space.gather_buffer(most_threads - 1);

  std::atomic<std::size_t> next_chunk{0};
  std::atomic<std::size_t> next_thread{0};
  const auto work = [&]() noexcept {
    const DefaultFloatingPoint environment;
    const std::size_t thread = next_thread.fetch_add(1, std::memory_order_relaxed);
    char* buffer = all_contiguous ? nullptr : space.gather_buffers[thread].get();
    for (;;) {
      const std::size_t begin = next_chunk.fetch_add(claim, std::memory_order_relaxed);
      if (begin >= space.chunks.size()) return;
      const std::size_t end = std::min(begin + claim, space.chunks.size());
      for (std::size_t i = begin; i < end; ++i) {
        const auto [tensor, index] = space.chunks[i];
        scan_one_chunk(space.readers[tensor], tensors[tensor], index, kernels, buffer,
                       space.stats[i]);
      }
    }
  };
  run_shared(static_cast<int>(most_threads) - 1, std::cref(work));

  const ChunkStats* done = space.stats.data();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    results[i] = build_stats(tensors[i],
                             [&](std::int64_t chunk) -> const ChunkStats& { return done[chunk]; });
    done += chunk_count(tensors[i]);
  }
}

#if defined(__x86_64__)
/// Clang's __builtin_cpu_supports does not know "f16c".
bool has_f16c() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

/// Chosen once: querying the processor (cpuid) takes 2 to 10 us in a virtual machine.
const CpuKernels& active_kernels() {
  static const CpuKernels& chosen = *kernels_for(active_instruction_set());
  return chosen;
}

}  // namespace

const CpuKernels* kernels_for(InstructionSet isa) noexcept {
  switch (isa) {
    case InstructionSet::plain:
      return plain_kernels();
#if defined(__x86_64__)
    case InstructionSet::avx2: {
      const bool supported =
          __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
      return supported ? avx2_kernels() : nullptr;
    }
    case InstructionSet::avx512: {
      const bool supported =
          __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
      return supported && kernels_for(InstructionSet::avx2) ? avx512_kernels() : nullptr;
    }
#endif
    default:
      return nullptr;
  }
}

InstructionSet active_instruction_set() {
  static const InstructionSet chosen = choose_instruction_set();
  return chosen;
}

std::string_view name_of(InstructionSet isa) noexcept {
  switch (isa) {
    case InstructionSet::plain:
      return "plain";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "unknown";
}

TensorStats scan_cpu(const TensorView& tensor, int threads) {
  TensorStats result;
  scan_cpu(std::span(&tensor, 1), std::span(&result, 1), threads);
  return result;
}

bool has_nonfinite(const TensorView& tensor) {
  return has_nonfinite_with(active_kernels(), tensor);
}

bool has_nonfinite_with(const CpuKernels& kernels, const TensorView& tensor) {
  check_view(tensor);
  const HasNonfinite is_bad = kernels.has_nonfinite[static_cast<int>(tensor.dtype)];
  const ElementReader reader(tensor);
  if (reader.is_contiguous()) return is_bad(tensor.data, static_cast<std::size_t>(tensor.numel));
  char* buffer = this_thread_workspace().gather_buffer(0);
  for (std::int64_t first = 0; first < tensor.numel;) {
    const std::int64_t count = std::min(chunk_elements(tensor.dtype), tensor.numel - first);
    if (is_bad(reader.read(first, count, buffer), static_cast<std::size_t>(count))) return true;
    first += count;
  }
  return false;
}

Content content_of(const TensorView& tensor) {
  check_view(tensor);
  const DefaultFloatingPoint environment;
  const CpuKernels& kernels = active_kernels();
  const HasNonfinite is_bad = kernels.has_nonfinite[static_cast<int>(tensor.dtype)];
  const ScanChunk scan = kernels.scan_chunk[static_cast<int>(tensor.dtype)];
  const ElementReader reader(tensor);
  char* buffer = reader.is_contiguous() ? nullptr : this_thread_workspace().gather_buffer(0);
  Content content = Content::finite;
  ChunkStats stats;
  for (std::int64_t first = 0; first < tensor.numel;) {
    const std::int64_t count = std::min(chunk_elements(tensor.dtype), tensor.numel - first);
    const char* elements = reader.read(first, count, buffer);
    if (is_bad(elements, static_cast<std::size_t>(count))) {
      scan(elements, static_cast<std::size_t>(count), stats);
      if (stats.nan > 0) return Content::nan;
      content = Content::inf;
    }
    first += count;
  }
  return content;
}

void scan_cpu(std::span<const TensorView> tensors, std::span<TensorStats> results, int threads) {
  scan_cpu_with(active_kernels(), tensors, results, threads);
}

void scan_cpu_with(const CpuKernels& kernels, std::span<const TensorView> tensors,
                   std::span<TensorStats> results, int threads) {
  if (tensors.size() != results.size()) {
    throw UsageError("scan_cpu: " + std::to_string(tensors.size()) + " tensors, but room for " +
                     std::to_string(results.size()) + " results; give one result per tensor");
  }
  if (threads < 1) {
    throw UsageError("scan_cpu: threads is " + std::to_string(threads) +
                     "; the calling thread is one of them, so give 1 or more");
  }
  std::size_t bytes = 0;
  for (const TensorView& view : tensors) {
    check_view(view);
    bytes += static_cast<std::size_t>(view.numel) * size_of(view.dtype);
  }
  const DefaultFloatingPoint environment;
  if (threads > 1 && bytes >= kBytesWorthThreads) {
    scan_together(tensors, results, threads, kernels);
    return;
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) results[i] = scan_alone(tensors[i], kernels);
}

}  // namespace nanlocator::inline scan_room
