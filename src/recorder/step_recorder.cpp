#include "nanlocator/recorder/step_recorder.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <unordered_set>

#include "nanlocator/error.hpp"
#include "operators/call_values.hpp"
#include "operators/operator_info.hpp"
#include "recorder/step_recorder_impl.hpp"

namespace nanlocator::inline recorder_room {
namespace {

thread_local StepRecorder::Impl* recorder_of_this_thread = nullptr;
thread_local int depth = 0;  // number of running frames that this thread's recorder has seen begin

/// True for an operator as a transform of torch.func sees it: what the transform calls on plain
/// tensors is recorded.
bool is_transformed(const at::RecordFunction& call, const OperatorInfo& info) {
  constexpr auto kFront = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.included_.has(kFront) && !keys.excluded_.has(kFront)) return true;
  constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper,
                                           c10::DispatchKey::Functionalize});
  bool is_wrapped = false;
  for (const c10::IValue& input : last_values(call.inputs(), info.arguments.size())) {
    for_each_tensor_at(input, [&](const at::Tensor& tensor, int) {
      is_wrapped = is_wrapped || (tensor.defined() && tensor.key_set().has_any(kWrappers));
    });
  }
  return is_wrapped;
}

/// Frames without a schema are ignored, except the program's functions, which are calls.
std::unique_ptr<at::ObserverContext> when_begun(const at::RecordFunction& call) {
  auto* const recorder = recorder_of_this_thread;
  try {
    const auto* info = operator_info(call);
    const bool is_outermost = recorder != nullptr && !recorder->is_abandoned && depth == 0;
    std::unique_ptr<at::ObserverContext> context;
    if (is_outermost && info != nullptr && is_transformed(call, *info)) {
      auto transformed = std::make_unique<StepRecorder::Impl::Context>();
      transformed->is_transformed = true;
      return transformed;
    }
    if (is_outermost && info != nullptr) context = recorder->start(call, *info);
    if (is_outermost && info == nullptr) context = recorder->start_function(call);
    if (info != nullptr || context != nullptr) ++depth;
    return context;
  } catch (...) {  // out of memory: its outputs get no name
    if (call.operator_name()) ++depth;
    return nullptr;
  }
}

void when_ended(const at::RecordFunction& call, at::ObserverContext* context) {
  if (context == nullptr && !call.operator_name()) return;
  auto* const begun = static_cast<StepRecorder::Impl::Context*>(context);
  if (begun != nullptr && begun->is_transformed) return;
  if (--depth > 0 || context == nullptr || recorder_of_this_thread == nullptr) return;
  if (begun->info == nullptr) return;
  if (std::uncaught_exceptions() > begun->uncaught)
    return recorder_of_this_thread->note_refused(*begun);
  try {
    recorder_of_this_thread->finish(call, *begun);
  } catch (const std::exception& error) {
    recorder_of_this_thread->standing_problem =
        std::string(call.name()) + " could not be recorded: " + first_line(error);
  }
}

/// Numpy or another library may have the memory, too: `Tensor.numpy` fixes its size, and what
/// `from_numpy` and `from_dlpack` make has no allocator to resize it with
/// (torch/csrc/utils/tensor_numpy.cpp, ATen/DLConvertor.cpp).
bool is_shared(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage.resizable()) return false;
  const auto* const allocator = storage.allocator();  // pinned memory has its own
  return allocator == nullptr || allocator == c10::GetCPUAllocator();
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// Frees the state of this thread's recorder if another thread has destroyed it.
void free_abandoned() {
  if (recorder_of_this_thread == nullptr || !recorder_of_this_thread->is_abandoned) return;
  const std::unique_ptr<StepRecorder::Impl> abandoned(
      std::exchange(recorder_of_this_thread, nullptr));
  if (abandoned->paused == 0) at::removeCallback(abandoned->callback);
}

}  // namespace

StepRecorder::Impl::Known* StepRecorder::Impl::find(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  if (!functions.empty() && !known.contains(tensor.unsafeGetTensorImpl())) find_maker(tensor);
  const auto found = known.find(tensor.unsafeGetTensorImpl());
  if (found == known.end()) return find_alias(tensor);
  if (found->second.storage == storage_of(tensor)) return &found->second;
  known.erase(found);  // the program has given it other memory: `.data = ...`
  return nullptr;
}

