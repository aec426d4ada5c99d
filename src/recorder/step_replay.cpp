// Executes the events of a recorded step again.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "nanlocator/error.hpp"
#include "nanlocator/operators/earlier_write.hpp"
#include "nanlocator/operators/gradient_work.hpp"
#include "nanlocator/replay/capture.hpp"
#include "operators/call_values.hpp"
#include "recorder/recorded_caller.hpp"
#include "recorder/recorded_event.hpp"
#include "tensor/own_work.hpp"
#include "tensor/steady_copy.hpp"

namespace nanlocator::inline recorder_room {
namespace {

class ScopedAutocast {
 public:
  explicit ScopedAutocast(const Autocast& autocast) : before_(Autocast::now()) { autocast.set(); }
  ~ScopedAutocast() { before_.set(); }
  ScopedAutocast(const ScopedAutocast&) = delete;  // strictly nested
  ScopedAutocast& operator=(const ScopedAutocast&) = delete;

 private:
  Autocast before_;
};

void set_generator_states(const GeneratorStates& states) {
  for (auto [generator, state] : states) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

/// Other code may have written `content` to the first pass's `tensor`.
void write_again(const at::Tensor& tensor, const at::Tensor& content) {
  const OwnWork own_work;
  if (have_same_bits(tensor, content)) return;
  tensor.detach().copy_(content);
  note_copy(content, tensor);
}

}  // namespace

struct StepReplay::Impl {
  using Key = std::pair<const RecordedEvent*, int>;
  RecordedEvents events;
  std::map<Key, at::Tensor> values;
  mutable std::map<std::pair<Key, bool>, at::Tensor> aliases;  // and whether it is a leaf
  std::map<Key, std::uint64_t> last_read;                      // the number of the event

  [[nodiscard]] at::Tensor get(const RecordedValue& value) const {
    const auto found = values.find({value.event.get(), value.index});
    if (found == values.end()) {
      throw Error("a tensor that this step computes was not computed when it was executed again");
    }
    if (value.content.defined()) write_again(found->second, value.content);
    at::Tensor tensor = found->second;
    if (value.is_detached) {  // of the same memory, so one stands for several
      auto& alias = aliases[{found->first, value.became_leaf}];
      if (!alias.defined() || !alias.is_alias_of(tensor)) alias = tensor.variable_data();
      tensor = alias;
    }
    if (value.became_leaf && !tensor.requires_grad()) tensor.requires_grad_();
    return tensor;
  }

  void set(const RecordedEvent& event, int index, const at::Tensor& tensor) {
    if (last_read.contains({&event, index})) values[{&event, index}] = tensor;
  }

  void exchange(const RecordedEvent& collective);

