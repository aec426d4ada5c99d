#include "replay/execute.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "replay/settings.hpp"
#include "replay/storage_ranges.hpp"
#include "replay/values.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/own_work.hpp"

namespace nanlocator::inline replay_room {
namespace {

at::ScalarType converted(at::ScalarType from, at::ScalarType to) {
  if (at::isComplexType(from)) return at::toComplexType(to);
  return at::isFloatingType(from) ? to : from;
}

at::Tensor converted(const at::Tensor& tensor, at::ScalarType to) {
  const auto type = converted(tensor.scalar_type(), to);
  if (type == tensor.scalar_type()) return tensor;
  const OwnWork guard;
  auto copy = tensor.detach().to(type);
  if (tensor.requires_grad()) copy.set_requires_grad(true);
  return copy;
}

/// Sets the generators of `states`' devices, and restores them.
class ScopedGenerators {
 public:
  explicit ScopedGenerators(const std::map<std::string, at::Tensor>& states) {
    for (const auto& [device, state] : states) {
      auto generator = at::globalContext().defaultGenerator(at::Device(device));
      const std::lock_guard lock(generator.mutex());
      before_.emplace_back(generator, generator.get_state());
      generator.set_state(state);
    }
  }
  ~ScopedGenerators() {
    for (auto& [generator, state] : before_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  ScopedGenerators(const ScopedGenerators&) = delete;  // strictly nested
  ScopedGenerators& operator=(const ScopedGenerators&) = delete;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> before_;
};

/// Autocast caches its casts of weights by address; a replay's casts must neither hit that cache
/// nor stay in it.
class WithoutAutocastCache {
 public:
  WithoutAutocastCache() : was_on_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(was_on_); }
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;  // strictly nested
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;

 private:
  bool was_on_;
};

class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

/// Arguments with copies of the tensors that the operator writes, and of tensors that share memory
/// with them.
std::vector<c10::IValue> fresh_arguments(const OperatorCall& call, const CallFacts& facts) {
  auto arguments = call.arguments;
  copy_written(arguments, facts.written);
  for (const auto i : facts.written) {
    // A leaf that requires a gradient cannot be written; the recorded tensor was not a leaf.
    for_each_tensor(arguments[i], [](const at::Tensor& tensor) {
      if (tensor.requires_grad() && tensor.is_leaf()) tensor.set_requires_grad(false);
    });
  }
  for (auto& argument : arguments) {
    if (argument.isGenerator()) argument = argument.toGenerator().clone();
  }
  return arguments;
}

}  // namespace

OperatorCall with_precision(const OperatorCall& call, at::ScalarType dtype) {
  auto result = call;
  const auto& schema = call_facts(call.name).handle.schema();
  for (std::size_t i = 0; i < result.arguments.size(); ++i) {
    auto& value = result.arguments[i];
    if (is_dtype(schema.arguments().at(i)) && value.isInt()) {
      const auto type = static_cast<at::ScalarType>(value.toInt());
      value = static_cast<std::int64_t>(converted(type, dtype));
    } else {
      value =
          map_tensors(value, [&](const at::Tensor& tensor) { return converted(tensor, dtype); });
    }
  }
  result.settings["autocast"] = "off";
  result.settings["default_dtype"] = torch_name(dtype);
  return result;
}

OperatorCall on_recorded_devices(const OperatorCall& call) {
  auto result = call;
  if (call.came_from.empty()) return result;
  const auto back = bring_back(tensors_of(call.arguments), call.came_from);
  std::size_t next = 0;
  for (auto& value : result.arguments) {
    value = map_tensors(value, [&](const at::Tensor&) { return back[next++]; });
  }
  return result;
}

OperatorCall on_host(const OperatorCall& call) {
  const OwnWork guard;
  auto result = call;
  for (auto& value : result.arguments) {
    value = map_tensors(value, [](const at::Tensor& tensor) {
      if (tensor.is_cpu()) return tensor;
      auto copy = tensor.detach().cpu();
      if (tensor.requires_grad()) copy.set_requires_grad(true);
      return copy;
    });
    if (value.isDevice()) value = at::Device(at::kCPU);
  }
  std::erase_if(result.generator_states, [](const auto& state) { return state.first != "cpu"; });
  return result;
}

std::vector<c10::IValue> execute(const OperatorCall& call, std::vector<std::string>& problems) {
  const auto& facts = call_facts(call.name);
  const at::RecordFunctionGuard unobserved(false);
  const c10::impl::ExcludeDispatchKeyGuard without_python_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard unwarned(&silence);
  const WithoutAutocastCache without_cache;

  auto arguments = fresh_arguments(call, facts);
  auto stack = arguments;
  const ScopedGenerators generators(call.generator_states);
  {
    const ScopedSettings settings(call.settings);
    problems = settings.problems();
    facts.handle.callBoxed(stack);
  }
  for (const auto i : facts.written_unreturned) stack.push_back(arguments[i]);
  return stack;
}

}  // namespace nanlocator::inline replay_room
