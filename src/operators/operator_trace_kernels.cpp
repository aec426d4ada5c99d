#include "nanlocator/operators/kernel_call.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <set>
#include <utility>

#include "operators/operator_trace_impl.hpp"
#include "tensor/extent.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline operators_room {

void OperatorTrace::Impl::start_kernel(const std::string& name, std::int64_t number,
                                       std::span<const KernelArgument> arguments,
                                       ThreadFrames& frames) {
  Place here = current_place(frames);
  if (here.is_called_by_program || here.caller.user.code == nullptr) here.caller = caller_now();
  here.frame = name;
  Frame& frame = frames.push();
  frame.kind = FrameKind::container;
  frame.name = name;
  frame.start = clock.load(std::memory_order_relaxed);
  frame.module = current_module();
  frame.given = std::make_shared<Given>();
  here.given = frame.given;
  frame.kernel = std::make_shared<const Place>(here);
  frame.kernel_call = number;
  std::vector<c10::IValue> given;
  for (const auto& argument : arguments) given.emplace_back(argument.tensor);
  scan_given(c10::ArrayRef<const c10::IValue>(given.data(), given.size()), here, frame, frames);
}

namespace {

struct KernelOutput {
  at::Tensor values;
  std::string role;
  Content content = Content::finite;
};

std::vector<KernelOutput> outputs_of(std::span<const KernelArgument> arguments,
                                     std::span<const at::Tensor> results) {
  std::vector<KernelOutput> outputs;
  const auto add = [&](const at::Tensor& tensor, std::string role) {
    const bool is_known = std::ranges::any_of(outputs, [&](const KernelOutput& each) {
      return tensor.defined() && each.values.is_same(tensor);
    });
    at::Tensor values = is_known ? at::Tensor() : values_of(tensor);
    if (values.defined()) outputs.push_back({std::move(values), std::move(role)});
  };
  for (const auto& [name, tensor] : arguments) add(tensor, name);
  for (std::size_t i = 0; i < results.size(); ++i) {
    add(results[i], "output[" + std::to_string(i) + "]");
  }
  return outputs;
}

/// Waits for all streams, because a kernel may use one of its own.
void wait_for_devices_of(const std::vector<KernelOutput>& outputs) {
  std::set<c10::DeviceIndex> devices;
  for (const auto& output : outputs) {
    if (output.values.is_cuda()) devices.insert(output.values.device().index());
  }
  for (const auto device : devices) at::detail::getCUDAHooks().deviceSynchronize(device);
}

}  // namespace

void OperatorTrace::Impl::settle_unclear(Frame& frame, ThreadFrames& frames) {
  std::erase_if(frame.unclear, [&](const UnclearArgument& argument) {
    BirthIds origins;
    {
      const std::lock_guard lock(mutex);
      origins = lineage.births_in(argument.values);  // an operator inside read it
    }
    if (origins.empty()) {
      const TensorStats now = stats_of(argument.values, options.threads);
      if (now.fingerprint != argument.fingerprint) return false;
      origins = origins_of(argument.values, frames, frame.name);
    }
    const std::lock_guard lock(mutex);
    frame.given->add(argument.content, origins);
    return true;
  });
}

/// A kernel quantises what it is given into bytes: births go with them.
void OperatorTrace::Impl::note_bytes_of_kernel(std::span<const KernelArgument> arguments,
                                               const Frame& frame) {
  const std::string* const name = intern_name(frame.name);
  const std::lock_guard lock(mutex);
  for (const auto& [_, tensor] : arguments) {
    if (!has_own_memory(tensor) || is_plainly_observable(tensor)) continue;
    if (!lineage.known_of(tensor).is_unwritten()) continue;
    const std::uint64_t now = clock.fetch_add(1) + 1;
    if (frame.given->with_any.empty()) {
      lineage.note_bytes(tensor, now, name, frame.kernel);
    } else {
      lineage.note_bad_write(tensor, now, name, frame.given->with_any, Content::finite);
    }
  }
}

