// Differences between versions of Torch for the room `netcheck` (src/tensor/torch_versions.hpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tensor/torch_versions.hpp"

namespace nanlocator::netcheck {

/// For a device other than the CPU. Throws UnsupportedError with a Torch older than 2.11 for other
/// devices than CUDA's, or in a build without CUDA.
[[nodiscard]] std::uint64_t free_device_bytes(at::Device device);
/// Returns the unused memory of Torch's allocator to the device; does nothing if
/// `free_device_bytes` throws.
void empty_device_cache(at::Device device);

/// One tensor holds all members' inputs or outputs, one after the other. Named *_single from 2.13
/// on.
using GroupWork = c10::intrusive_ptr<c10d::Work>;
[[nodiscard]] GroupWork all_gather_single(c10d::ProcessGroup& group, at::Tensor& output,
                                          at::Tensor& input);
[[nodiscard]] GroupWork reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& output,
                                              at::Tensor& input);
/// Every member gets an equal share from each other member.
[[nodiscard]] GroupWork all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output,
                                          at::Tensor& input);

}  // namespace nanlocator::netcheck
