#include "netcheck/torch_versions.hpp"

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

#include "nanlocator/error.hpp"

#if NANLOCATOR_TORCH_BEFORE(2, 11) && defined(NANLOCATOR_CUDA)
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#endif

namespace nanlocator::netcheck {

#if !NANLOCATOR_TORCH_BEFORE(2, 11)

std::uint64_t free_device_bytes(at::Device device) {
  return c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first;
}

void empty_device_cache(at::Device device) {
  c10::getDeviceAllocator(device.type())->emptyCache();
}

#elif defined(NANLOCATOR_CUDA)

std::uint64_t free_device_bytes(at::Device device) {
  const c10::cuda::OptionalCUDAGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    throw UnsupportedError("cudaMemGetInfo does not say how much memory of " + device.str() +
                           " is free");
  }
  return free;
}

void empty_device_cache(at::Device /*device*/) {
  c10::cuda::CUDACachingAllocator::emptyCache();
}

#else

std::uint64_t free_device_bytes(at::Device device) {
  throw UnsupportedError(
      "how much memory of " + device.str() +
      " is free is known only with Torch 2.11 or newer, or in a build with CUDA");
}

void empty_device_cache(at::Device /*device*/) {}

#endif

#if NANLOCATOR_TORCH_BEFORE(2, 13)

GroupWork all_gather_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group._allgather_base(output, input);
}

GroupWork reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group._reduce_scatter_base(output, input);
}

GroupWork all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  std::vector<std::int64_t> even;
  return group.alltoall_base(output, input, even, even);
}

#else

GroupWork all_gather_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group.all_gather_single(output, input);
}

GroupWork reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group.reduce_scatter_single(output, input);
}

GroupWork all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  std::vector<std::int64_t> even;
  return group.all_to_all_single(output, input, even, even);
}

#endif

}  // namespace nanlocator::netcheck