StepRecorder::Impl::Known* StepRecorder::Impl::find_alias(const at::Tensor& tensor) {
  if (tensor.requires_grad() || tensor.is_nested()) return nullptr;
  const OwnMemory* const own = memory_of(tensor);
  if (own == nullptr || !has_memory(tensor) || !(own->region == Region::of(tensor))) return nullptr;
  Known alias{.tensor = WeakTensor(tensor.getIntrusivePtr()),
              .storage = storage_of(tensor),
              .event = own->maker,
              .index = own->index,
              .is_detached = true};
  return &known.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(alias)).first->second;
}

void StepRecorder::Impl::find_maker(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.is_leaf()) return;
  const auto& node = tensor.grad_fn();
  const auto found = functions.find(node->sequence_nr());
  if (found == functions.end() || node->name() != found->second.node) return;
  made(found->second.event, tensor, static_cast<int>(tensor.output_nr()), true);
}

StepRecorder::Impl::OwnMemory* StepRecorder::Impl::memory_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = memory.find(tensor.storage().unsafeGetStorageImpl());
  if (found != memory.end()) return &found->second;
  return is_shared(tensor) ? memory_behind(tensor) : nullptr;
}

StepRecorder::Impl::OwnMemory* StepRecorder::Impl::memory_behind(const at::Tensor& tensor) {
  if (!has_seen_shared) {
    has_seen_shared = true;
    for (const auto& [_, own] : memory) note_address(own);
  }
  const auto* const at = static_cast<const std::byte*>(tensor.storage().data());
  auto behind = by_address.upper_bound(at);
  if (at == nullptr || behind == by_address.begin()) return nullptr;
  const auto& [begin, storage] = *--behind;
  const auto living = storage.lock();
  const bool is_there = living && living->data() == begin;  // it may have been resized
  const auto found = is_there ? memory.find(living.get()) : memory.end();
  return found == memory.end() || !std::less<>{}(at, begin + living->nbytes()) ? nullptr
                                                                               : &found->second;
}

void StepRecorder::Impl::note_address(const OwnMemory& own) {
  const auto living = own.storage.lock();
  if (!living || !(living->device().is_cpu() || living->device().is_cuda())) return;
  if (living->data() == nullptr) return;
  by_address.insert_or_assign(static_cast<const std::byte*>(living->data()), own.storage);
}

/// What the memory holds now, as `tensor` sees it; empty if it is what its maker has left there.
/// Kept once for as long as it does not change.
at::Tensor StepRecorder::Impl::content_of(OwnMemory& own, const at::Tensor& tensor) {
  const auto living = own.storage.lock();
  if (!living || !tensor.is_cpu() || steady_bytes(tensor.variable_data()) == 0) return {};
  const auto* const begin = static_cast<const std::byte*>(living->data());
  const auto bytes = living->nbytes();
  const bool is_alike = own.content.defined() &&
                        static_cast<std::size_t>(own.content.numel()) == bytes &&
                        std::memcmp(own.content.const_data_ptr(), begin, bytes) == 0;
  if (is_alike && own.is_content_made) return {};
  if (!is_alike) {
    if (kept_bytes + bytes > options.most_bytes) {
      standing_problem = too_much_for("memory that numpy has, too");
      return {};
    }
    keep_content(own, *living);
    own.is_content_made = false;
    unrepeated.note(own.content, {.op = "torch.Tensor.numpy", .caller = caller_now()});
  }
  const std::int64_t first = static_cast<const std::byte*>(tensor.const_data_ptr()) - begin;
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  if (first < 0 || first % item != 0) return {};
  const OwnWork own_work;
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(own.content.storage(), first / item, tensor.sizes(), tensor.strides());
}

void StepRecorder::Impl::keep_content(OwnMemory& own, const c10::StorageImpl& storage) {
  const OwnWork own_work;
  own.content = at::empty({static_cast<std::int64_t>(storage.nbytes())}, at::kByte);
  std::memcpy(own.content.mutable_data_ptr(), storage.data(), storage.nbytes());
  kept_bytes += storage.nbytes();
}

