#include "nanlocator/replay/replay.hpp"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/tensor/scan_tensor.hpp"
#include "replay/attention.hpp"
#include "replay/conclusion.hpp"
#include "replay/execute.hpp"
#include "replay/first_bad.hpp"
#include "replay/host_memory.hpp"
#include "replay/poison.hpp"
#include "replay/values.hpp"
#include "replay/work.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline replay_room {
namespace {

struct NamedOutput {
  std::string name;
  at::Tensor tensor;  // undefined if it could not be kept
};

void append(const std::string& name, const c10::IValue& value, std::vector<NamedOutput>& outputs) {
  if (value.isTensor()) {
    outputs.push_back({name, value.toTensor()});
  } else if (value.isList()) {
    const auto items = value.toListRef();
    for (std::size_t i = 0; i < items.size(); ++i) {
      append(name + "[" + std::to_string(i) + "]", items[i], outputs);
    }
  }
}

/// "output[0]" for returned values, "running_mean after" for arguments that are only written.
std::vector<NamedOutput> named_outputs(const std::vector<c10::IValue>& values,
                                       const CallFacts& facts) {
  const auto& schema = facts.handle.schema();
  std::vector<NamedOutput> outputs;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto returns = schema.returns().size();
    if (i < returns) {
      append("output[" + std::to_string(i) + "]", values[i], outputs);
    } else if (i - returns < facts.written_unreturned.size()) {
      const auto argument = facts.written_unreturned[i - returns];
      append(schema.arguments()[argument].name() + " after", values[i], outputs);
    }
  }
  return outputs;
}

/// The elements in row-major order in host memory, conjugation and negation resolved.
at::Tensor on_host_in_order(const at::Tensor& tensor) {
  return tensor.detach().resolve_neg().resolve_conj().cpu().contiguous();
}

bool have_equal_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  const auto x = on_host_in_order(a);
  const auto y = on_host_in_order(b);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool is_comparable(const at::Tensor& tensor) {
  return tensor.defined() && has_plain_memory(tensor) && is_backed(tensor);
}

ReplayedOutput scanned(const NamedOutput& output) {
  ReplayedOutput result;
  result.name = output.name;
  if (!output.tensor.defined()) {
    result.dtype = "undefined";
    return result;
  }
  result.dtype = torch_name(output.tensor.scalar_type());
  if (output.tensor.is_nested()) return result;
  result.shape = output.tensor.sizes().vec();
  result.stats.numel = output.tensor.numel();
  if (is_comparable(output.tensor) && why_not_scannable(output.tensor) == nullptr) {
    result.stats = scan_tensors({on_host_in_order(output.tensor)}).front();
    // The scan sees a complex number as two real ones.
    if (output.tensor.is_complex() && result.stats.first_bad >= 0) result.stats.first_bad /= 2;
  }
  return result;
}

std::optional<bool> compared(const NamedOutput& again, const NamedOutput& recorded) {
  if (again.tensor.defined() != recorded.tensor.defined()) return std::nullopt;
  if (!again.tensor.defined()) return true;
  if (!is_comparable(again.tensor) || !is_comparable(recorded.tensor)) return std::nullopt;
  if (again.tensor.scalar_type() != recorded.tensor.scalar_type()) return std::nullopt;
  return have_equal_bits(again.tensor, recorded.tensor);
}

/// Allocators: their results contain chance values, and no two calls need to agree.
bool returns_unwritten_memory(const OperatorCall& call) {
  const auto& name = call.name.name;
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty") ||
         name.starts_with("aten::resize");
}

/// Executes one variant and describes it.
ReplayRun run_of(ReplayVariant variant, int repeat, const OperatorCall& call,
                 const std::vector<NamedOutput>& recorded, std::vector<std::string>& problems) {
  ReplayRun run;
  run.variant = variant;
  run.repeat = repeat;
  try {
    const auto values = execute(call, problems);
    const OwnWork guard;
    const auto outputs = named_outputs(values, call_facts(call.name));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      auto output = scanned(outputs[i]);
      if (i < recorded.size() && !returns_unwritten_memory(call)) {
        output.equals_recorded = compared(outputs[i], recorded[i]);
      }
      run.outputs.push_back(std::move(output));
    }
  } catch (const std::exception& error) {
    run.problem = first_line(error);
  }
  return run;
}

at::Device device_of(const OperatorCall& call) {
  at::Device device(at::kCPU);
  for (const auto& value : call.arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.is_cpu()) device = tensor.device();
    });
  }
  return device;
}

/// Bytes of the widest and the narrowest real element among floating-point arguments and outputs.
struct Widths {
  std::size_t narrowest = 8;
  bool has_floating = false;
};
Widths widths_of(const OperatorCall& call) {
  Widths widths;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.is_floating_point() && !tensor.is_complex()) return;
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    widths.has_floating = true;
    widths.narrowest = std::min<std::size_t>(
        widths.narrowest, c10::elementSize(c10::toRealValueType(tensor.scalar_type())));
  };
  for (const auto& value : call.arguments) for_each_tensor(value, look);
  for (const auto& value : call.outputs) for_each_tensor(value, look);
  return widths;
}

