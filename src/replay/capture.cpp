#include "nanlocator/replay/capture.hpp"

#include <ATen/Context.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "nanlocator/error.hpp"
#include "replay/storage_ranges.hpp"
#include "replay/values.hpp"
#include "tensor/own_work.hpp"

namespace nanlocator::inline replay_room {
namespace {

/// batch_norm, native_batch_norm, cudnn_batch_norm, instance_norm, ... write their running
/// statistics during training although native_functions.yaml does not mark them.
bool is_unmarked_statistic(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

/// Operators that draw random numbers are tagged nondeterministic_seeded. Composite ones that
/// forward a dropout are not; their schema shows the probability.
bool draws_random_numbers(const c10::OperatorHandle& handle) {
  if (handle.hasTag(at::Tag::nondeterministic_seeded)) return true;
  const auto& arguments = handle.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.name() == "dropout_p" || argument.name() == "dropout" ||
           argument.name() == "generator";
  });
}

CallFacts facts_of(c10::OperatorHandle handle) {
  CallFacts facts{handle, {}, {}, draws_random_numbers(handle)};
  const auto& schema = handle.schema();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const auto* alias = argument.alias_info();
    const bool is_marked = alias != nullptr && alias->isWrite();
    if (!is_marked && !is_unmarked_statistic(argument)) continue;
    facts.written.push_back(i);
    const bool is_returned =
        is_marked && std::any_of(schema.returns().begin(), schema.returns().end(),
                                 [&](const c10::Argument& result) {
                                   return result.alias_info() != nullptr &&
                                          result.alias_info()->beforeSets() == alias->beforeSets();
                                 });
    if (!is_returned) facts.written_unreturned.push_back(i);
  }
  return facts;
}

/// callBoxed passes its whole stack to observers: the operator's own values are the last ones.
template <typename Values>
c10::ArrayRef<c10::IValue> last(const Values& values, std::size_t count) {
  const c10::ArrayRef<c10::IValue> all(values);
  return all.slice(all.size() - std::min(count, all.size()));
}

/// Copies of written tensors up to this size stay on their device: a copy to the host before every
/// in-place operator would take longer than the step.
constexpr std::uint64_t kMostOnDevice = std::uint64_t{256} << 20;

/// Devices whose default generators a call may use: the CPU, and those of its tensors.
std::vector<at::Device> generator_devices(const std::vector<c10::IValue>& arguments) {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  const auto add = [&](const at::Device& device) {
    if (!device.is_cuda() || !device.has_index()) return;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  };
  for (const auto& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { add(tensor.device()); });
    if (value.isDevice()) add(value.toDevice());
  }
  return devices;
}

at::Generator copy_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

}  // namespace

const CallFacts& call_facts(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<c10::OperatorName, std::unique_ptr<CallFacts>>();
  const std::lock_guard lock(mutex);
  if (const auto it = known.find(name); it != known.end()) return *it->second;
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle) {
    throw UnsupportedError("No operator " + c10::toString(name) +
                           " is registered in this process. Load the library that registers it "
                           "(import its Python package, or nanlocator-replay --load FILE.so).");
  }
  return *known.emplace(name, std::make_unique<CallFacts>(facts_of(*handle))).first->second;
}

bool CallCapture::begin(const at::RecordFunction& call, const CallFacts& facts,
                        const MayTake& may_take) {
  *this = CallCapture();
  facts_ = &facts;
  arguments_ = last(call.inputs(), facts.handle.schema().arguments().size()).vec();
  if (arguments_.size() != facts.handle.schema().arguments().size()) return true;  // not boxed
  for (const auto i : facts.written_unreturned) live_written_.push_back(arguments_[i]);
  if (!facts.written.empty() && !copy_what_is_written(may_take)) {
    *this = CallCapture();
    return false;
  }
  if (facts.draws_random_numbers) {
    for (const auto& device : generator_devices(arguments_)) {
      generators_.emplace_back(device.str(), copy_of(at::globalContext().defaultGenerator(device)));
    }
    for (auto& argument : arguments_) {
      if (argument.isGenerator()) argument = copy_of(argument.toGenerator());
    }
  }
  return true;
}

bool CallCapture::copy_what_is_written(const MayTake& may_take) {
  const auto& written = facts_->written;
  const auto bytes = bytes_of(sharing_with(arguments_, written));
  if (!may_take(bytes)) return false;
  bool is_copied = false;
  for (const bool to_host : {false, true}) {
    if (!to_host && bytes > kMostOnDevice) continue;
    try {
      copy_written(arguments_, written, to_host ? &came_from_ : nullptr);
      is_copied = true;
      break;
    } catch (const c10::Error&) {  // no memory there
    }
  }
  if (!is_copied) return false;
  for (const auto& copy : sharing_with(arguments_, written)) {
    own_.insert(copy.storage().unsafeGetStorageImpl());
  }
  return true;
}

void CallCapture::begin(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name) throw UsageError(std::string("Not an operator with a schema: ") + call.name());
  if (!begin(call, call_facts(*name), [](std::uint64_t) { return true; })) {
    throw UnsupportedError("There is no memory for copies of the tensors that " +
                           c10::toString(*name) + " writes.");
  }
}

std::uint64_t CallCapture::bytes(const at::RecordFunction& call) const {
  auto after = live_written_;
  const auto returned = last(call.outputs(), facts_->handle.schema().returns().size());
  after.insert(after.end(), returned.begin(), returned.end());
  return bytes_of(tensors_of(arguments_)) + bytes_of(tensors_of(after));
}

void CallCapture::copy_to_host(std::vector<c10::IValue>& values) {
  const auto is_copied = [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && has_plain_memory(tensor) &&
           own_.contains(tensor.storage().unsafeGetStorageImpl());
  };
  std::vector<at::Tensor> originals;
  for (const auto& tensor : tensors_of(values)) {
    if (!is_copied(tensor)) originals.push_back(tensor);
  }
  const auto copies = copy_together(originals, &came_from_);
  std::size_t next = 0;
  for (auto& value : values) {
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      return is_copied(tensor) ? tensor : copies[next++];
    });
  }
}

OperatorCall CallCapture::end(const at::RecordFunction& call) {
  OperatorCall kept;
  kept.name = facts_->handle.operator_name();
  kept.settings = current_settings();
  kept.arguments = std::move(arguments_);
  copy_to_host(kept.arguments);
  kept.outputs = last(call.outputs(), facts_->handle.schema().returns().size()).vec();
  kept.outputs.insert(kept.outputs.end(), live_written_.begin(), live_written_.end());
  copy_to_host(kept.outputs);
  for (const auto& [device, generator] : generators_) {
    kept.generator_states[device] = generator.get_state();
  }
  kept.came_from = std::move(came_from_);
  *this = CallCapture();
  return kept;
}

}  // namespace nanlocator::inline replay_room
