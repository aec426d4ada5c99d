#include <algorithm>

#include "nanlocator/replay/capture.hpp"
#include "operators/call_values.hpp"
#include "recorder/step_recorder_impl.hpp"
#include "tensor/own_work.hpp"

namespace nanlocator::inline recorder_room {

/// The last argument with tensors of a c10d operator is what it sends, and the first one what it
/// writes (torch/csrc/distributed/c10d/Ops.cpp). Its schema marks none.
static std::size_t sent_argument_of(const StepRecorder::Impl::Context& context) {
  if (context.arguments.size() < 2) return 0;
  return context.arguments[1].isTensor() || context.arguments[1].isList() ? 1 : 0;
}

void StepRecorder::Impl::start_exchange(Context& context) {
  if (sent_argument_of(context) != 0 || context.arguments.empty()) return;
  for_each_tensor_within(context.arguments.front(), [&](const at::Tensor& tensor) {
    const bool is_of_event = find(tensor) != nullptr || tensor.requires_grad();
    if (!is_of_event && may_copy_for_an_operator(tensor)) context.sent.push_back(steady(tensor));
  });
}

/// A replay does not communicate: it looks at what was sent, and takes what came the first time.
void StepRecorder::Impl::finish_exchange(const at::RecordFunction& call, Context& context) {
  const OperatorInfo& info = *context.info;
  std::vector<at::Tensor> written;
  if (!context.arguments.empty()) {
    for_each_tensor_within(context.arguments.front(),
                           [&](const at::Tensor& tensor) { written.push_back(tensor); });
  }
  const bool is_in_gradients = std::ranges::any_of(
      written, [&](const at::Tensor& tensor) { return parameters.have_in_gradients(tensor); });
  has_reduced_gradients = has_reduced_gradients || is_in_gradients;
  const bool is_of_weights = std::ranges::any_of(written, &at::Tensor::requires_grad);
  if (written.empty() || is_in_gradients || is_of_weights) return;
  auto event = new_event();
  auto& data = event->data();
  data.info = &info;
  data.handle = call_facts(*call.operator_name()).handle;
  data.caller = caller_now();
  for (const auto& argument : context.arguments) {
    data.arguments.push_back(argument.isTensor() || argument.isList() ? c10::IValue() : argument);
  }
  data.sent_argument = sent_argument_of(context);
  if (info.collective != CollectiveKind::receive) {
    for_each_tensor_within(context.arguments[data.sent_argument], [&](const at::Tensor& tensor) {
      const auto* const found = find(tensor);
      if (found != nullptr) {
        data.tensors.emplace_back().value = name_of(*found, tensor);
        depend_on(data, *data.tensors.back().value, tensor);
      } else if (data.sent_argument > 0 && may_copy_for_an_operator(tensor)) {
        data.tensors.emplace_back().kept = steady(tensor);
      }
    });
    for (at::Tensor& tensor : context.sent) data.tensors.emplace_back().kept = std::move(tensor);
    data.differentiated.clear();
  }
  const auto behind = reached_from({event}, &RecordedEvent::Data::needs);
  const bool sends_gradients = std::ranges::any_of(behind, [](const auto& each) {
    return std::ranges::any_of(each->data().tensors, [](const RecordedInput& input) {
      return input.gradient_of.defined();
    });
  });
  has_reduced_gradients = has_reduced_gradients || sends_gradients;
  if (sends_gradients) {  // the replay has no result of it, which is no data all the same
    std::erase_if(written, [&](const at::Tensor& tensor) { return find(tensor) != nullptr; });
    return note_unrepeated(context, written);
  }
  note_unrepeated(context, written);
  for (const at::Tensor& tensor : written) {
    if (!has_memory(tensor)) continue;
    const auto* const found = find(tensor);
    RecordedResult result;
    if (OwnMemory* own = memory_of(tensor); own != nullptr && found != nullptr) {
      result.value = name_of(*found, tensor);
      depend_on(data, *result.value, tensor);
      own->writers.push_back(event);
      own->version = version_of(tensor);
    } else {
      memory.erase(tensor.storage().unsafeGetStorageImpl());
      made(event, tensor, static_cast<int>(data.results.size()), true);
    }
    arriving.emplace(tensor.storage().unsafeGetStorageImpl(),
                     Arriving{Region::of(tensor), event, data.results.size()});
    data.results.push_back(std::move(result));
  }
  if (!data.results.empty()) exchanges.push_back(std::move(event));
}

void StepRecorder::Impl::take_arrived(const at::Tensor& tensor) {
  if (arriving.empty() || !tensor.defined() || !tensor.has_storage()) return;
  const auto [begin, end] = arriving.equal_range(tensor.storage().unsafeGetStorageImpl());
  if (begin == end) return;
  for (auto at = begin; at != end; ++at) {
    const Arriving& each = at->second;
    auto& result = std::const_pointer_cast<RecordedEvent>(each.event)->data().results[each.index];
    keep(result.content, each.region.of(tensor.storage()));
  }
  arriving.erase(begin, end);
  // Gloo has copied them in when the program waited.
  if (OwnMemory* own = memory_of(tensor)) own->version = version_of(tensor);
}

}  // namespace nanlocator::inline recorder_room
