// Where versions of Torch differ for the room `netcheck` (src/tensor/torch_versions.hpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tensor/torch_versions.hpp"

namespace nanlocator::netcheck {

/// Of a device that is not the CPU. Throws UnsupportedError where this Torch, older than 2.11, is
/// asked for another device's than CUDA's, or by a build without CUDA.
[[nodiscard]] std::uint64_t free_device_bytes(at::Device device);
/// Gives what Torch's allocator keeps back to the device; does nothing where `free_device_bytes`
/// throws.
void empty_device_cache(at::Device device);

/// One tensor holds what all members bring or get, one behind the other: named *_single from 2.13
/// on.
using GroupWork = c10::intrusive_ptr<c10d::Work>;
[[nodiscard]] GroupWork all_gather_single(c10d::ProcessGroup& group, at::Tensor& output,
                                          at::Tensor& input);
[[nodiscard]] GroupWork reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& output,
                                              at::Tensor& input);
/// Every member gets the same share of each other.
[[nodiscard]] GroupWork all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output,
                                          at::Tensor& input);

}  // namespace nanlocator::netcheck