RecordedValue StepRecorder::Impl::name_of(const Known& known_value, const at::Tensor& tensor) {
  RecordedValue value{
      .event = known_value.event,
      .index = known_value.index,
      .became_leaf = !known_value.required_grad && tensor.is_leaf() && tensor.requires_grad(),
      .is_detached = known_value.is_detached};
  OwnMemory* const own = is_shared(tensor) ? memory_of(tensor) : nullptr;
  if (own != nullptr) value.content = content_of(*own, tensor);
  return value;
}

void StepRecorder::Impl::check_gradient(const Known& known_value, const at::Tensor& tensor) {
  if (known_value.required_grad || !tensor.requires_grad() || tensor.is_leaf()) return;
  const OwnMemory* const own = memory_of(tensor);
  if (own != nullptr && !own->writers.empty()) return;  // `total += loss`
  standing_problem =
      "a result of it got its gradient from no operator (a function of torch.jit.script?)";
}

std::shared_ptr<RecordedEvent> StepRecorder::Impl::new_event() {
  auto event = std::make_shared<RecordedEvent>();
  event->data().number = ++next_number;
  event->data().backwards_before = backwards;
  return event;
}

void StepRecorder::Impl::depend_on(RecordedEvent::Data& data, const RecordedValue& value,
                                   const at::Tensor& tensor) {
  data.inputs.push_back(value);
  const auto* found = find(tensor);
  if (found != nullptr && found->required_grad) data.differentiated.push_back(value.event);
  data.needs.push_back(value.event);
  if (const auto* own = memory_of(tensor)) {
    data.needs.insert(data.needs.end(), own->writers.begin(), own->writers.end());
  }
}

void StepRecorder::Impl::made(const std::shared_ptr<RecordedEvent>& event, const at::Tensor& tensor,
                              int index, bool may_be_written) {
  known.insert_or_assign(tensor.unsafeGetTensorImpl(),
                         Known{.tensor = WeakTensor(tensor.getIntrusivePtr()),
                               .storage = storage_of(tensor),
                               .event = event,
                               .index = index,
                               .required_grad = tensor.requires_grad()});
  if (!may_be_written || !tensor.has_storage() || memory_of(tensor) != nullptr) return;
  const auto& storage = tensor.storage();
  OwnMemory own{.storage = WeakStorage(storage.getWeakStorageImpl()),
                .writers = {},
                .version = version_of(tensor),
                .maker = event,
                .index = index,
                .region = tensor.is_nested() ? Region{} : Region::of(tensor)};
  if (has_seen_shared) note_address(own);
  const bool is_kept = is_shared(tensor) && tensor.is_cpu() && has_memory(tensor) &&
                       kept_bytes + storage.nbytes() <= options.most_bytes;
  if (is_kept) {
    keep_content(own, *storage.unsafeGetStorageImpl());
    own.is_content_made = true;
  }
  memory.insert_or_assign(storage.unsafeGetStorageImpl(), std::move(own));
}

void StepRecorder::Impl::wrote(const std::shared_ptr<const RecordedEvent>& event,
                               const at::Tensor& tensor) {
  auto* own = memory_of(tensor);
  own->writers.push_back(event);
  own->version = version_of(tensor);
  if (auto* found = find(tensor)) found->required_grad = tensor.requires_grad();
}

void StepRecorder::Impl::forget_the_dead() {
  if (known.size() + memory.size() + unrepeated.size() < sweep_at) return;
  std::erase_if(known, [](const auto& entry) { return entry.second.tensor.expired(); });
  std::erase_if(memory, [](const auto& entry) { return entry.second.storage.expired(); });
  std::erase_if(by_address, [](const auto& entry) { return entry.second.expired(); });
  unrepeated.forget_the_dead();
  sweep_at = std::max<std::size_t>(1024, 2 * (known.size() + memory.size() + unrepeated.size()));
  if (known.size() > kMostEvents) {
    clear();
    standing_problem =
        "more than " + std::to_string(kMostEvents) + " tensors were computed outside of modules";
  }
}

void StepRecorder::Impl::clear() {
  known.clear();
  memory.clear();
  by_address.clear();
  functions.clear();
  parameters.begin_step();
  roots.clear();
  read.clear();
  refused.clear();
  unrepeated.clear();
  arriving.clear();
  exchanges.clear();
  hooks.clear();
  has_reduced_gradients = has_taken_gradients = has_checked_gradients = false;
  kept_bytes = copied_on_host = copied_on_device = 0;
  without_gradient = 0;
}

