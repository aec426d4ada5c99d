// The tensors in an operator's arguments: single, in lists, optional.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <vector>

namespace nanlocator::inline replay_room {

/// A strided tensor with ordinary memory, which can be copied byte for byte. Others are sparse,
/// quantised, nested, meta, functional, or computed by a Python subclass.
[[nodiscard]] bool has_plain_memory(const at::Tensor& tensor);
/// Why it has none: "its layout is Sparse"; "" if it has.
[[nodiscard]] std::string why_not_plain(const at::Tensor& tensor);

/// Calls `visit` for every defined tensor in `value`, in order.
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// `value` with every defined tensor replaced by `replace`'s, lists by new lists.
[[nodiscard]] c10::IValue map_tensors(const c10::IValue& value,
                                      const std::function<at::Tensor(const at::Tensor&)>& replace);

/// The type without its Optional.
[[nodiscard]] c10::TypePtr without_optional(const c10::TypePtr& type);

/// The dispatcher passes a dtype as a plain integer; `real_type` still knows.
[[nodiscard]] bool is_dtype(const c10::Argument& argument);

/// Every defined tensor of `values`, in order.
[[nodiscard]] std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values);

}  // namespace nanlocator::inline replay_room
