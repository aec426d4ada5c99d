#include "nanlocator/step/step_state.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>

#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/tensor/scan_one.hpp"

namespace nanlocator::inline step_room {
namespace {

/// Buffers up to this number of elements are copied at every save: batch norm's kernels write
/// running statistics without changing the version (aten/src/ATen/native/Normalization.cpp).
constexpr std::int64_t kSmallBuffer = 1 << 16;

constexpr const char* kCpu = "cpu";

std::optional<std::uint32_t> version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return std::nullopt;  // inference tensors have no counter
  return tensor._version();
}

/// True for a large buffer without a write since `version`.
bool is_unchanged(const at::Tensor& tensor, std::optional<std::uint32_t> version) {
  return tensor.numel() > kSmallBuffer && version && version_of(tensor) == version;
}

/// Compares values of small buffers, because batch norm writes statistics without changing the
/// version.
bool has_moved(const at::Tensor& tensor, const at::Tensor& copy,
               std::optional<std::uint32_t> version) {
  const bool fits = copy.defined() && copy.options().type_equal(tensor.options()) &&
                    copy.sizes() == tensor.sizes();
  if (!fits || tensor.numel() > kSmallBuffer) return version_of(tensor) != version;
  return !at::equal(tensor, copy);
}

/// Hidden from autograd: a graph that waits for its backward may have saved `tensor`, whose values
/// will be the same again.
void put(const at::Tensor& values, const at::Tensor& tensor) {
  tensor.variable_data().copy_(values);
}

at::Generator generator_of(const std::string& device) {
  if (device == kCpu) return at::detail::getDefaultCPUGenerator();
  return at::globalContext().defaultGenerator(at::Device(device));
}

}  // namespace

void StepState::set_buffers(std::function<std::vector<NamedTensor>()> buffers) {
  buffers_now_ = std::move(buffers);
  buffers_.clear();
}

/// The program may have replaced a buffer's tensor; copies of the others stay valid.
void StepState::find_buffers() {
  if (!buffers_now_) return;
  auto now = buffers_now_();
  std::erase_if(now, [](const NamedTensor& each) { return !each.tensor.defined(); });
  buffers_.resize(now.size());
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (buffers_[i].tensor.is_same(now[i].tensor)) continue;
    buffers_[i] = {std::move(now[i].name), std::move(now[i].tensor), {}, {}};
  }
}

void StepState::add(std::string name, std::function<void()> save, std::function<void()> restore) {
  entries_.push_back({std::move(name), std::move(save), std::move(restore), {}});
}

void StepState::save() {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  generators_ = generator_states();
  find_buffers();
  for (auto& buffer : buffers_) {
    // A module may give its buffer another dtype (`buffer.data = ...`, Megatron's expert bias).
    const bool fits = buffer.copy.defined() &&
                      buffer.copy.options().type_equal(buffer.tensor.options()) &&
                      buffer.copy.sizes() == buffer.tensor.sizes();
    if (fits && is_unchanged(buffer.tensor, buffer.version)) continue;
    if (!fits) buffer.copy = at::empty_like(buffer.tensor);
    buffer.copy.copy_(buffer.tensor, /*non_blocking=*/true);
    buffer.version = version_of(buffer.tensor);
  }
  for (auto& entry : entries_) {
    entry.problem.clear();
    try {
      entry.save();
    } catch (const std::exception& error) {
      entry.problem = error.what();
    }
  }
}

std::vector<std::string> StepState::restore() {
  if (generators_.empty()) throw UsageError("StepState::restore: call save before the step.");
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  std::vector<std::string> problems;
  set_generator_states(generators_);
  for (auto& buffer : buffers_) {
    if (is_unchanged(buffer.tensor, buffer.version)) continue;
    try {
      put(buffer.copy, buffer.tensor);
      buffer.version = version_of(buffer.tensor);
    } catch (const std::exception& error) {
      problems.push_back("buffer " + buffer.name + ": " + error.what());
    }
  }
  for (const auto& entry : entries_) {
    if (!entry.problem.empty()) {
      problems.push_back(entry.name + ": " + entry.problem);
      continue;
    }
    try {
      entry.restore();
    } catch (const std::exception& error) {
      problems.push_back(entry.name + ": " + error.what());
    }
  }
  return problems;
}

void StepState::put_back_bad_buffers() {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  const auto is_finite = [](const at::Tensor& tensor) {
    const auto stats = nanlocator::scan_one(tensor);
    return !stats || stats->is_finite();
  };
  for (auto& buffer : buffers_) {
    if (!buffer.copy.defined() || !has_moved(buffer.tensor, buffer.copy, buffer.version)) continue;
    if (is_finite(buffer.tensor) || !is_finite(buffer.copy)) continue;
    put(buffer.copy, buffer.tensor);
    buffer.version.reset();
  }
}

StepState::End StepState::end() const {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  End end{generator_states(), {}};
  for (const auto& buffer : buffers_) {
    const bool is_moved = has_moved(buffer.tensor, buffer.copy, buffer.version);
    end.buffers.push_back(is_moved ? buffer.tensor.clone() : at::Tensor());
  }
  return end;
}

void StepState::go_on_from(const End& end) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unobserved(false);
  set_generator_states(end.generators);
  for (std::size_t i = 0; i < buffers_.size() && i < end.buffers.size(); ++i) {
    auto& buffer = buffers_[i];
    const bool is_moved = has_moved(buffer.tensor, buffer.copy, buffer.version);
    const auto& first_end = end.buffers[i];
    if (is_moved == first_end.defined()) continue;
    // Only one pass has changed it: the step did more, or less, than the repeated pass.
    put(is_moved ? buffer.copy : first_end, buffer.tensor);
    buffer.version.reset();
  }
}

std::map<std::string, at::Tensor> StepState::generator_states() {
  std::map<std::string, at::Tensor> states;
  std::vector<std::string> devices = {kCpu};
  // Only if CUDA is already in use: a query would create its context.
  if (at::globalContext().hasCUDA()) {
    const auto& cuda = at::detail::getCUDAHooks();
    for (at::DeviceIndex i = 0; i < cuda.deviceCount(); ++i) {
      if (cuda.hasPrimaryContext(i)) devices.push_back("cuda:" + std::to_string(i));
    }
  }
  for (const auto& device : devices) {
    auto generator = generator_of(device);
    const std::lock_guard lock(generator.mutex());
    states.emplace(device, generator.get_state());
  }
  return states;
}

void StepState::set_generator_states(const std::map<std::string, at::Tensor>& states) {
  for (const auto& [device, state] : states) {
    auto generator = generator_of(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace nanlocator::inline step_room
