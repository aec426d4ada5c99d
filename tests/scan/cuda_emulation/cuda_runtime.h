// What nvcc gives to a kernel, for the host compiler. Stands in for NVIDIA's header of this name:
// names and meanings are those of the CUDA C++ Programming Guide. See cuda_emulation.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_emulation.hpp"
#include "cuda_runtime_api.h"

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local  // a block runs on one thread of the host

#define threadIdx ::cuda_emulation::thread_index
#define blockIdx ::cuda_emulation::block_index
#define blockDim ::cuda_emulation::block_size
#define gridDim ::cuda_emulation::grid_size
#define __syncthreads() ::cuda_emulation::wait_for_block(__LINE__)
#define __threadfence() ::cuda_emulation::fence(__LINE__)

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

inline std::uint32_t __shfl_down_sync(unsigned int mask, std::uint32_t value, unsigned int lanes) {
  return cuda_emulation::shuffle_down(mask, value, lanes);
}

// Atomics order nothing but themselves.
inline unsigned int atomicInc(unsigned int* address, unsigned int last) {
  cuda_emulation::hesitate();
  const std::atomic_ref<unsigned int> value(*address);
  unsigned int old = value.load(std::memory_order_relaxed);
  while (!value.compare_exchange_weak(old, old >= last ? 0 : old + 1, std::memory_order_relaxed)) {
  }
  return old;
}
inline unsigned int atomicAdd(unsigned int* address, unsigned int summand) {
  cuda_emulation::hesitate();
  return std::atomic_ref(*address).fetch_add(summand, std::memory_order_relaxed);
}
inline int atomicExch(int* address, int value) {
  return std::atomic_ref(*address).exchange(value, std::memory_order_relaxed);
}

// Loads that differ only in the caches that they go through.
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}

inline int __popc(unsigned int bits) {
  return __builtin_popcount(bits);
}

// Two 16-bit lanes in a word.
namespace cuda_emulation {
template <class Lane, class Choose>
unsigned int for_both_lanes(unsigned int a, unsigned int b, Choose choose) {
  const auto chosen = [&](int shift) {
    const Lane lane = choose(static_cast<Lane>(a >> shift), static_cast<Lane>(b >> shift));
    return static_cast<unsigned int>(static_cast<std::uint16_t>(lane)) << shift;
  };
  return chosen(0) | chosen(16);
}
}  // namespace cuda_emulation
inline unsigned int __vmaxu2(unsigned int a, unsigned int b) {
  return cuda_emulation::for_both_lanes<std::uint16_t>(
      a, b, [](auto x, auto y) { return x < y ? y : x; });
}
inline unsigned int __vmaxs2(unsigned int a, unsigned int b) {
  return cuda_emulation::for_both_lanes<std::int16_t>(a, b,
                                                      [](auto x, auto y) { return x < y ? y : x; });
}
inline unsigned int __vminu2(unsigned int a, unsigned int b) {
  return cuda_emulation::for_both_lanes<std::uint16_t>(
      a, b, [](auto x, auto y) { return y < x ? y : x; });
}

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             std::size_t, cudaStream_t stream) {
  const auto copies = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return std::tuple<Parameters...>(*static_cast<Parameters*>(arguments[i])...);
  }
  (std::index_sequence_for<Parameters...>{});
  cuda_emulation::launch([kernel, copies] { std::apply(kernel, copies); }, grid.x, block.x, stream);
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, std::size_t) {
  *blocks = cuda_emulation::kBlocksPerMultiprocessor;
  return cudaSuccess;
}
