// Every barrier and fence of the CUDA kernels is needed: without it the thread sanitizer finds a
// race, or threads wait forever. If one were superfluous, or the emulation blind, this would fail.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "nanlocator/scan/slot_scanner.hpp"
#include "scan/cuda_chunk.hpp"
#include "scan/cuda_emulation/cuda_emulation.hpp"

extern "C" const char* __tsan_default_options() {
  return "halt_on_error=1";
}

namespace nanlocator::testing {
namespace {

TensorView view_of(const void* data, std::int64_t numel) {
  return {.data = data, .numel = numel, .dtype = DType::float8_e4m3fn, .sizes = {}, .strides = {}};
}

/// Scans tensors of NaN with one chunk for a block and with one for each block, with and without a
/// plan.
void scan_with_both_kernels() {
  const std::int64_t numel = 4 * cuda::kChunkElements;
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, numel), cudaSuccess);
  ASSERT_EQ(cudaMemset(memory, 0x7f, numel), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const TensorView large = view_of(memory, numel);
  const TensorView small = view_of(memory, 10);
  const auto scanner = make_cuda_slot_scanner(0, make_cuda_memory());
  const auto plan = scanner->plan({large, small, small, small, small, small, small}, 0);
  scanner->reserve(8);
  scanner->enqueue(*plan, {nullptr});
  scanner->enqueue_one(large, 7, {nullptr});
  scanner->enqueue_readback({nullptr});
  EXPECT_EQ(scanner->wait()[7].nan, numel);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
}

/// A tensor of more chunks than partials: one element, repeated.
void scan_more_chunks_than_partials() {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  TensorView view =
      view_of(memory, (std::int64_t{cuda::kSinglePartials} + 4) * cuda::kChunkElements);
  view.sizes = {view.numel};
  view.strides = {0};
  const auto scanner = make_cuda_slot_scanner(0, make_cuda_memory());
  scanner->reserve(1);
  scanner->enqueue_one(view, 0, {nullptr});
  scanner->enqueue_readback({nullptr});
  (void)scanner->wait();
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
}

TEST(CudaOrderDeathTest, EveryBarrierAndFenceIsNeeded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  scan_with_both_kernels();
  const std::vector<int> lines = cuda_emulation::ordering_lines();
  EXPECT_GE(lines.size(), 8u);
  for (const int line : lines) {
    SCOPED_TRACE("without line " + std::to_string(line) + " of cuda_kernels.cu");
    EXPECT_EXIT(
        {
          cuda_emulation::leave_out(line);
          // If a fence is missing, the race shows only in certain orders of the blocks.
          for (int repeat = 0; repeat < 200; ++repeat) {
            if (repeat == 10) scan_more_chunks_than_partials();
            scan_with_both_kernels();
          }
          std::exit(0);
        },
        [](int status) { return status != 0; }, "data race|others of its block wait");
  }
}

}  // namespace
}  // namespace nanlocator::testing