/// The tensors whose elements an operator has moved: of cat, more than one.
static std::size_t number_of_sources(const RecordedEvent::Data& mover) {
  return static_cast<std::size_t>(std::ranges::count_if(
      mover.tensors,
      [&](const RecordedInput& each) { return is_source(*mover.info, each.argument); }));
}

std::optional<EarlierWrite> StepRecorder::Impl::write_of(const RecordedEvent& event) const {
  const RecordedEvent* maker = &event;
  while (maker->data().info != nullptr && maker->data().info->moves_values) {
    if (maker->data().inputs.empty()) return std::nullopt;  // data
    if (number_of_sources(maker->data()) > 1) break;        // which of them is bad is not known
    maker = maker->data().inputs.front().event.get();
  }
  const RecordedEvent::Data& data = maker->data();
  return EarlierWrite{data.info ? data.info->full_name : "nn.Module.__call__", data.caller};
}

void StepRecorder::Impl::forget_events_of_step() {
  std::erase_if(known, [&](const auto& entry) {
    const Known& made = entry.second;
    if (made.required_grad && !made.event->data().is_used && !made.tensor.expired()) return false;
    if (at::Tensor tensor(made.tensor.lock()); tensor.defined()) {
      if (auto write = write_of(*made.event)) unrepeated.note(tensor, *std::move(write));
    }
    return true;
  });
}

at::Tensor StepRecorder::Impl::steady(const at::Tensor& tensor) {
  if (!tensor.defined() || !may_copy(tensor)) return tensor;
  (tensor.device().is_cpu() ? copied_on_host : copied_on_device) += steady_bytes(tensor);
  at::Tensor copy = steady_copy(tensor);
  if (const EarlierWrite* write = unrepeated.of(tensor))
    unrepeated.note(copy, *write);
  else
    unrepeated.note_copy_of(tensor, copy);
  return copy;
}

void StepRecorder::Impl::keep(RecordedInput& content, const at::Tensor& tensor) {
  const bool is_copied = may_copy(tensor);
  content.kept = steady(tensor);
  content.version = version_of(content.kept);
  if (!is_copied) content.sample = content_sample(tensor);
}

bool StepRecorder::Impl::is_new_data(const at::Tensor& tensor) const {
  if (!tensor.defined() || !has_memory(tensor) || tensor.requires_grad()) return false;
  return !memory.contains(tensor.storage().unsafeGetStorageImpl()) &&
         !unrepeated.is_older_than_step(tensor);
}

StepRecorder::StepRecorder(RecorderOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  free_abandoned();
  if (recorder_of_this_thread != nullptr) {
    throw UsageError("this thread's operators are recorded already: one recorder at a time");
  }
  recorder_of_this_thread = impl_.get();
  impl_->paused = 1;
  resume();
}

// Python collects garbage on any of its threads. Only the recorder's own thread can remove the
// callback and knows that it is not inside it, so the state is left to that thread.
StepRecorder::~StepRecorder() {
  close();
  if (!impl_->is_closed) impl_.release()->is_abandoned = true;
}

void StepRecorder::close() noexcept {
  if (recorder_of_this_thread != impl_.get()) return;
  pause();
  recorder_of_this_thread = nullptr;
  impl_->is_closed = true;
  impl_->clear();
}

void StepRecorder::set_parameters(std::vector<at::Tensor> parameters) {
  impl_->parameters.set(std::move(parameters));
}

void StepRecorder::note_weights() {
  impl_->parameters.note_weights();
}

std::vector<at::Tensor> StepRecorder::written_by_program() const {
  return impl_->parameters.written_by_program();
}

void StepRecorder::note_updated() {
  impl_->parameters.note_updated();
}

void StepRecorder::begin_call() {
  impl_->parameters.begin_call();
}

void StepRecorder::end_call() {
  impl_->parameters.end_call();
}

void StepRecorder::set_loading(bool is_loading) {
  impl_->is_loading = is_loading;
}

std::vector<at::Tensor> StepRecorder::changed_weights() const {
  return impl_->parameters.changed_weights();
}