/// For a pointwise operator, the elements from which it computed the first bad element; for others,
/// the first non-finite element of each input that has one.
std::vector<ReplayedInput> inputs_at_first_bad(const OperatorCall& call, const CallFacts& facts,
                                               const std::vector<ReplayedOutput>& recorded) {
  const auto bad = std::find_if(recorded.begin(), recorded.end(), [](const ReplayedOutput& output) {
    return !output.stats.is_finite();
  });
  if (bad == recorded.end()) return {};
  const FirstBad first_bad{.index = unravel_index(bad->stats.first_bad, bad->shape),
                           .shape = bad->shape,
                           .is_pointwise = facts.handle.hasTag(at::Tag::pointwise)};
  std::vector<ReplayedInput> inputs;
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& value = call.arguments[i];
    if (!value.isTensor() || !is_comparable(value.toTensor())) continue;
    const auto& tensor = value.toTensor();
    auto element = element_at_first_bad(tensor, first_bad);
    if (!element) continue;
    inputs.push_back({facts.handle.schema().arguments()[i].name(),
                      std::string(torch_name(tensor.scalar_type())), std::move(element->index),
                      element->value});
  }
  return inputs;
}

/// "" if an execution on the CPU is within the limit.
std::string why_too_large(const Work& work, const ReplayOptions& options) {
  if (!options.cpu_limit) return "";
  // Copies of the arguments and of the outputs with twice the width, beside the recorded ones.
  const double most_bytes =
      std::min(options.cpu_limit->bytes, static_cast<double>(free_host_memory()) / 6);
  const auto exceeds = [](double amount, double most, const char* unit) {
    return "too large for the CPU: " + number_text(amount, 2) + " " + unit + "; the limit is " +
           number_text(most, 2) + ".";
  };
  if (work.flops > options.cpu_limit->flops) {
    return exceeds(work.flops, options.cpu_limit->flops, "FLOPs");
  }
  return work.bytes > most_bytes ? exceeds(work.bytes, most_bytes, "bytes") : "";
}

/// Those that multiply many elements of one tensor, or raise them to a power.
bool has_powers(std::string_view name) {
  constexpr std::array<std::string_view, 7> kParts = {
      "prod", "det", "matrix_power", "matrix_exp", "pow", "multi_dot", "vector_norm"};
  if (name.find("logdet") != std::string_view::npos) return false;  // of a singular matrix: -Inf
  return name == "aten::norm" || std::ranges::any_of(kParts, [&](std::string_view part) {
           return name.find(part) != std::string_view::npos;
         });
}

}  // namespace

ReplayReport replay(const OperatorCall& recorded_call, const ReplayOptions& options) {
  if (options.repeats < 1) {
    throw UsageError("replay: " + std::to_string(options.repeats) +
                     " repeats; at least 1 is needed");
  }
  const auto& facts = call_facts(recorded_call.name);
  ReplayReport report;
  report.op = c10::toString(recorded_call.name);
  OperatorCall call;
  try {
    call = on_recorded_devices(recorded_call);
  } catch (const c10::Error& error) {
    report.sentences.push_back(std::string("Not replayed: too large for its device: ") +
                               error.what_without_backtrace());
    return report;
  }
  std::vector<NamedOutput> recorded;
  ConclusionEvidence evidence;
  {
    const OwnWork guard;
    recorded = named_outputs(call.outputs, facts);
    for (const auto& output : recorded) report.recorded.push_back(scanned(output));
    report.inputs_at_first_bad = inputs_at_first_bad(call, facts, report.recorded);
  }
  const auto device = device_of(call);
  const std::string too_large = why_too_large(work_of(call), options);
  if (device.is_cpu() && !too_large.empty()) {
    report.sentences.push_back("Not replayed: " + too_large);
    return report;
  }
  {
    const OwnWork guard;
    for (const auto& value : call.arguments) {
      if (value.isDouble() || value.isInt()) {
        const double number = value.toScalar().toDouble();
        evidence.largest_number = std::max(evidence.largest_number, std::abs(number));
      }
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_comparable(tensor) || why_not_scannable(tensor) != nullptr) return;
        evidence.inputs.push_back(scan_tensors({on_host_in_order(tensor)}).front());
      });
    }
  }

  std::vector<std::string> problems;
  const auto run = [&](ReplayVariant variant, int repeat, const OperatorCall& variant_call) {
    std::vector<std::string> unused;
    auto& kept = variant == ReplayVariant::recorded ? problems : unused;
    report.runs.push_back(run_of(variant, repeat, variant_call, recorded, kept));
  };
  for (int i = 0; i < options.repeats; ++i) run(ReplayVariant::recorded, i, call);
  {
    const PoisonedAllocations poison(device);
    auto poisoned = call;
    if (!device.is_cpu()) {  // the recorded settings would switch the filling off again
      poisoned.settings["deterministic_algorithms"] = "warn";
      poisoned.settings["fill_uninitialized_memory"] = "on";
    }
    run(ReplayVariant::poisoned, 0, poisoned);
  }
  if (const auto widths = widths_of(call); widths.has_floating) {
    const auto formula = !report.recorded.empty() && !report.recorded[0].stats.is_finite()
                             ? attention_by_formula(call)
                             : std::nullopt;
    const OperatorCall& wide = formula ? *formula : call;
    if (widths.narrowest < 4) run(ReplayVariant::float32, 0, with_precision(wide, at::kFloat));
    if (widths.narrowest < 8) run(ReplayVariant::float64, 0, with_precision(wide, at::kDouble));
  }
  if (options.other_devices && !device.is_cpu()) {
    if (too_large.empty()) {
      run(ReplayVariant::on_cpu, 0, on_host(call));
    } else {
      report.runs.push_back({ReplayVariant::on_cpu, 0, {}, too_large});
    }
  }

  const std::string_view name = call.name.name;
  evidence.is_custom = !name.starts_with("aten::") && !name.starts_with("prims::");
  evidence.has_powers = has_powers(name);
  evidence.is_pointwise = facts.handle.hasTag(at::Tag::pointwise);
  conclude(report, evidence);
  report.sentences = sentences_of(report);
  report.sentences.insert(report.sentences.end(), problems.begin(), problems.end());
  return report;
}

}  // namespace nanlocator::inline replay_room
