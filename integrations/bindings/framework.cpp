// A capability of the contract needs a virtual method of Framework, its line here, and its method
// in Python.
#include "framework.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "kernel_call.hpp"
#include "module_call.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "operator_registration.hpp"

namespace py = pybind11;

namespace nanlocator {
namespace {

using OptimizerTensors =
    std::vector<std::tuple<std::int64_t, std::string, at::Tensor, std::int64_t>>;
using Views = std::pair<std::vector<std::int64_t>, std::vector<at::Tensor>>;
using Microbatches = std::vector<std::tuple<int, std::optional<int>, std::vector<std::string>>>;
using Run = std::function<void()>;

std::vector<GradientView> views_of(const Views& views) {
  return gradient_views(views.first, views.second, {});
}

/// Python calls it with the GIL; `run` is called without. Needs the GIL.
py::cpp_function callable(const Run& run) {
  return py::cpp_function([&run] { released(run); });
}

std::optional<CodeLine> code_line(const py::handle& from) {
  if (from.is_none()) return std::nullopt;
  const auto [file, line, function, text] =
      from.cast<std::tuple<std::string, int, std::string, std::string>>();
  return CodeLine{file, line, function, text};
}

/// Converts a nanlocator.exchange.stream_sanitizer.StreamAccess.
UnorderedAccess stream_access(const py::handle& from) {
  UnorderedAccess access;
  access.is_write = from.attr("is_write").cast<bool>();
  access.transfer = from.attr("other_operator").cast<std::string>();
  access.other = Concurrent::stream;
  access.op = from.attr("operator").cast<std::string>();
  access.phase = from.attr("is_backward").cast<bool>() ? Phase::backward : Phase::forward;
  access.parameter = from.attr("parameter").cast<std::string>();
  access.transfer_code = code_line(from.attr("other_line"));
  access.code = code_line(from.attr("line"));
  return access;
}

/// Every call takes the GIL. `adapter_` holds no state of the step (engine/driver.py).
class PythonFramework final : public Framework {
 public:
  explicit PythonFramework(py::object adapter) : adapter_(std::move(adapter)) {}

  ParameterMap parameter_map() override { return adapter_.call<ParameterMap>("parameter_map"); }
  Phase gradient_phase() override {
    return choice<Phase>("gradient_phase", adapter_.get<std::string>("gradient_phase"));
  }
  std::vector<GradientView> gradients() override {
    return views_of(adapter_.call<Views>("gradients"));
  }
  std::vector<GradientView> weights() override { return views_of(adapter_.call<Views>("weights")); }
  std::vector<NamedTensor> parameters() override {
    return named_tensors(adapter_.call<NamedPairs>("parameters_now"));
  }
  std::vector<NamedTensor> buffers() override {
    return named_tensors(adapter_.call<NamedPairs>("buffers_now"));
  }
  ModelTensors model_tensors() override {
    const auto [parameters, buffers] =
        adapter_.call<std::pair<NamedPairs, NamedPairs>>("model_tensors");
    return {named_tensors(parameters), named_tensors(buffers)};
  }
  std::vector<OptimizerTensor> optimizer_state(const std::vector<std::int64_t>& ids) override {
    std::vector<OptimizerTensor> tensors;
    for (auto& [id, name, tensor, offset] :
         adapter_.call<OptimizerTensors>("optimizer_state", ids)) {
      tensors.push_back({id, name, tensor, offset});
    }
    return tensors;
  }

  bool has_loss_scaler() override { return !adapter_.lacks("loss_scale"); }
  std::optional<LossScale> loss_scale() override {
    return loss_scale_of(adapter_.call<PythonScale>("loss_scale"));
  }
  bool skips_bad_updates() override { return adapter_.call<bool>("skips_bad_updates"); }
  std::string why_no_pass() override { return adapter_.get<std::string>("why_no_pass"); }
  bool can_trace_later_steps() override { return adapter_.get<bool>("can_trace_later_steps"); }
  void on_verdict(const Verdict& verdict) override {
    adapter_.call<void>("on_verdict", to_json(verdict));
  }

