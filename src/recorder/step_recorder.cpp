#include "nanlocator/recorder/step_recorder.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "nanlocator/error.hpp"
#include "nanlocator/operators/earlier_write.hpp"
#include "nanlocator/replay/capture.hpp"
#include "operators/call_values.hpp"
#include "operators/operator_info.hpp"
#include "operators/process_groups.hpp"
#include "recorder/recorded_event.hpp"
#include "tensor/own_work.hpp"
#include "tensor/steady_copy.hpp"

namespace nanlocator::inline recorder_room {
namespace {

/// All of its memory.
at::Tensor bytes_of(const c10::Storage& storage) {
  const OwnWork own_work;
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  return at::empty({0}, options)
      .set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

/// No training step has more events that are still needed.
constexpr std::size_t kMostEvents = 20000;
/// Operators that a program executes in a step under `no_grad`, outside of modules, for what the
/// loss uses: targets, advantages, statistics. A rollout has more; of its
/// results only the line is known.
constexpr std::size_t kMostWithoutGradient = 2000;
/// Limits for copies of data per step: more than most programs' batches, and little beside a model.
constexpr std::uint64_t kMostCopiedOnHost = std::uint64_t{64} << 20;
constexpr std::uint64_t kMostCopiedOnDevice = std::uint64_t{32} << 20;
/// Limit for one tensor that an operator reads: larger ones are frozen weights rather than data.
constexpr std::uint64_t kMostOfAnOperator = std::uint64_t{1} << 20;

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

bool is_wrapped_by_a_transform(const at::Tensor& tensor) {
  return tensor.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchBatched,
                                                       c10::DispatchKey::FuncTorchGradWrapper,
                                                       c10::DispatchKey::Functionalize}));
}

GeneratorStates generator_states(const std::vector<c10::IValue>& arguments) {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  for (const auto& argument : arguments) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      if (tensor.is_cuda() && std::ranges::find(devices, tensor.device()) == devices.end()) {
        devices.push_back(tensor.device());
      }
    });
  }
  GeneratorStates states;
  for (const auto& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    states.emplace_back(generator, generator.get_state());
  }
  return states;
}

}  // namespace

struct StepRecorder::Impl {
  explicit Impl(RecorderOptions recorder_options) : options(std::move(recorder_options)) {}

  struct Known {
    WeakTensor tensor;
    std::shared_ptr<const RecordedEvent> event;
    int index = 0;
    bool required_grad = false;
  };
  /// Memory that an event has made. An operator that writes there writes again in the replay.
  struct OwnMemory {
    WeakStorage storage;
    RecordedEvents writers;
    std::uint32_t version = 0;  // after the last write
  };

  struct Context final : at::ObserverContext {
    const OperatorInfo* info = nullptr;  // null: a custom function
    std::vector<c10::IValue> arguments;
    std::vector<std::uint32_t> versions;  // of the tensors, in order
    GeneratorStates generators;
    bool draws = false;
    bool is_kept = true;           // false: only what it wrote is noted
    std::vector<at::Tensor> sent;  // of an exchange in place: the data before it
    at::Tensor before;             // of data that is written in place: a copy of its content then
  };

  RecorderOptions options;
  std::vector<at::Tensor> parameters;
  std::vector<std::uint32_t> versions;  // of the parameters, at the last `note_weights`
  int paused = 0;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  std::uint64_t next_number = 0;
  int backwards = 0;
  std::size_t without_gradient = 0;  // operators of this step outside of autograd
  std::uint64_t kept_bytes = 0;
  std::uint64_t copied_on_host = 0, copied_on_device = 0;  // bytes
  /// Part of a storage.
  struct Region {
    std::vector<std::int64_t> sizes, strides;
    std::int64_t offset = 0;
    at::ScalarType dtype{};

