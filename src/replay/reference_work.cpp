#include "replay/reference_work.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>

#include "replay/values.hpp"

namespace nanlocator::inline replay_room {
namespace {

/// Assumed for a reference that cannot be counted: its arguments, a gradient of each, and
/// intermediates.
constexpr double kUnknownCopies = 6;

/// Counts the operators of this thread while it lives.
class Counted {
 public:
  explicit Counted(const std::vector<at::Tensor>& arguments) {
    for (const auto& tensor : arguments) add(tensor);
    counting_ = this;
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  ~Counted() {
    at::removeCallback(callback_);
    counting_ = nullptr;
  }
  Counted(const Counted&) = delete;  // one callback
  Counted& operator=(const Counted&) = delete;

  [[nodiscard]] const Work& work() const { return work_; }

 private:
  struct Operator : at::ObserverContext {
    OperatorCall call;
  };

  static std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name) return nullptr;  // a node of backward
    if (counting_->depth_++ > 0) return nullptr;
    auto context = std::make_unique<Operator>();
    context->call.name = *name;
    context->call.arguments.assign(function.inputs().begin(), function.inputs().end());
    return context;
  }

  static void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (!function.operator_name()) return;
    --counting_->depth_;
    for (const auto& tensor : tensors_of(function.outputs())) counting_->add(tensor);
    counting_->forget_freed();
    if (context == nullptr) return;
    auto& call = static_cast<Operator*>(context)->call;
    call.outputs = function.outputs();
    counting_->work_.flops += work_of(call).flops;
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.is_meta() || !tensor.has_storage()) return;
    const auto storage = tensor.storage().getWeakStorageImpl();
    if (!alive_.emplace(tensor.storage().unsafeGetStorageImpl(), storage).second) return;
    bytes_ += static_cast<double>(tensor.storage().nbytes());
    work_.bytes = std::max(work_.bytes, bytes_);
  }

  void forget_freed() {
    bytes_ = 0;
    std::erase_if(alive_, [&](const auto& each) {
      const auto storage = each.second.lock();
      if (storage) bytes_ += static_cast<double>(storage->nbytes());
      return !storage;
    });
  }

  inline static thread_local Counted* counting_ = nullptr;

  at::CallbackHandle callback_{};
  int depth_ = 0;
  double bytes_ = 0;  // live allocations; an address is unique while its entry exists
  std::map<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>> alive_;
  Work work_;
};

}  // namespace

Work work_of_reference(const KernelReference& reference, const std::vector<at::Tensor>& arguments) {
  std::vector<at::Tensor> without_memory = arguments;
  Work unknown;
  for (auto& tensor : without_memory) {
    if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
    tensor = at::empty_strided(tensor.sizes(), tensor.strides(),
                               at::TensorOptions().device(at::kMeta).dtype(
                                   tensor.is_complex() ? at::kComplexDouble : at::kDouble));
    unknown.bytes += kUnknownCopies * static_cast<double>(tensor.nbytes());
  }
  try {
    const at::RecordFunctionGuard observers{true};
    const Counted counted(without_memory);
    (void)reference.values(without_memory);
    return counted.work();
  } catch (const std::exception&) {
    return unknown;
  }
}

}  // namespace nanlocator::inline replay_room