std::uint64_t StepRecorder::state_of_gradients() const {
  return impl_->parameters.state_of_gradients();
}

std::vector<at::Tensor> StepRecorder::changed_gradients() const {
  return impl_->parameters.changed_gradients();
}

std::vector<at::Tensor> StepRecorder::zeroed_gradients() const {
  return impl_->parameters.zeroed_gradients();
}

void StepRecorder::note_restored(std::span<const at::Tensor> parameters) {
  impl_->parameters.note_restored(parameters);
}

std::vector<std::pair<at::Tensor, RecordedValue>> StepRecorder::assigned_gradients() {
  std::vector<std::pair<at::Tensor, RecordedValue>> assigned;
  for (const at::Tensor& parameter : impl_->parameters.all()) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (auto value = value_of(gradient)) assigned.emplace_back(parameter, *std::move(value));
  }
  return assigned;
}

bool StepRecorder::has_checked_gradients() const noexcept {
  return impl_->has_checked_gradients && !impl_->has_taken_gradients &&
         !impl_->has_reduced_gradients;
}

bool StepRecorder::has_reduced_gradients() const noexcept {
  return impl_->has_reduced_gradients;
}

// The callback is this thread's. A program that trains on another one is not recorded.
void StepRecorder::pause() noexcept {
  if (recorder_of_this_thread != impl_.get() || impl_->paused++ > 0) return;
  at::removeCallback(impl_->callback);
}

void StepRecorder::resume() {
  if (recorder_of_this_thread != impl_.get() || --impl_->paused > 0) return;
  impl_->callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&when_begun, &when_ended)
                                                   .needsInputs(true)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
}

void StepRecorder::forget() {
  impl_->clear();
  impl_->backwards = 0;
  impl_->standing_problem.clear();
}

void StepRecorder::begin_step() {
  auto& impl = *impl_;
  const auto used =  // by a backward, so their graphs are gone
      reached_from(std::exchange(impl.roots, {}), &RecordedEvent::Data::differentiated);
  for (const auto& event : used)
    std::const_pointer_cast<RecordedEvent>(event)->data().is_used = true;
  impl.forget_events_of_step();
  impl.arriving.clear();
  impl.exchanges.clear();
  impl.hooks.clear();
  impl.has_reduced_gradients = impl.has_taken_gradients = impl.has_checked_gradients = false;
  impl.unrepeated.begin_step();
  impl.memory.clear();
  impl.by_address.clear();
  impl.has_seen_shared = false;
  impl.functions.clear();
  impl.read.clear();
  impl.refused.clear();
  impl.backwards = 0;
  impl.kept_bytes = impl.copied_on_host = impl.copied_on_device = 0;
  impl.without_gradient = 0;
  impl.parameters.begin_step();
  impl.standing_problem.clear();
}

bool StepRecorder::is_inside_event() noexcept {
  return depth > 0;
}

void StepRecorder::enter_module(ModulePath module) noexcept {
  impl_->module = module;
}

std::optional<RecordedValue> StepRecorder::value_of(const at::Tensor& tensor) {
  impl_->take_arrived(tensor);
  const auto* found = impl_->find(tensor);
  if (found == nullptr) return std::nullopt;
  impl_->check_gradient(*found, tensor);
  return impl_->name_of(*found, tensor);
}

bool StepRecorder::is_filled_with_bad(const at::Tensor& tensor) {
  const auto* const found = impl_->find(tensor);
  if (found == nullptr || found->event->data().info == nullptr) return false;
  const auto& data = found->event->data();
  return data.info->is_filler &&
         std::ranges::any_of(data.arguments, [](const c10::IValue& argument) {
           return argument.isScalar() && !argument.isComplexDouble() &&
                  !std::isfinite(argument.toScalar().toDouble());
         });
}

const std::vector<at::Tensor>& StepRecorder::refused() const noexcept {
  return impl_->refused;
}

void StepRecorder::note_received(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    impl_->unrepeated.note(tensor, {.op = "c10d::recv_", .caller = {}, .is_received = true});
  }
}

void StepRecorder::note_earlier_writes() const {
  impl_->unrepeated.tell_traces();
  impl_->parameters.tell_traces();
}