    static Region of(const at::Tensor& tensor) {
      return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
              tensor.scalar_type()};
    }
    [[nodiscard]] at::Tensor of(const c10::Storage& storage, const at::TensorOptions& like) const {
      const OwnWork own_work;
      return at::empty({0}, like.dtype(dtype).requires_grad(false))
          .set_(storage, offset, sizes, strides);
    }
  };
  /// A result of an exchange that the program has not read yet; it may still be under way.
  struct Arriving {
    Region region;
    std::shared_ptr<const RecordedEvent> event;
    std::size_t index = 0;  // in the event's results
  };
  std::unordered_multimap<const c10::StorageImpl*, Arriving> arriving;
  RecordedEvents exchanges;  // of this step

  static bool is_exchange(const OperatorInfo& info) {
    return info.collective && info.collective != CollectiveKind::send &&
           info.name.starts_with("c10d::");
  }

  /// Memory that a replay reads and does not write, by its last write.
  struct Unrepeated {
    WeakStorage storage;
    EarlierWrite write;
    std::uint64_t step = 0;  // in which it was first written
  };
  std::unordered_map<const c10::StorageImpl*, Unrepeated> unrepeated;
  std::uint64_t step = 0;
  std::unordered_map<const c10::TensorImpl*, Known> known;
  std::unordered_map<const c10::StorageImpl*, OwnMemory> memory;
  std::unordered_map<const c10::TensorImpl*, std::size_t> gradients;  // to the parameter's index
  std::unordered_multimap<const c10::StorageImpl*, std::size_t> gradient_memory;
  bool are_gradients_new = false;
  /// Of each parameter: its gradient, and the number of writes to it, after the last event that
  /// wrote it.
  struct Gradient {
    const c10::TensorImpl* tensor = nullptr;
    std::uint32_t version = 0;
    friend bool operator==(const Gradient&, const Gradient&) = default;
  };
  std::vector<Gradient> written_gradients;  // empty before the step's first backward
  std::size_t sweep_at = 1024;
  RecordedEvents roots;
  struct Function {
    std::shared_ptr<RecordedEvent> event;
    std::string node;  // "SquareBackward"
  };
  std::unordered_map<std::uint64_t, Function> functions;  // by their nodes' sequence numbers
  std::string standing_problem;
  ModulePath module = nullptr;
  std::vector<at::Tensor> read;  // by the program, before a backward

  Known* find(const at::Tensor& tensor) {
    if (!tensor.defined()) return nullptr;
    if (!functions.empty() && !known.contains(tensor.unsafeGetTensorImpl())) find_maker(tensor);
    const auto found = known.find(tensor.unsafeGetTensorImpl());
    return found == known.end() ? nullptr : &found->second;
  }

  /// Registers an output of a custom function on its first use, by the node that made it.
  void find_maker(const at::Tensor& tensor) {
    if (!tensor.requires_grad() || tensor.is_leaf()) return;
    const auto& node = tensor.grad_fn();
    const auto found = functions.find(node->sequence_nr());
    if (found == functions.end() || node->name() != found->second.node) return;
    made(found->second.event, tensor, static_cast<int>(tensor.output_nr()), true);
  }

  [[nodiscard]] static RecordedValue name_of(const Known& known, const at::Tensor& tensor) {
    return {known.event, known.index,
            !known.required_grad && tensor.is_leaf() && tensor.requires_grad()};
  }

  OwnMemory* memory_of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    const auto found = memory.find(tensor.storage().unsafeGetStorageImpl());
    return found == memory.end() ? nullptr : &found->second;
  }

  void find_gradients() {
    if (!are_gradients_new) return;
    gradients.clear();
    gradient_memory.clear();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& grad = parameters[i].grad();
      if (!grad.defined()) continue;
      gradients.emplace(grad.unsafeGetTensorImpl(), i);
      if (has_memory(grad)) {
        gradient_memory.emplace(grad.storage().unsafeGetStorageImpl(), i);
      }
    }
    are_gradients_new = false;
  }

  static bool has_memory(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.has_storage() && !is_wrapped(tensor);
  }

  /// True for a subclass, such as DTensor, whose values are in another tensor.
  static bool is_wrapped(const at::Tensor& tensor) {
    return tensor.key_set().has(c10::DispatchKey::Python);
  }

  /// The index of the parameter that has this gradient.
  std::optional<std::size_t> parameter_of(const at::Tensor& gradient) {
    find_gradients();
    const auto found = gradients.find(gradient.unsafeGetTensorImpl());
    if (found == gradients.end()) return std::nullopt;
    // A program may have dropped its gradient since (FSDP1 in forward), and the address may be
    // reused.
    const bool is_its_own =
        parameters[found->second].grad().unsafeGetTensorImpl() == gradient.unsafeGetTensorImpl();
    return is_its_own ? std::optional(found->second) : std::nullopt;
  }

  /// The parameter in whose gradient this view lies, and where.
  std::optional<std::pair<std::size_t, ViewOfGradient>> place_in_gradient(const at::Tensor& view) {
    find_gradients();
    if (gradient_memory.empty() || !has_memory(view) || view.numel() == 0) return std::nullopt;
    const auto [begin, end] = gradient_memory.equal_range(view.storage().unsafeGetStorageImpl());
    for (auto at = begin; at != end; ++at) {
      const at::Tensor& grad = parameters[at->second].grad();
      if (!grad.defined() || !has_memory(grad) || !grad.is_alias_of(view)) continue;
      if (grad.dtype() != view.dtype() || !grad.is_contiguous()) continue;
      const std::int64_t first = view.storage_offset() - grad.storage_offset();
      std::int64_t last = first;
      for (std::int64_t d = 0; d < view.dim(); ++d) last += (view.size(d) - 1) * view.stride(d);
      if (first < 0 || last >= grad.numel()) continue;
      return std::pair(at->second, ViewOfGradient{view.sizes().vec(), view.strides().vec(), first});
    }
    return std::nullopt;
  }

  [[nodiscard]] Gradient gradient_now(std::size_t parameter) const {
    const auto& grad = parameters[parameter].grad();
    if (!grad.defined()) return {};
    return {grad.unsafeGetTensorImpl(), version_of(grad)};
  }

  void note_gradients() {
    written_gradients.clear();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      written_gradients.push_back(gradient_now(i));
    }
  }

  /// A recorded event may have written to `tensor`.
  void note_written_gradient(const at::Tensor& tensor) {
    if (written_gradients.size() != parameters.size()) return;
    if (const auto parameter = parameter_of(tensor)) {
      written_gradients[*parameter] = gradient_now(*parameter);
    } else if (const auto place = place_in_gradient(tensor)) {
      written_gradients[place->first] = gradient_now(place->first);
    }
  }

  void forget_the_dead() {
    if (known.size() + memory.size() + unrepeated.size() < sweep_at) return;
    std::erase_if(known, [](const auto& entry) { return entry.second.tensor.expired(); });
    std::erase_if(memory, [](const auto& entry) { return entry.second.storage.expired(); });
    std::erase_if(unrepeated, [](const auto& entry) { return entry.second.storage.expired(); });
    sweep_at = std::max<std::size_t>(1024, 2 * (known.size() + memory.size() + unrepeated.size()));
    if (known.size() > kMostEvents) {
      clear();
      standing_problem =
          "more than " + std::to_string(kMostEvents) + " tensors were computed outside of modules";
    }
  }

  void clear() {
    known.clear();
    memory.clear();
    functions.clear();
    gradients.clear();
    gradient_memory.clear();
    written_gradients.clear();
    roots.clear();
    read.clear();
    unrepeated.clear();
    arriving.clear();
    exchanges.clear();
    kept_bytes = copied_on_host = copied_on_device = 0;
    without_gradient = 0;
    are_gradients_new = true;
  }

  [[nodiscard]] bool may_copy(const at::Tensor& tensor) const {
    const bool is_on_host = tensor.device().is_cpu();
    return steady_bytes(tensor) + (is_on_host ? copied_on_host : copied_on_device) <=
           (is_on_host ? kMostCopiedOnHost : kMostCopiedOnDevice);
  }

  at::Tensor steady(const at::Tensor& tensor) {
    if (!tensor.defined() || !may_copy(tensor)) return tensor;
    (tensor.device().is_cpu() ? copied_on_host : copied_on_device) += steady_bytes(tensor);
    at::Tensor copy = steady_copy(tensor);
    if (const EarlierWrite* write = unrepeated_write_of(tensor)) note_unrepeated(copy, *write);
    return copy;
  }

  /// A copy, or the tensor and a sample of what it holds.
  void keep(RecordedInput& content, const at::Tensor& tensor) {
    const bool is_copied = may_copy(tensor);
    content.kept = steady(tensor);
    content.version = version_of(content.kept);
    if (!is_copied) content.sample = content_sample(tensor);
  }

  /// A batch that is normalised in place, for example; no state that the program keeps over steps,
  /// such as an average of weights.
  [[nodiscard]] bool is_new_data(const at::Tensor& tensor) const {
    if (!tensor.defined() || !has_memory(tensor) || tensor.requires_grad()) return false;
    const auto* const storage = tensor.storage().unsafeGetStorageImpl();
    const auto written = unrepeated.find(storage);
    return !memory.contains(storage) &&
           (written == unrepeated.end() || written->second.step == step);
  }

  [[nodiscard]] const EarlierWrite* unrepeated_write_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    const auto found = unrepeated.find(tensor.storage().unsafeGetStorageImpl());
    return found == unrepeated.end() ? nullptr : &found->second.write;
  }

  void note_unrepeated(const at::Tensor& tensor, EarlierWrite write) {
    if (!tensor.defined() || !has_memory(tensor)) return;
    const auto& storage = tensor.storage();
    const auto [entry, _] =
        unrepeated.try_emplace(storage.unsafeGetStorageImpl(),
                               Unrepeated{WeakStorage(storage.getWeakStorageImpl()), {}, step});
    entry->second.write = std::move(write);
  }

  /// A write that is not recorded. Elements that are only moved, filled in or drawn are data unless
  /// their source was not.
  void note_unrepeated_write(const OperatorInfo& info, const Context& context,
                             std::span<const at::Tensor> written) {
    if (written.empty()) return;
    if (info.collective) {
      const EarlierWrite write{info.full_name, caller_now(), true,
                               group_of(info, context.arguments)};
      for (const at::Tensor& tensor : written) note_unrepeated(tensor, write);
      return;
    }
    if (!info.moves_values && !info.is_filler && !context.draws) {
      const EarlierWrite write{info.full_name, caller_now()};
      for (const at::Tensor& tensor : written) note_unrepeated(tensor, write);
      return;
    }
    const EarlierWrite* source = nullptr;
    for (std::size_t i = 0; info.moves_values && i < context.arguments.size(); ++i) {
      if (info.arguments[i] != ArgumentUse::read) continue;
      for_each_tensor_at(context.arguments[i], [&](const at::Tensor& tensor, int) {
        if (source == nullptr) source = unrepeated_write_of(tensor);
      });
    }
    const std::optional<EarlierWrite> write = source ? std::optional(*source) : std::nullopt;
    for (const at::Tensor& tensor : written) {
      if (write) note_unrepeated(tensor, *write);
      if (!write && tensor.has_storage()) {
        unrepeated.erase(tensor.storage().unsafeGetStorageImpl());
      }
    }
  }

  [[nodiscard]] ProgramCode::Caller caller_now() const {
    return options.program_code ? options.program_code->caller() : ProgramCode::Caller{};
  }

  /// The replay of later steps does not repeat the events that made these.
  void forget_events_of_step() {
    std::erase_if(known, [&](const auto& entry) {
      const Known& made = entry.second;
      if (made.required_grad && !made.event->data().is_used && !made.tensor.expired()) return false;
      const RecordedEvent::Data& data = made.event->data();
      const bool is_made_anew = data.info == nullptr || !data.info->moves_values;
      if (at::Tensor tensor(made.tensor.lock()); tensor.defined() && is_made_anew) {
        note_unrepeated(tensor,
                        {data.info ? data.info->full_name : "nn.Module.__call__", data.caller});
      }
      return true;
    });
  }

  [[nodiscard]] bool may_copy_for_an_operator(const at::Tensor& tensor) const {
    return steady_bytes(tensor) <= kMostOfAnOperator && may_copy(tensor);
  }

  std::shared_ptr<RecordedEvent> new_event() {
    auto event = std::make_shared<RecordedEvent>();
    event->data().number = ++next_number;
    event->data().backwards_before = backwards;
    return event;
  }

  /// Names a value that `data` reads, with all events that have written to it.
  void depend_on(RecordedEvent::Data& data, const RecordedValue& value, const at::Tensor& tensor) {
    data.inputs.push_back(value);
    const auto* found = find(tensor);
    if (found != nullptr && found->required_grad) data.differentiated.push_back(value.event);
    data.needs.push_back(value.event);
    if (const auto* own = memory_of(tensor)) {
      data.needs.insert(data.needs.end(), own->writers.begin(), own->writers.end());
    }
  }

  void made(const std::shared_ptr<RecordedEvent>& event, const at::Tensor& tensor, int index,
            bool may_be_written) {
    known.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Known{WeakTensor(tensor.getIntrusivePtr()), event, index, tensor.requires_grad()});
    if (!may_be_written || !tensor.has_storage() || memory_of(tensor) != nullptr) return;
    const auto& storage = tensor.storage();
    memory.insert_or_assign(
        storage.unsafeGetStorageImpl(),
        OwnMemory{WeakStorage(storage.getWeakStorageImpl()), {}, version_of(tensor)});
  }

  /// A recorded event has written to `tensor`, in memory that an event made.
  void wrote(const std::shared_ptr<const RecordedEvent>& event, const at::Tensor& tensor) {
    auto* own = memory_of(tensor);
    own->writers.push_back(event);
    own->version = version_of(tensor);
    if (auto* found = find(tensor)) found->required_grad = tensor.requires_grad();
  }

  // --- operators

  void note_read(const at::RecordFunction& call);
  [[nodiscard]] std::vector<const RecordedEvent*> differentiable_behind(
      const std::shared_ptr<const RecordedEvent>& event) const;
  std::unique_ptr<Context> start(const at::RecordFunction& call, const OperatorInfo& info);
  void finish(const at::RecordFunction& call, Context& context);
  void finish_exchange(const at::RecordFunction& call, Context& context);
  void take_arrived(const at::Tensor& tensor);
  void note_unkept(const at::RecordFunction& call, const Context& context);
  std::unique_ptr<Context> start_function(const at::RecordFunction& call);
  [[nodiscard]] RecordedInput input_of(const at::Tensor& tensor, std::uint32_t version);
  [[nodiscard]] static std::uint64_t bytes_kept_for(const at::Tensor& tensor);
  void take_inputs(const std::shared_ptr<RecordedEvent>& event, std::span<const at::Tensor> inputs);
  static void note_obstacle(RecordedEvent::Data& data, const at::Tensor& tensor);
};

