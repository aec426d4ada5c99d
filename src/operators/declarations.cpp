#include "operators/declarations.hpp"

#include <algorithm>
#include <utility>

namespace nanlocator::inline operators_room {

void Declarations::declare(const at::Tensor& tensor, DeclaredAs as, std::string name) {
  Declared declared{.tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                        tensor.getIntrusivePtr()),
                    .storage = tensor.storage().getWeakStorageImpl(),
                    .range = range_of(tensor),
                    .as = as,
                    .name = std::move(name),
                    .module = {}};
  if (as == DeclaredAs::parameter || as == DeclaredAs::buffer) {
    const auto dot = declared.name.rfind('.');
    if (dot != std::string::npos) declared.module = declared.name.substr(0, dot);
  }
  declared_.push_back(std::move(declared));
  index(declared_.size() - 1);
}

void Declarations::note_writer(const at::Tensor& parameter,
                               const std::shared_ptr<const Place>& writer) {
  for (Declared& each : declared_) {
    const bool is_it = each.as == DeclaredAs::parameter &&
                       each.tensor._unsafe_get_target() == parameter.unsafeGetTensorImpl();
    if (is_it) each.writer = writer;
  }
}

void Declarations::index(std::size_t position) {
  const at::Tensor tensor = tensor_of(declared_[position]);
  const at::Tensor values = tensor.defined() ? values_of(tensor) : at::Tensor();
  if (!values.defined()) return;
  declared_[position].storage = values.storage().getWeakStorageImpl();
  declared_[position].range = range_of(values);
  by_storage_.emplace(values.storage().unsafeGetStorageImpl(), position);
}

void Declarations::refresh() {
  by_storage_.clear();
  for (std::size_t i = 0; i < declared_.size(); ++i) index(i);
}

template <typename Use>
void Declarations::for_each_sharing(const at::Tensor& tensor, const Use& use) const {
  if (by_storage_.empty()) return;
  const auto [begin, end] = by_storage_.equal_range(tensor.storage().unsafeGetStorageImpl());
  if (begin == end) return;
  const ByteRange range = range_of(tensor);
  for (auto at = begin; at != end; ++at) {
    const Declared& declared = declared_[at->second];
    if (declared.range.overlaps(range)) use(declared);
  }
}

const Declarations::Declared* Declarations::find(const at::Tensor& tensor) const {
  const Declared* first = nullptr;  // tied weights have several names
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as == DeclaredAs::gradient) return;
    if (first == nullptr || &declared < first) first = &declared;
  });
  return first;
}

std::vector<const Declarations::Declared*> Declarations::find_all(const at::Tensor& tensor) const {
  std::vector<const Declared*> all;
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::gradient) all.push_back(&declared);
  });
  std::ranges::sort(all);  // pointers into one vector
  return all;
}

std::vector<NamedTensor> Declarations::gradients_in(const at::Tensor& tensor) const {
  std::vector<NamedTensor> gradients;
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::gradient) return;
    at::Tensor gradient = tensor_of(declared);
    if (gradient.defined()) gradients.push_back({declared.name, std::move(gradient)});
  });
  return gradients;
}

bool Declarations::has_gradient_in(const at::Tensor& tensor) const {
  const ByteRange range = range_of(tensor);
  return std::ranges::any_of(declared_, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::parameter && declared.as != DeclaredAs::gradient) return false;
    const at::Tensor each = tensor_of(declared);
    if (!each.defined()) return false;
    const at::Tensor gradient = declared.as == DeclaredAs::gradient ? each
                                : each.is_leaf()                    ? each.grad()
                                                                    : at::Tensor();
    const at::Tensor values = gradient.defined() ? values_of(gradient) : at::Tensor();
    return values.defined() && values.is_alias_of(tensor) && range_of(values).overlaps(range);
  });
}

std::vector<NamedTensor> Declarations::parameters_of(const std::string& module,
                                                     std::size_t most) const {
  std::vector<NamedTensor> parameters;
  for (const Declared& declared : declared_) {
    if (declared.as != DeclaredAs::parameter || declared.module != module) continue;
    const at::Tensor tensor = tensor_of(declared);
    if (tensor.defined() && parameters.size() < most) parameters.push_back({declared.name, tensor});
  }
  return parameters;
}

at::Tensor Declarations::tensor_of(const Declared& declared) {
  if (declared.tensor.expired()) return {};
  auto strong = declared.tensor.lock();
  if (!strong) return {};
  return at::Tensor(std::move(strong));
}

}  // namespace nanlocator::inline operators_room