std::vector<at::Tensor> StepRecorder::steady(const std::vector<at::Tensor>& tensors) {
  return steady_together(tensors, [&](const at::Tensor& each) { return impl_->steady(each); });
}

std::shared_ptr<const RecordedEvent> StepRecorder::add_call(std::shared_ptr<void> payload,
                                                            std::span<const at::Tensor> inputs,
                                                            std::span<const at::Tensor> outputs) {
  auto& impl = *impl_;
  auto event = impl.new_event();
  auto& data = event->data();
  data.payload = std::move(payload);
  data.grad_mode = at::GradMode::is_enabled();
  if (impl.options.program_code) data.caller = impl.options.program_code->caller();
  impl.take_inputs(event, inputs);
  int index = 0;
  for (const auto& tensor : outputs) {
    const int position = index++;
    const bool is_given =
        std::ranges::any_of(inputs, [&](const auto& given) { return given.is_same(tensor); });
    if (!tensor.defined() || is_given) continue;
    const bool is_computed = tensor.requires_grad() && !tensor.is_leaf();
    // A tensor that it only passes out (a buffer, a parameter) must not be written to again.
    if (is_computed || !tensor.requires_grad()) impl.made(event, tensor, position, is_computed);
  }
  impl.forget_the_dead();
  return event;
}

void StepRecorder::add_backward(std::shared_ptr<void> payload, std::span<const at::Tensor> roots) {
  impl_->roots.push_back(add_call(std::move(payload), roots, {}));
  impl_->parameters.note_backward();
  impl_->read.clear();
  ++impl_->backwards;
}

void StepRecorder::add_hook(std::shared_ptr<void> payload, const at::Tensor& tensor) {
  if (impl_->find(tensor) == nullptr) return;
  impl_->hooks.push_back(add_call(std::move(payload), {&tensor, 1}, {}));
}

int StepRecorder::backwards() const noexcept {
  return impl_->backwards;
}

RecordedEvents StepRecorder::needed() const {
  auto roots = impl_->roots;
  for (const auto& exchange : impl_->exchanges) {  // another rank may have used what it sent
    const auto behind = reached_from({exchange}, &RecordedEvent::Data::needs);
    const bool is_repeatable = std::ranges::all_of(
        behind, [](const auto& event) { return event->data().problem.empty(); });
    if (is_repeatable) roots.push_back(exchange);
  }
  auto events = reached_from(std::move(roots), &RecordedEvent::Data::needs);
  for (const auto& hook : impl_->hooks) {
    const RecordedValue& value = hook->data().inputs.front();
    if (std::ranges::find(events, value.event) != events.end()) events.push_back(hook);
  }
  std::ranges::sort(events, {}, [](const auto& event) { return event->data().number; });
  return events;
}

std::vector<at::Tensor> StepRecorder::take_read() noexcept {
  return std::exchange(impl_->read, {});
}

/// The calls that `tensors` were computed from; nullopt if an event among their origins is unknown.
static std::optional<std::unordered_set<const RecordedEvent*>> calls_behind(
    StepRecorder::Impl& recorder, std::span<const at::Tensor> tensors) {
  RecordedEvents makers;
  for (const auto& tensor : tensors) {
    const auto* const found = recorder.find(tensor);
    if (found == nullptr) return std::nullopt;
    makers.push_back(found->event);
  }
  std::unordered_set<const RecordedEvent*> calls;
  for (const auto& event : reached_from(std::move(makers), &RecordedEvent::Data::needs)) {
    if (!event->data().problem.empty()) return std::nullopt;
    if (event->payload() != nullptr && event->data().grad_mode) calls.insert(event.get());
  }
  return calls;
}

bool StepRecorder::have_common_calls(std::span<const at::Tensor> some,
                                     std::span<const at::Tensor> others) {
  const auto of_some = calls_behind(*impl_, some);
  const auto of_others = calls_behind(*impl_, others);
  if (!of_some || !of_others) return true;
  return std::ranges::any_of(*of_some,
                             [&](const RecordedEvent* call) { return of_others->contains(call); });
}

