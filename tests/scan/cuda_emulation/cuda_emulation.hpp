// Emulates on the host what a GPU does with blocks, warps, barriers, fences and atomics, so that a
// .cu file runs under the address and the thread sanitizer without a GPU.
//
// A block runs on one thread of the host, several blocks at once. Its CUDA threads are stacks; the
// host thread switches between them when one waits, in an order that differs from block to block.
// The thread sanitizer treats each as a thread of its own and learns only the order that CUDA
// gives: the start and end of a launch, __syncthreads, __threadfence (PTX: fence.sc, ordered with
// all fences before it). A shuffle passes its values and orders nothing else; atomics are relaxed.
// So races are found from the ordering of two accesses, not by luck; only which block comes last is
// luck.
//
// Not emulated: caches, weaker scopes of atomics, warps in lock step, anything about speed. Threads
// that would wait forever end the process with a message.
//
// x86-64 only, because it switches stacks.
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

/// Of the running CUDA thread; __syncthreads and __threadfence are identified by their line.
extern constinit thread_local dim3 thread_index, block_index, block_size, grid_size;
void wait_for_block(int line);
void fence(int line);
std::uint32_t shuffle_down(std::uint32_t mask, std::uint32_t value, unsigned int lanes);
/// Called before an atomic: now and then lets another block reach its next fence first.
void hesitate();

/// Runs `grid` blocks of `threads` threads that call `kernel`, and waits for them.
void run(std::function<void()> kernel, unsigned int grid, unsigned int threads);
/// The same as the stream's next work, without waiting.
void launch(std::function<void()> kernel, unsigned int grid, unsigned int threads,
            EmulatedStream* stream);

// For the tests that show that every barrier and fence of a kernel is needed.

/// The lines at which a barrier or a fence has been executed so far.
[[nodiscard]] std::vector<int> ordering_lines();
/// Disables the barrier or fence in this line from now on.
void leave_out(int line);

}  // namespace cuda_emulation