  /// Uses the tensors of the first execution, for an operator whose inputs are gone.
  bool take_first_outputs(const RecordedEvent& operation) {
    const auto& data = operation.data();
    if (data.is_indispensable) return false;
    const auto found = first_outputs(data);
    if (!found) return false;
    for (const auto& [index, tensor] : *found) set(operation, index, tensor);
    return true;
  }
};

StepReplay::StepReplay(RecordedEvents events) : impl_(std::make_unique<Impl>()) {
  impl_->events = std::move(events);
  for (const auto& event : impl_->events) {
    for (const RecordedValue& value : event->data().inputs) {
      impl_->last_read[{value.event.get(), value.index}] = event->data().number;
    }
  }
}

StepReplay::~StepReplay() = default;

const RecordedEvents& StepReplay::events() const noexcept {
  return impl_->events;
}

at::Tensor StepReplay::tensor(const RecordedValue& value) const {
  return impl_->get(value);
}

void StepReplay::run(const RecordedEvent& call, const std::function<void()>& work) {
  const RecordedCaller caller(call.data().caller);
  work();
}

void StepReplay::set_outputs(const RecordedEvent& call, std::span<const at::Tensor> outputs) {
  int index = 0;
  for (const auto& tensor : outputs) {
    const int position = index++;
    if (tensor.defined()) impl_->set(call, position, tensor);
  }
}

/// Shows observers the collective as if it ran, and puts in what it brought the first time.
void StepReplay::Impl::exchange(const RecordedEvent& collective) {
  const auto& data = collective.data();
  c10::List<at::Tensor> sent, results;
  for (const auto& input : data.tensors) {
    at::Tensor tensor = input.value ? get(*input.value) : input.kept;
    if (tensor.defined()) sent.push_back(std::move(tensor));
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals;  // to, from
  int index = 0;
  for (const auto& result : data.results) {
    const int position = index++;
    const at::Tensor& content = result.content.kept;
    if (result.content.is_overwritten()) {
      throw Error("what " + data.handle->schema().name() +
                  " brought was overwritten later in the step");
    }
    at::Tensor to = result.value ? get(*result.value) : at::Tensor();
    if (!to.defined() && content.defined()) to = steady_copy(content);
    if (!to.defined()) continue;
    if (!result.value) set(collective, position, to);
    results.push_back(to);
    if (content.defined()) arrivals.emplace_back(to, content);
  }
  auto arguments = data.arguments;
  arguments[0] = results;
  arguments[data.sent_argument] = sent;
  const RecordedCaller caller(data.caller);
  const RepeatedExchange repeated;
  at::RecordFunction observed(at::RecordScope::FUNCTION);
  if (observed.isActive()) {
    observed.before(std::cref(data.handle->schema()),
                    c10::ArrayRef<const c10::IValue>(arguments.data(), arguments.size()));
  }
  {
    const OwnWork own_work;
    for (auto& [to, from] : arrivals) to.copy_(from);
  }
  if (observed.isActive()) observed.setOutputs(std::vector<c10::IValue>{results});
}

void StepReplay::execute(const RecordedEvent& operation) {
  const auto& data = operation.data();
  if (!data.results.empty()) return impl_->exchange(operation);
  auto arguments = data.arguments;
  for (auto& argument : arguments) {
    if (argument.isList()) argument = argument.toList().copy();  // filled below
  }
  for (const auto& input : data.tensors) {
    at::Tensor tensor = input.is_begun ? steady_copy(input.kept) : input.kept;
    if (input.is_begun) note_copy(input.kept, tensor);
    if (input.value) tensor = impl_->get(*input.value);
    if (input.gradient_of.defined()) {
      tensor = input.gradient_of.grad();
      if (input.view && tensor.defined()) tensor = input.view->of(tensor);
    }
    if (input.is_overwritten()) {
      if (impl_->take_first_outputs(operation)) return;
      throw Error("what " + data.handle->schema().name() +
                  " has read was overwritten later in the step");
    }
    auto& argument = arguments[input.argument];
    if (input.element < 0) {
      argument = tensor;
    } else {
      argument.toList().set(static_cast<std::size_t>(input.element), tensor);
    }
  }
  const at::AutoGradMode grad_mode(data.grad_mode);
  const ScopedAutocast autocast(data.autocast);
  const RecordedCaller caller(data.caller);
  std::optional<ModuleScope> module;
  if (data.module != nullptr) module.emplace(*data.module);
  const GradientWork gradient_work(data.is_on_gradients);
  set_generator_states(data.generators);
  auto stack = std::move(arguments);
  data.handle->callBoxed(stack);
  int index = 0;
  for (const auto& value : stack) {
    if (value.isCustomClass() && data.handle->schema().name().starts_with("c10d::")) {
      value.toCustomClass<c10d::Work>()->wait();
    }
    for_each_tensor_at(
        value, [&](const at::Tensor& tensor, int) { impl_->set(operation, index++, tensor); });
  }
}

void StepReplay::leave(const RecordedEvent& event) {
  const auto number = event.data().number;
  for (const RecordedValue& value : event.data().inputs) {
    const Impl::Key key = {value.event.get(), value.index};
    if (impl_->last_read[key] <= number) impl_->values.erase(key);
  }
}

}  // namespace nanlocator::inline recorder_room