namespace {

thread_local StepRecorder::Impl* recorder_of_this_thread = nullptr;
thread_local int depth = 0;  // number of running frames that this thread's recorder has seen begin

/// Frames without a schema are ignored, except the program's functions, which are calls.
std::unique_ptr<at::ObserverContext> when_begun(const at::RecordFunction& call) {
  auto* const recorder = recorder_of_this_thread;
  try {
    const auto* info = operator_info(call);
    const bool is_outermost = recorder != nullptr && depth == 0;
    std::unique_ptr<at::ObserverContext> context;
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
  if (--depth > 0 || context == nullptr || recorder_of_this_thread == nullptr) return;
  auto& begun = static_cast<StepRecorder::Impl::Context&>(*context);
  if (begun.info == nullptr) return;
  try {
    recorder_of_this_thread->finish(call, begun);
  } catch (const std::exception& error) {
    recorder_of_this_thread->standing_problem =
        std::string(call.name()) + " could not be recorded: " + first_line(error);
  }
}

}  // namespace

/// The last argument with tensors of a c10d operator is what it sends, and the first one what it
/// writes (torch/csrc/distributed/c10d/Ops.cpp). Its schema marks none.
static std::size_t sent_argument_of(const StepRecorder::Impl::Context& context) {
  if (context.arguments.size() < 2) return 0;
  return context.arguments[1].isTensor() || context.arguments[1].isList() ? 1 : 0;
}

std::unique_ptr<StepRecorder::Impl::Context> StepRecorder::Impl::start(
    const at::RecordFunction& call, const OperatorInfo& info) {
  if (info.tells_host) note_read(call);
  if (info.is_allocator) return nullptr;
  auto context = std::make_unique<Context>();
  context->info = &info;
  const bool is_one_too_many =
      !at::GradMode::is_enabled() && !info.writes && without_gradient >= kMostWithoutGradient;
  context->is_kept = !is_one_too_many;
  const auto inputs = last_values(call.inputs(), info.arguments.size());
  if (inputs.size() != info.arguments.size()) return nullptr;
  context->arguments.assign(inputs.begin(), inputs.end());
  bool requires_grad = false;
  if (!context->is_kept) return context;
  if (!arriving.empty()) {
    for (const auto& argument : context->arguments) {
      for_each_tensor_within(argument, [&](const at::Tensor& tensor) { take_arrived(tensor); });
    }
  }
  if (is_exchange(info)) {
    if (sent_argument_of(*context) == 0 && !context->arguments.empty()) {
      for_each_tensor_within(context->arguments.front(), [&](const at::Tensor& tensor) {
        const bool is_of_event = find(tensor) != nullptr || tensor.requires_grad();
        if (!is_of_event && may_copy_for_an_operator(tensor))
          context->sent.push_back(steady(tensor));
      });
    }
    return context;
  }
  for (const auto& argument : context->arguments) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      context->versions.push_back(tensor.defined() ? version_of(tensor) : 0);
      requires_grad = requires_grad || (tensor.defined() && tensor.requires_grad());
    });
  }
  const bool is_in_place = !context->arguments.empty() && !info.is_view && !info.collective &&
                           info.arguments.front() == ArgumentUse::read_and_written;
  if (is_in_place && context->arguments.front().isTensor()) {
    const at::Tensor& data = context->arguments.front().toTensor();
    const bool is_ours = is_new_data(data) && !parameter_of(data) && !place_in_gradient(data);
    if (is_ours && may_copy(data)) context->before = steady(data);
  }
  if (!info.is_view) {
    context->draws = call_facts(*call.operator_name()).draws_random_numbers;
    if (context->draws && (requires_grad || info.writes)) {
      context->generators = generator_states(context->arguments);
    }
  }
  return context;
}

