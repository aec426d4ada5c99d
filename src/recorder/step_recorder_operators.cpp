#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>

#include "nanlocator/replay/capture.hpp"
#include "operators/call_values.hpp"
#include "recorder/step_recorder_impl.hpp"

namespace nanlocator::inline recorder_room {
namespace {

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

/// Leaves out its tensors, which `Data::tensors` names or keeps.
c10::IValue without_tensors(const c10::IValue& argument) {
  if (argument.isTensor()) return at::Tensor();
  if (!argument.isList()) return argument;
  auto copy = argument.toList().copy();
  for (std::size_t i = 0; i < copy.size(); ++i) {
    if (c10::IValue(copy.get(i)).isTensor()) copy.set(i, at::Tensor());
  }
  return copy;
}

std::uint64_t bytes_kept_for(const at::Tensor& tensor) {
  const bool is_weight = tensor.is_leaf() && tensor.requires_grad();
  return is_weight || !tensor.has_storage() ? 0 : tensor.nbytes();
}

/// For a tensor that no event has made.
void note_obstacle(RecordedEvent::Data& data, const at::Tensor& tensor) {
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    data.problem = "a tensor of " + tensor.grad_fn()->name() +
                   " is used that was computed where nobody watched";
  }
}

}  // namespace

static bool fills_with_zeros(const OperatorInfo& info, const std::vector<c10::IValue>& arguments) {
  if (!info.is_filler) return false;
  return arguments.size() == 1 || (arguments[1].isScalar() && arguments[1].toScalar().equal(0));
}

std::unique_ptr<StepRecorder::Impl::Context> StepRecorder::Impl::start(
    const at::RecordFunction& call, const OperatorInfo& info) {
  refused.clear();
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
    start_exchange(*context);
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
    const bool is_ours = is_new_data(data) && !parameters.have_in_gradients(data);
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

/// Whether an error of the operator may be about its inputs' values. What one that has run out of
/// memory was given is not kept alive.
static bool may_refuse(const OperatorInfo& info) {
  constexpr auto kRefusing = std::to_array<std::string_view>(
      {"linalg", "cholesky", "eig", "svd", "lstsq", "inverse", "multinomial", "bernoulli",
       "binomial", "poisson", "normal", "binary_cross_entropy", "assert"});
  return info.is_custom || std::ranges::any_of(kRefusing, [&](std::string_view part) {
           return info.name.find(part) != std::string::npos;
         });
}

void StepRecorder::Impl::note_refused(const Context& context) {
  if (!may_refuse(*context.info)) return;
  for (const auto& argument : context.arguments) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      if (tensor.defined() && tensor.is_floating_point()) refused.push_back(tensor);
    });
  }
}

/// The program reads a number: keeps the losses that it was computed from until they are used or
/// the step ends. Ignores numbers of an earlier step, and numbers after a backward.
void StepRecorder::Impl::note_read(const at::RecordFunction& call) {
  if (backwards > 0) return note_checked(call);
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

/// After a backward, the program asks for a number of its gradients: whether they are finite.
void StepRecorder::Impl::note_checked(const at::RecordFunction& call) {
  for (const auto& argument : call.inputs()) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      const Known* const found = find(tensor);
      const bool is_of_gradients = found != nullptr
                                       ? found->event->data().is_on_gradients
                                       : tensor.defined() && parameters.have_in_gradients(tensor);
      has_checked_gradients = has_checked_gradients || is_of_gradients;
    });
  }
}

/// The program has put what it computed of a gradient into another tensor of its size.
void StepRecorder::Impl::note_taken(const RecordedEvent::Data& data, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point()) return;
  has_taken_gradients =
      has_taken_gradients || std::ranges::any_of(data.tensors, [&](const RecordedInput& input) {
        return input.gradient_of.defined() && tensor.numel() >= input.gradient_of.numel();
      });
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