void OperatorTrace::Impl::finish_kernel(std::span<const KernelArgument> arguments,
                                        std::span<const at::Tensor> results, ThreadFrames& frames) {
  Frame& frame = *frames.top();
  const std::string* const name = intern_name(frame.name);
  auto outputs = outputs_of(arguments, results);
  wait_for_devices_of(outputs);
  scan_received(frame, frames);
  settle_unclear(frame, frames);
  note_bytes_of_kernel(arguments, frame);
  std::vector<const KernelOutput*> made;
  Content worst = Content::finite;
  for (auto& output : outputs) {
    output.content = content_of(output.values);
    const std::lock_guard lock(mutex);
    if (output.content == Content::finite) {
      const bool is_given = frame.given->has_input(output.values);
      const bool is_filled = lineage.known_of(output.values).is_unwritten();
      if (is_filled || !is_given) {
        lineage.note_finite_write(output.values, clock.fetch_add(1) + 1, name, false);
      }
      continue;
    }
    if (!lineage.births_in(output.values).empty()) continue;  // from an operator inside, or given
    made.push_back(&output);
    worst = std::max(worst, output.content);
  }
  if (made.empty()) return;

  BirthIds origins = passed_through(*frame.kernel, worst);
  if (origins.empty()) {
    const KernelOutput& shown = **std::ranges::find(made, worst, &KernelOutput::content);
    origins = {add_kernel_birth(frame, arguments, shown.values, shown.role, frames)};
  }
  const std::lock_guard lock(mutex);
  const std::uint64_t now = clock.fetch_add(1) + 1;
  for (const KernelOutput* output : made) {
    lineage.note_bad_write(output->values, now, name, origins, output->content);
  }
  for (std::size_t i = 1; Frame* outer = frames.above(i); ++i) {
    if (outer->given != nullptr) outer->given->add(worst, origins);
    if (outer->kind == FrameKind::node || outer->kind == FrameKind::evaluate) break;
  }
}

BirthId OperatorTrace::Impl::add_kernel_birth(const Frame& frame,
                                              std::span<const KernelArgument> arguments,
                                              const at::Tensor& values, const std::string& role,
                                              ThreadFrames& frames) {
  Root root = find_root(values, frames);
  const bool is_left_unwritten = root.kind == BirthKind::unwritten;
  const bool is_unwritten = is_left_unwritten || (frame.has_bad_unwritten && is_fresh_memory_nan());
  root.kind = is_unwritten              ? BirthKind::unwritten
              : frame.given->has_unread ? BirthKind::opaque
                                        : BirthKind::kernel;
  root.inside = *frame.kernel;
  const BirthId id = add_root(root, values, frames, frame.name);
  std::vector<Operand> operands;
  for (const auto& [name, tensor] : arguments) {
    if (!tensor.defined() || operands.size() >= kMostOperands) continue;
    if (is_plainly_observable(tensor) && is_bad(tensor)) {  // an output without a value before
      Operand made;
      made.name = name;
      made.dtype = dtype_name(tensor.scalar_type());
      made.shape = tensor.sizes().vec();
      operands.push_back(std::move(made));
    } else {
      operands.push_back(operand_of(name, tensor, options.threads));
    }
  }
  const std::lock_guard lock(mutex);
  Birth& birth = births[static_cast<std::size_t>(id)].birth;
  birth.sighting.role = role;
  birth.kernel_call = frame.kernel_call;
  const bool was_given_garbage = frame.has_bad_unwritten || !frame.unclear.empty();
  birth.last_seen = is_unwritten || was_given_garbage ? LastSeen::allocated : LastSeen::finite;
  if (!is_unwritten || is_left_unwritten) birth.reader.clear();
  birth.extent = extent_of(values, birth.sighting.stats.nonfinite());
  birth.operands = std::move(operands);
  return id;
}

}  // namespace nanlocator::inline operators_room
