#include "replay/values.hpp"

#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/DispatchKey.h>

#include <sstream>

namespace nanlocator::inline replay_room {

std::string why_not_plain(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  if (keys.has(c10::DispatchKey::Python)) return "it is a tensor subclass that computes in Python";
  if (keys.has(c10::DispatchKey::FuncTorchBatched) ||
      keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
      keys.has(c10::DispatchKey::Functionalize)) {
    return "it is a wrapper of a function transform";
  }
  if (tensor.is_nested()) return "it is nested";
  if (tensor.layout() != at::kStrided) {
    std::ostringstream text;
    text << "its layout is " << tensor.layout();
    return text.str();
  }
  if (tensor.is_quantized()) return "it is quantised";
  if (tensor.is_meta()) return "it is on the meta device: it has no values";
  if (!tensor.has_storage()) return "it has no storage";
  return "";
}

bool has_plain_memory(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta() &&
         !tensor.is_quantized() && !tensor.is_nested() &&
         !keys.has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                  c10::DispatchKey::FuncTorchGradWrapper,
                                  c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor}));
}

void for_each_tensor(const c10::IValue& value,
                     const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) for_each_tensor(item, visit);
  }
}

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    for (const c10::IValue& item : value.toListRef()) copy.push_back(map_tensors(item, replace));
    return copy;
  }
  return value;
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  const auto optional = type->cast<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

bool is_dtype(const c10::Argument& argument) {
  return without_optional(argument.real_type())->kind() == c10::TypeKind::ScalarTypeType;
}

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

}  // namespace nanlocator::inline replay_room
