#include "nanlocator/recorder/refused_inputs.hpp"

#include <exception>
#include <memory>
#include <utility>

#include "operators/call_values.hpp"
#include "operators/operator_info.hpp"

namespace nanlocator::inline recorder_room {

struct RefusedInputs::Call final : at::ObserverContext {
  std::vector<at::Tensor> given;
  int errors = 0;  // that were on their way when it began
};

namespace {

thread_local RefusedInputs* innermost = nullptr;
/// The innermost operator ends first; those around it end by the same error.
thread_local bool is_unwinding = false;

std::unique_ptr<at::ObserverContext> keep_inputs(const at::RecordFunction& call) {
  is_unwinding = false;
  const OperatorInfo* const info = operator_info(call);
  if (info == nullptr) return nullptr;
  auto begun = std::make_unique<RefusedInputs::Call>();
  begun->errors = std::uncaught_exceptions();
  for (const auto& input : last_values(call.inputs(), info->arguments.size())) {
    for_each_tensor_at(input, [&](const at::Tensor& tensor, int) {
      const bool has_values =
          tensor.defined() && (at::isFloatingType(tensor.scalar_type()) || tensor.is_complex());
      if (has_values) begun->given.push_back(tensor);
    });
  }
  return begun;
}

}  // namespace

RefusedInputs::RefusedInputs() : outer_(std::exchange(innermost, this)) {
  const auto when_ended = [](const at::RecordFunction&, at::ObserverContext* context) {
    auto* const begun = static_cast<Call*>(context);
    if (begun == nullptr || innermost == nullptr) return;
    if (std::uncaught_exceptions() <= begun->errors || begun->given.empty()) return;
    if (!std::exchange(is_unwinding, true)) innermost->tensors_ = std::move(begun->given);
  };
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&keep_inputs, when_ended)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

RefusedInputs::~RefusedInputs() {
  at::removeCallback(callback_);
  innermost = outer_;
}

}  // namespace nanlocator::inline recorder_room