/// The program reads a number: keeps the losses that it was computed from until they are used or
/// the step ends. Ignores numbers of an earlier step, and numbers after a backward.
void StepRecorder::Impl::note_read(const at::RecordFunction& call) {
  if (backwards > 0) return;
  std::vector<const RecordedEvent*> makers;
  for (const auto& argument : call.inputs()) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      const Known* const found = find(tensor);
      if (found == nullptr) return;
      const auto more = differentiable_behind(found->event);
      makers.insert(makers.end(), more.begin(), more.end());
    });
  }
  if (makers.empty()) return;
  for (const auto& [address, each] : known) {
    if (!each.required_grad || std::ranges::find(makers, each.event.get()) == makers.end())
      continue;
    at::Tensor tensor(each.tensor.lock());
    if (tensor.defined() && tensor.numel() == 1) read.push_back(std::move(tensor));
  }
}

/// The nearest events at or before `event` through which gradients flow. Empty if none of their
/// origins is a call, or if one is unknown or from an earlier step.
std::vector<const RecordedEvent*> StepRecorder::Impl::differentiable_behind(
    const std::shared_ptr<const RecordedEvent>& event) const {
  constexpr std::size_t kMost = 4096;
  std::vector<const RecordedEvent*> nearest;
  std::vector<std::pair<const RecordedEvent*, bool>> open = {{event.get(), false}};
  std::unordered_set<const RecordedEvent*> seen;
  bool is_of_call = false;
  while (!open.empty()) {
    const auto [each, is_behind] = open.back();
    open.pop_back();
    if (!seen.insert(each).second) continue;
    const auto& data = each->data();
    if (data.is_used || !data.problem.empty() || seen.size() > kMost) return {};
    is_of_call = is_of_call || data.payload != nullptr;
    const bool is_differentiated = data.payload != nullptr || data.is_indispensable;
    if (is_differentiated && !is_behind) nearest.push_back(each);
    for (const auto& need : data.needs) {
      open.emplace_back(need.get(), is_behind || is_differentiated);
    }
  }
  if (!is_of_call) return {};
  return nearest;
}

