// How the bad elements lie in a tensor, and how many elements are below zero: what a birth reports
// beyond its stats. Slice by slice, so that nothing is allocated in proportion to the tensor; work
// of our own, on the caller's thread, which waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline tensor_room {

/// Of an observable tensor with `bad` bad elements; a complex one has a last dimension of 2. Empty
/// where nothing is bad, and of tensors so large that it would take seconds.
[[nodiscard]] std::optional<BadExtent> extent_of(const at::Tensor& observable, std::int64_t bad);

/// Elements below zero; empty of complex and of very large tensors.
[[nodiscard]] std::optional<std::int64_t> count_negatives(const at::Tensor& observable);

}  // namespace nanlocator::inline tensor_room
