// The tensors that the caller has declared by name: parameters, buffers, gradients, data.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanlocator/operators/operator_trace.hpp"
#include "operators/place.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

/// The caller's declarations. They live as long as the trace, `Lineage` as long as a pass.
class Declarations {
 public:
  struct Declared {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    ByteRange range;
    DeclaredAs as;
    std::string name;
    std::string module;  // of a parameter or buffer: its name without the last part
    std::shared_ptr<const Place> writer{};  // of a parameter: the program's own, after the update
  };

  void declare(const at::Tensor& tensor, DeclaredAs as, std::string name);
  /// For the very parameter, not for one that shares its memory.
  void note_writer(const at::Tensor& parameter, const std::shared_ptr<const Place>& writer);
  /// Looks the storages up again: `parameter.data = ...` may have changed them.
  void refresh();
  /// The first declared tensor that shares memory with `tensor`, gradients excluded; null if none.
  [[nodiscard]] const Declared* find(const at::Tensor& tensor) const;
  /// All of them, in order of declaration: a flat buffer holds many parameters.
  [[nodiscard]] std::vector<const Declared*> find_all(const at::Tensor& tensor) const;
  /// The live gradients that share memory with `tensor`, named after their parameters.
  [[nodiscard]] std::vector<NamedTensor> gradients_in(const at::Tensor& tensor) const;
  /// True if a parameter's gradient, as autograd keeps it or as it was declared, shares memory with
  /// `tensor`.
  [[nodiscard]] bool has_gradient_in(const at::Tensor& tensor) const;
  /// The first `most` live parameters of this module itself, in order of declaration.
  [[nodiscard]] std::vector<NamedTensor> parameters_of(const std::string& module,
                                                       std::size_t most) const;
  /// The live tensor; undefined if it is gone.
  [[nodiscard]] static at::Tensor tensor_of(const Declared& declared);
  [[nodiscard]] bool empty() const noexcept { return declared_.empty(); }

 private:
  void index(std::size_t position);
  template <typename Use>
  void for_each_sharing(const at::Tensor& tensor, const Use& use) const;

  std::vector<Declared> declared_;
  std::unordered_multimap<const c10::StorageImpl*, std::size_t> by_storage_;
};

}  // namespace nanlocator::inline operators_room