std::unique_ptr<StepRecorder::Impl::Context> StepRecorder::Impl::start_function(
    const at::RecordFunction& call) {
  if (!options.function_call || call.seqNr() < 0 || !at::GradMode::is_enabled()) return nullptr;
  auto [payload, inputs] = options.function_call();
  const bool is_differentiated = std::ranges::any_of(
      inputs, [](const at::Tensor& each) { return each.defined() && each.requires_grad(); });
  if (payload == nullptr || !is_differentiated) return nullptr;  // its operators are recorded
  auto event = new_event();
  take_inputs(event, inputs);
  event->data().payload = std::move(payload);
  if (options.program_code) event->data().caller = options.program_code->caller();
  functions.insert_or_assign(static_cast<std::uint64_t>(call.seqNr()),
                             Function{std::move(event), std::string(call.name()) + "Backward"});
  return std::make_unique<Context>();
}

void StepRecorder::Impl::take_inputs(const std::shared_ptr<RecordedEvent>& event,
                                     std::span<const at::Tensor> inputs) {
  auto& data = event->data();
  for (const auto& tensor : inputs) {
    if (!tensor.defined()) continue;
    take_arrived(tensor);
    if (const auto* found = find(tensor)) {
      depend_on(data, name_of(*found, tensor), tensor);
    } else {
      note_obstacle(data, tensor);
    }
    const auto* own = memory_of(tensor);  // the call's writes are repeated
    if (own != nullptr && own->version != version_of(tensor)) wrote(event, tensor);
  }
}