void StepRecorder::note_losses(std::span<const at::Tensor> losses) {
  constexpr int kSteps = 3;  // from a loss's scaled sum with another one, for example
  constexpr std::size_t kMost = 64;
  RecordedEvents events;
  for (const at::Tensor& loss : losses) {
    if (const auto* const found = impl_->find(loss)) events.push_back(found->event);
  }
  for (int step = 0; step < kSteps && events.size() <= kMost; ++step) {
    RecordedEvents before;
    for (const auto& event : events) {
      const ProgramCode::Position& user = event->data().caller.user;
      impl_->loss_lines.insert({user.code, user.line});
      impl_->loss_lines.insert({user.code, 0});
      for (const RecordedValue& input : event->data().inputs) before.push_back(input.event);
    }
    events = std::move(before);
  }
}

bool StepRecorder::is_like_losses(const at::Tensor& tensor, bool in_function) {
  const auto* const found = impl_->find(tensor);
  if (found == nullptr || impl_->loss_lines.empty()) return true;
  const ProgramCode::Position& user = found->event->data().caller.user;
  return user.code == nullptr ||
         impl_->loss_lines.contains({user.code, in_function ? 0 : user.line});
}

std::uint64_t StepRecorder::latest_event() const noexcept {
  return impl_->next_number;
}

void StepRecorder::forget_since(std::uint64_t event) {
  const auto is_later = [&](const std::shared_ptr<const RecordedEvent>& each) {
    return each->data().number > event;
  };
  std::erase_if(impl_->roots, is_later);
  std::erase_if(impl_->exchanges, is_later);
  std::erase_if(impl_->hooks, is_later);
  std::erase_if(impl_->known, [&](const auto& entry) { return is_later(entry.second.event); });
}

std::vector<at::Tensor> StepRecorder::unfinished() const {
  std::unordered_set<const RecordedEvent*> used;  // not by a collective: it may measure the loss
  for (const auto& event : reached_from(impl_->roots, &RecordedEvent::Data::needs)) {
    used.insert(event.get());
  }
  std::vector<std::pair<at::Tensor, const RecordedEvent*>> waiting;
  for (const auto& [address, known] : impl_->known) {
    at::Tensor tensor(known.tensor.lock());
    if (!tensor.defined() || !tensor.requires_grad() || tensor.is_leaf()) continue;
    for (const auto& need : known.event->data().needs) used.insert(need.get());
    waiting.emplace_back(std::move(tensor), known.event.get());
  }
  std::erase_if(waiting, [&](const auto& each) { return used.contains(each.second); });
  std::ranges::sort(waiting, {}, [](const auto& each) { return each.second->data().number; });
  std::vector<at::Tensor> tensors;
  for (auto& [tensor, event] : waiting) tensors.push_back(std::move(tensor));
  return tensors;
}

bool StepRecorder::has_read(const at::Tensor& tensor) const {
  const auto* const found = impl_->find(tensor);
  return std::ranges::any_of(needed(), [&](const auto& event) {
    if (found != nullptr && found->event == event) return true;
    return std::ranges::any_of(event->data().tensors, [&](const RecordedInput& input) {
      if (!input.kept.defined() || !has_memory(input.kept) || !has_memory(tensor)) return false;
      const bool is_alike = input.kept.sizes() == tensor.sizes() &&
                            input.kept.dtype() == tensor.dtype() &&
                            input.kept.device() == tensor.device();
      return input.kept.is_alias_of(tensor) || (is_alike && have_same_bits(input.kept, tensor));
    });
  });
}

std::string StepRecorder::problem() const {
  if (!impl_->standing_problem.empty()) return impl_->standing_problem;
  for (const auto& event : needed()) {
    const auto& data = event->data();
    if (!data.problem.empty()) return data.problem;
    if (!data.results.empty()) continue;
    const bool is_overwritten = std::ranges::any_of(data.tensors, &RecordedInput::is_overwritten);
    if (is_overwritten && (data.is_indispensable || !first_outputs(data))) {
      return "what " + data.handle->schema().name() + " has read was overwritten later in the step";
    }
  }
  return {};
}

std::pair<std::size_t, std::size_t> StepRecorder::size() const {
  const auto live = std::ranges::count_if(
      impl_->known, [](const auto& entry) { return !entry.second.tensor.expired(); });
  return {static_cast<std::size_t>(live), needed().size()};
}

}  // namespace nanlocator::inline recorder_room
