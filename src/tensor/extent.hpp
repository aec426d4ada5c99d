// The positions of the bad elements in a tensor, and the number of elements below zero: what a
// birth reports beyond its stats. Works slice by slice, so that memory does not grow with the
// tensor; hidden from observers, on the caller's thread, which waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline tensor_room {

/// For an observable tensor with `bad` bad elements; a complex one has a last dimension of 2. Empty
/// if nothing is bad, or for tensors so large that it would take seconds.
[[nodiscard]] std::optional<BadExtent> extent_of(const at::Tensor& observable, std::int64_t bad);

/// Elements below zero; empty for complex and for very large tensors.
[[nodiscard]] std::optional<std::int64_t> count_negatives(const at::Tensor& observable);

}  // namespace nanlocator::inline tensor_room