RecordedInput StepRecorder::Impl::input_of(const at::Tensor& tensor, std::uint32_t version) {
  RecordedInput input;
  input.version = version;
  const auto* found = tensor.defined() ? find(tensor) : nullptr;
  const bool is_of_an_event = found != nullptr && memory_of(tensor) != nullptr;
  if (is_of_an_event) {
    input.value = name_of(*found, tensor);
  } else if (const auto parameter = parameter_of(tensor)) {
    input.gradient_of = parameters[*parameter];
  } else if (auto place = place_in_gradient(tensor)) {
    input.gradient_of = parameters[place->first];
    input.view = std::move(place->second);
  } else if (found != nullptr) {
    input.value = name_of(*found, tensor);
  } else {
    input.kept = tensor;
  }
  return input;
}

std::uint64_t StepRecorder::Impl::bytes_kept_for(const at::Tensor& tensor) {
  const bool is_weight = tensor.is_leaf() && tensor.requires_grad();
  return is_weight || !tensor.has_storage() ? 0 : tensor.nbytes();
}

/// For a tensor that no event has made.
void StepRecorder::Impl::note_obstacle(RecordedEvent::Data& data, const at::Tensor& tensor) {
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    data.problem = "a tensor of " + tensor.grad_fn()->name() +
                   " is used that was computed where nobody watched";
  } else if (is_wrapped_by_a_transform(tensor)) {
    data.problem = "a transform of torch.func runs outside of modules";
  }
}

/// Leaves out its tensors, which `Data::tensors` names or keeps.
static c10::IValue without_tensors(const c10::IValue& argument) {
  if (argument.isTensor()) return at::Tensor();
  if (!argument.isList()) return argument;
  auto copy = argument.toList().copy();
  for (std::size_t i = 0; i < copy.size(); ++i) {
    if (c10::IValue(copy.get(i)).isTensor()) copy.set(i, at::Tensor());
  }
  return copy;
}

