// Kernels on the host: what a GPU does with blocks, warps, barriers, fences and atomics, so that a
// .cu file runs under the address and the thread sanitizer without a GPU.
//
// A block runs on one thread of the host, several blocks at once. Its CUDA threads are stacks that
// this thread switches between where one waits, in an order that differs from block to block. The
// thread sanitizer takes each for a thread of its own and is told only of the order that CUDA
// gives: the start and end of a launch, __syncthreads, __threadfence (PTX: fence.sc, ordered with
// all fences before it). A shuffle passes its values and orders nothing else; atomics are relaxed.
// So a race is found by what orders two accesses, not by luck; luck is left only in which block
// comes last.
//
// Not emulated: caches, weaker scopes of atomics, warps in lock step, anything about speed.
// Threads that would wait for ever end the process with a message.
//
// x86-64 only, for the switch between stacks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};

struct EmulatedStream;

namespace cuda_emulation {

inline constexpr unsigned int kMultiprocessors = 2;
inline constexpr unsigned int kBlocksPerMultiprocessor = 2;

/// Of the CUDA thread that runs; __syncthreads and __threadfence are named by the line they are in.
extern constinit thread_local dim3 thread_index, block_index, block_size, grid_size;
void wait_for_block(int line);
void fence(int line);
std::uint32_t shuffle_down(std::uint32_t mask, std::uint32_t value, unsigned int lanes);
/// Before an atomic: now and then, lets another block come to its next fence first.
void hesitate();

/// Runs `grid` blocks of `threads` threads that call `kernel`, and waits for them.
void run(std::function<void()> kernel, unsigned int grid, unsigned int threads);
/// The same as the stream's next work, without waiting.
void launch(std::function<void()> kernel, unsigned int grid, unsigned int threads,
            EmulatedStream* stream);

// For the tests that show that nothing in a kernel is there in vain.

/// The lines at which a barrier or a fence has been executed so far.
[[nodiscard]] std::vector<int> ordering_lines();
/// From now on the barrier or fence in this line does nothing.
void leave_out(int line);

}  // namespace cuda_emulation