RecordedInput StepRecorder::Impl::input_of(const at::Tensor& tensor, std::uint32_t version,
                                           bool is_written) {
  RecordedInput input;
  input.version = version;
  const auto* found = tensor.defined() ? find(tensor) : nullptr;
  const bool is_of_an_event = found != nullptr && memory_of(tensor) != nullptr;
  if (is_of_an_event) {
    if (!is_written) check_gradient(*found, tensor);
    input.value = name_of(*found, tensor);
  } else if (const auto parameter = parameters.index_of(tensor)) {
    input.gradient_of = parameters[*parameter];
  } else if (auto place = parameters.place_of(tensor)) {
    input.gradient_of = parameters[place->first];
    input.view = std::move(place->second);
  } else if (found != nullptr) {
    input.value = name_of(*found, tensor);
  } else {
    // A part of what the step has made, by something that is no operator: `.data[0]`.
    const OwnMemory* const own = unrepeated.of(tensor) == nullptr ? memory_of(tensor) : nullptr;
    if (own != nullptr) {
      if (auto write = write_of(*own->maker)) unrepeated.note(tensor, *std::move(write));
    }
    input.kept = tensor;
  }
  return input;
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
  note_unrepeated(context, written);
}

void StepRecorder::Impl::note_unrepeated(const Context& context,
                                         std::span<const at::Tensor> written) {
  unrepeated.note(*context.info, context.arguments, context.draws, written,
                  [&](const at::Tensor& tensor) {
                    const Known* const found = find(tensor);
                    return found ? write_of(*found->event) : std::nullopt;
                  });
}

bool StepRecorder::Impl::moves_data(const Context& context) {
  const auto is_data = [&](const at::Tensor& tensor) {
    const Known* const found = find(tensor);
    const bool is_made = found != nullptr && write_of(*found->event).has_value();
    return !is_made && unrepeated.of(tensor) == nullptr && !parameters.contain(tensor);
  };
  bool are_data = context.info->moves_values;
  for (std::size_t i = 0; are_data && i < context.arguments.size(); ++i) {
    if (context.info->arguments[i] != ArgumentUse::read) continue;
    for_each_tensor_at(context.arguments[i], [&](const at::Tensor& tensor, int) {
      are_data = are_data && (!tensor.defined() || is_data(tensor));
    });
  }
  return are_data;
}

std::string StepRecorder::Impl::too_much_for(std::string_view what) const {
  return "more than " + std::to_string(options.most_bytes) + " bytes would have to be kept for " +
         std::string(what) + " (NANLOCATOR_RECORDED_BYTES)";
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
        input = input_of(tensor, version, info.arguments[i] != ArgumentUse::read);
      }
      input.argument = i;
      input.element = element;
      input.is_read = !info.is_view && info.arguments[i] != ArgumentUse::overwritten;
      const auto* own = memory_of(tensor);
      const bool is_alias = input.value && input.value->is_detached;  // counts for itself
      if (input.is_read && !is_alias && own != nullptr && own->version != version) {
        data.problem = "a tensor was written to by something that is not an operator";
      }
      if (info.arguments[i] != ArgumentUse::read) {
        unrepeated.note_write_in_order(tensor);
        writes_gradients = writes_gradients || input.gradient_of.defined();
        const bool is_of_step = own != nullptr || input.gradient_of.defined() || is_begun;
        if (!is_of_step) elsewhere.push_back(tensor);
        const bool may_be_weight = own == nullptr || parameters.contain(tensor);
        const at::Tensor* const weight = may_be_weight ? parameters.holder_of(tensor) : nullptr;
        if (weight != nullptr && !(is_loading && moves_data(context))) {
          parameters.note_program_write(*weight, {.op = info.full_name, .caller = caller_now()});
        }
        if (own != nullptr) written.push_back(tensor);
      }
      if (input.kept.defined()) bytes += bytes_kept_for(input.kept);
      given.push_back(tensor);
      data.tensors.push_back(std::move(input));
    });
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    const bool is_written = info.arguments[data.tensors[i].argument] != ArgumentUse::read;
    if (is_written && !data.tensors[i].gradient_of.defined()) note_taken(data, given[i]);
  }
  // Writes to memory from elsewhere are not recorded: its readers keep its content at the time.
  const bool writes_own = !written.empty() || writes_gradients || context.before.defined();
  if (!elsewhere.empty()) return note_unrepeated(context, elsewhere);

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
  if (!info.is_view) {
    for (const auto& made : made_now) note_taken(data, made.second);
  }
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
    data.problem = too_much_for(info.full_name);
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
    const bool are_zeroed = fills_with_zeros(info, context.arguments);
    for (const at::Tensor& tensor : given) {
      parameters.note_write(tensor);
      if (are_zeroed) parameters.note_zeroed(tensor);
    }
  }
  forget_the_dead();
}

}  // namespace nanlocator::inline recorder_room