/// A replay does not communicate: it looks at what was sent, and takes what came the first time.
void StepRecorder::Impl::finish_exchange(const at::RecordFunction& call, Context& context) {
  const OperatorInfo& info = *context.info;
  std::vector<at::Tensor> written;
  if (!context.arguments.empty()) {
    for_each_tensor_within(context.arguments.front(),
                           [&](const at::Tensor& tensor) { written.push_back(tensor); });
  }
  const bool is_of_gradients = std::ranges::any_of(written, [&](const at::Tensor& tensor) {
    return tensor.requires_grad() || parameter_of(tensor) || place_in_gradient(tensor);
  });
  if (written.empty() || is_of_gradients) return;
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
  if (sends_gradients) return;  // a loop that reduces them itself
  note_unrepeated_write(info, context, written);
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

/// The program is about to read `tensor`, so what it holds has arrived.
void StepRecorder::Impl::take_arrived(const at::Tensor& tensor) {
  if (arriving.empty() || !tensor.defined() || !tensor.has_storage()) return;
  const auto [begin, end] = arriving.equal_range(tensor.storage().unsafeGetStorageImpl());
  if (begin == end) return;
  for (auto at = begin; at != end; ++at) {
    const Arriving& each = at->second;
    auto& result = std::const_pointer_cast<RecordedEvent>(each.event)->data().results[each.index];
    keep(result.content, each.region.of(tensor.storage(), tensor.options()));
  }
  arriving.erase(begin, end);
  // Gloo has copied them in when the program waited.
  if (OwnMemory* own = memory_of(tensor)) own->version = version_of(tensor);
}

/// An operator whose results become data of the replay.
void StepRecorder::Impl::note_unkept(const at::RecordFunction& call, const Context& context) {
  const OperatorInfo& info = *context.info;
  std::vector<at::Tensor> written;
  if (!info.is_view) {
    for (const auto& value : last_values(call.outputs(), info.returns_alias.size())) {
      for_each_tensor_at(value, [&](const at::Tensor& tensor, int) { written.push_back(tensor); });
    }
  }
  note_unrepeated_write(info, context, written);
}

void StepRecorder::Impl::finish(const at::RecordFunction& call, Context& context) {
  const OperatorInfo& info = *context.info;
  if (!context.is_kept) return note_unkept(call, context);
  if (is_exchange(info)) return finish_exchange(call, context);
  auto event = new_event();
  auto& data = event->data();
  data.info = &info;
  std::vector<at::Tensor> given, written, elsewhere;
  bool writes_gradients = false;
  std::uint64_t bytes = 0;
  std::size_t next = 0;
  for (std::size_t i = 0; i < context.arguments.size(); ++i) {
    for_each_tensor_at(context.arguments[i], [&](const at::Tensor& tensor, int element) {
      const std::uint32_t version = context.versions[next++];
      if (!tensor.defined()) return;
      const bool is_begun = i == 0 && context.before.defined();
      RecordedInput input;
      if (is_begun) {
        input.kept = context.before;
        input.version = version_of(context.before);
        input.is_begun = true;
      } else {
        input = input_of(tensor, version);
      }
      input.argument = i;
      input.element = element;
      input.is_read = !info.is_view && info.arguments[i] != ArgumentUse::overwritten;
      const auto* own = memory_of(tensor);
      if (input.is_read && own != nullptr && own->version != version) {
        data.problem = "a tensor was written to by something that is not an operator";
      }
      if (info.arguments[i] != ArgumentUse::read) {
        writes_gradients = writes_gradients || input.gradient_of.defined();
        const bool is_of_step = own != nullptr || input.gradient_of.defined() || is_begun;
        if (!is_of_step) elsewhere.push_back(tensor);
        if (own != nullptr) written.push_back(tensor);
      }
      if (input.kept.defined()) bytes += bytes_kept_for(input.kept);
      given.push_back(tensor);
      data.tensors.push_back(std::move(input));
    });
  }
  // Writes to memory from elsewhere are not recorded: its readers keep its content at the time.
  const bool writes_own = !written.empty() || writes_gradients || context.before.defined();
  if (!elsewhere.empty()) return note_unrepeated_write(info, context, elsewhere);

  /// The batch that it writes in place counts as made by it.
  const auto is_written_data = [&](const at::Tensor& tensor) {
    return context.before.defined() && given.front().is_same(tensor);
  };
  data.is_indispensable = writes_own;
  std::vector<std::pair<int, at::Tensor>> made_now;
  int index = 0;
  for (const auto& value : last_values(call.outputs(), info.returns_alias.size())) {
    for_each_tensor_at(value, [&](const at::Tensor& tensor, int) {
      const int position = index++;
      const bool is_given =
          std::ranges::any_of(given, [&](const auto& each) { return each.is_same(tensor); });
      const bool is_new = tensor.defined() && (!is_given || is_written_data(tensor));
      if (!is_new) return;
      made_now.emplace_back(position, tensor);
      data.is_indispensable = data.is_indispensable || tensor.requires_grad();
    });
  }
  if (made_now.empty() && !writes_own) return;
  // A view of data is not recorded: its readers keep the content at the time.
  const bool is_of_data = std::ranges::all_of(
      data.tensors, [](const RecordedInput& each) { return each.kept.defined(); });
  if (info.is_view && !data.is_indispensable && is_of_data) return;
  const bool is_too_much = kept_bytes + bytes > options.most_bytes;
  if (!data.is_indispensable && (context.draws || is_too_much)) return note_unkept(call, context);
  if (!at::GradMode::is_enabled()) ++without_gradient;

  data.handle = call_facts(*call.operator_name()).handle;
  data.grad_mode = at::GradMode::is_enabled();
  data.autocast = Autocast::now();
  data.module = module;
  data.generators = std::move(context.generators);
  if (options.program_code) data.caller = options.program_code->caller();
  data.is_on_gradients = std::ranges::any_of(data.tensors, [](const RecordedInput& each) {
    return each.gradient_of.defined() || (each.value && each.value->event->data().is_on_gradients);
  });
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (data.tensors[i].value) depend_on(data, *data.tensors[i].value, given[i]);
    if (data.tensors[i].kept.defined()) note_obstacle(data, given[i]);
  }
  for (RecordedInput& input : data.tensors) {
    if (!input.kept.defined() || !input.is_read || input.is_begun) continue;
    if (version_of(input.kept) != input.version) continue;  // a thread wrote it meanwhile
    if (may_copy_for_an_operator(input.kept)) {
      input.kept = steady(input.kept);
      input.version = version_of(input.kept);
      continue;
    }
    input.sample = content_sample(input.kept);
    if (data.is_indispensable || !data.held.empty()) continue;
    for (const auto& [_, tensor] : made_now) {
      if (!may_copy(tensor)) continue;
      (tensor.device().is_cpu() ? copied_on_host : copied_on_device) += steady_bytes(tensor);
      data.held.push_back(tensor);
    }
  }
  if (is_too_much) {
    data.problem = "more than " + std::to_string(options.most_bytes) +
                   " bytes would have to be kept for " + info.full_name +
                   " (NANLOCATOR_RECORDED_BYTES)";
    data.tensors.clear();
  } else {
    kept_bytes += bytes;
  }
  for (const auto& argument : context.arguments) {
    data.arguments.push_back(without_tensors(argument));
  }
  for (const auto& [position, tensor] : made_now) {
    data.outputs.push_back({position, WeakTensor(tensor.getIntrusivePtr()), version_of(tensor)});
    const bool shares_memory =
        !is_written_data(tensor) && std::ranges::any_of(given, [&](const auto& each) {
          return each.has_storage() && tensor.has_storage() &&
                 each.storage().is_alias_of(tensor.storage());
        });
    made(event, tensor, position, !shares_memory);
  }
  for (const auto& tensor : written) wrote(event, tensor);
  if (writes_gradients) {
    roots.push_back(event);
    for (const at::Tensor& tensor : given) note_written_gradient(tensor);
  }
  forget_the_dead();
}

