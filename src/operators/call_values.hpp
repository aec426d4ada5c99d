// The values of an operator call, as at::RecordFunction shows them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>

namespace nanlocator::inline operators_room {

/// Calls `visit(tensor, element)` for the tensors of one value of a call.
template <class Visit>
void for_each_tensor_at(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), -1);
  } else if (value.isList()) {
    int element = 0;
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isTensor()) visit(each.toTensor(), element);
      ++element;
    }
  }
}

/// The same for lists of lists, too, as of c10d's operators; without the elements' indices.
template <class Visit>
void for_each_tensor_within(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) for_each_tensor_within(each, visit);
  }
}

/// True if a tensor among them has its values in another one: a DTensor, a collective's result that
/// is awaited. As it stands it can be neither copied nor computed with.
[[nodiscard]] inline bool has_subclass(c10::ArrayRef<c10::IValue> values) {
  bool has = false;
  for (const c10::IValue& value : values) {
    for_each_tensor_within(value, [&](const at::Tensor& tensor) {
      has = has || (tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python));
    });
  }
  return has;
}

/// callBoxed shows observers its whole stack; the call's own values are at the end.
[[nodiscard]] inline c10::ArrayRef<c10::IValue> last_values(c10::ArrayRef<c10::IValue> values,
                                                            std::size_t count) {
  return values.size() > count ? values.slice(values.size() - count) : values;
}

}  // namespace nanlocator::inline operators_room