  std::shared_ptr<ProgramCode> program_code() override { return python_code(); }

  bool keeps_calls() override { return true; }
  void keep_calls(const std::vector<Birth>& births, const Run& run) override {
    const py::gil_scoped_acquire gil;
    std::vector<std::string> modules;
    std::vector<std::pair<std::string, std::int64_t>> kernels;
    for (const auto& birth : births) {
      modules.push_back(birth.sighting.module);
      if (birth.kernel_call) kernels.emplace_back(birth.sighting.op, *birth.kernel_call);
    }
    adapter_.call<void>("keep_calls", modules, kernels, callable(run));
  }
  void add_module_call(const Birth& birth, Bundle& bundle, StorageCollector& storages,
                       BundleContents& contents) override {
    const py::gil_scoped_acquire gil;
    add_registration(bundle, contents);
    const auto kept = adapter_.call<py::object>("module_call", birth.sighting.module);
    if (!kept.is_none()) kept.cast<const PythonModuleCall&>().add_to(bundle, storages, contents);
  }
  std::optional<KeptKernelCall> take_kernel_call(const Birth& birth) override {
    const py::gil_scoped_acquire gil;
    const auto kept =
        adapter_.call<py::object>("kernel_call", birth.sighting.op, birth.kernel_call);
    if (kept.is_none()) return std::nullopt;
    return kept_kernel_call(kept);
  }

  bool has_compiled_parts() override { return adapter_.call<bool>("has_compiled_parts"); }
  void set_eager(bool is_eager) override { adapter_.call<void>("set_eager", is_eager); }
  bool can_serialise() override { return true; }
  void set_serialised(bool is_serialised) override {
    adapter_.call<void>("set_serialised", is_serialised);
  }
  bool has_streams() override { return adapter_.call<bool>("has_streams"); }
  std::vector<UnorderedAccess> sanitise_streams(const Run& run) override {
    const py::gil_scoped_acquire gil;
    std::vector<UnorderedAccess> accesses;
    for (const auto& each : adapter_.call<py::list>("sanitise_streams", callable(run))) {
      accesses.push_back(stream_access(each));
    }
    return accesses;
  }
  void abort_collectives() noexcept override {
    try {
      adapter_.call<void>("abort_collectives");
    } catch (...) {
      // A collective that could not be aborted ends by its own time-out.
    }
  }

 private:
  PythonObject adapter_;
};

class PythonPass final : public StepPass {
 public:
  explicit PythonPass(py::object step_pass) : pass_(std::move(step_pass)) {}

  std::vector<NamedTensor> run() override {
    return named_tensors(pass_.call<NamedPairs>("run_unblocked"));
  }
  void clear_gradients() override { pass_.call<void>("clear_gradients"); }
  std::vector<std::string> changed_data() override {
    return pass_.call<std::vector<std::string>>("changed_data");
  }
  bool leaves_out_reduction() override { return pass_.call<bool>("leaves_out_reduction"); }
  std::string unseen_reads() override { return pass_.call<std::string>("unseen_reads"); }
  bool repeats_compiled_code() override { return pass_.call<bool>("repeats_compiled_code"); }
  std::optional<std::string> obstacle() override {
    return pass_.call<std::optional<std::string>>("obstacle");
  }
  std::vector<Microbatch> microbatches() override {
    std::vector<Microbatch> all;
    for (auto& [number, chunk, tensors] : pass_.call<Microbatches>("microbatches")) {
      all.push_back({number, chunk, tensors});
    }
    return all;
  }

 private:
  PythonObject pass_;
};

}  // namespace

std::optional<LossScale> loss_scale_of(const PythonScale& scale) {
  if (!scale) return std::nullopt;
  return LossScale{std::get<0>(*scale), std::get<1>(*scale), std::get<2>(*scale)};
}

std::shared_ptr<Framework> python_framework(py::object adapter) {
  return std::make_shared<PythonFramework>(std::move(adapter));
}

std::shared_ptr<StepPass> python_pass(py::object step_pass) {
  return std::make_shared<PythonPass>(std::move(step_pass));
}

}  // namespace nanlocator