StepRecorder::StepRecorder(RecorderOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  if (recorder_of_this_thread != nullptr) {
    throw UsageError("this thread's operators are recorded already: one recorder at a time");
  }
  recorder_of_this_thread = impl_.get();
  impl_->paused = 1;
  resume();
}

StepRecorder::~StepRecorder() {
  close();
}

void StepRecorder::close() noexcept {
  if (recorder_of_this_thread != impl_.get()) return;
  pause();
  recorder_of_this_thread = nullptr;
  impl_->clear();
}

void StepRecorder::set_parameters(std::vector<at::Tensor> parameters) {
  impl_->parameters = std::move(parameters);
  impl_->are_gradients_new = true;
  impl_->written_gradients.clear();
  note_weights();
}

void StepRecorder::note_weights() {
  impl_->versions.clear();
  for (const auto& each : impl_->parameters) impl_->versions.push_back(version_of(each));
}

std::vector<at::Tensor> StepRecorder::changed_weights() const {
  std::vector<at::Tensor> changed;
  for (std::size_t i = 0; i < impl_->parameters.size(); ++i) {
    const auto& parameter = impl_->parameters[i];
    if (version_of(parameter) != impl_->versions[i]) changed.push_back(parameter);
  }
  return changed;
}

std::uint64_t StepRecorder::state_of_gradients() const {
  std::uint64_t state = 0;
  for (const auto& parameter : impl_->parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    state = state * 31 + reinterpret_cast<std::uintptr_t>(gradient.unsafeGetTensorImpl());
    state = state * 31 + version_of(gradient);
  }
  return state;
}

std::vector<at::Tensor> StepRecorder::changed_gradients() const {
  std::vector<at::Tensor> changed;
  for (std::size_t i = 0; i < impl_->written_gradients.size(); ++i) {
    if (impl_->gradient_now(i) != impl_->written_gradients[i]) {
      changed.push_back(impl_->parameters[i]);
    }
  }
  return changed;
}

void StepRecorder::pause() noexcept {
  if (impl_->paused++ > 0) return;
  at::removeCallback(impl_->callback);
}

void StepRecorder::resume() {
  if (--impl_->paused > 0) return;
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
  ++impl.step;
  impl.memory.clear();
  impl.functions.clear();
  impl.read.clear();
  impl.backwards = 0;
  impl.kept_bytes = impl.copied_on_host = impl.copied_on_device = 0;
  impl.without_gradient = 0;
  impl.are_gradients_new = true;
  impl.written_gradients.clear();
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
  return Impl::name_of(*found, tensor);
}

void StepRecorder::note_received(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    impl_->note_unrepeated(tensor, {.op = "c10d::recv_", .caller = {}, .is_received = true});
  }
}

void StepRecorder::note_earlier_writes() const {
  for (const auto& [_, each] : impl_->unrepeated) {
    const auto storage = each.storage.lock();
    if (!storage || storage->nbytes() == 0) continue;
    note_earlier_write(bytes_of(c10::Storage(storage)), each.write);
  }
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
  impl_->are_gradients_new = true;
  impl_->note_gradients();
  impl_->read.clear();
  ++impl_->backwards;
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

std::vector<at::Tensor> StepRecorder::unfinished() const {
  std::unordered_set<const RecordedEvent*> used;
  for (const auto& event : needed()) used.insert(event.get());
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
