// The operator trace.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/operators/kernel_call.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "nanlocator/operators/serialised_operators.hpp"
#include "nanlocator/operators/transfer.hpp"
#include "nanlocator/watch/microbatch_scope.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

DeclaredAs declared_as(const std::string& name) {
  if (name == "parameter") return DeclaredAs::parameter;
  if (name == "buffer") return DeclaredAs::buffer;
  if (name == "data") return DeclaredAs::data;
  if (name == "gradient") return DeclaredAs::gradient;
  throw UsageError("declare: '" + name + "' must be 'parameter', 'buffer', 'data' or 'gradient'");
}

/// Python destroys objects at any time; `close` ends the observation at once.
class ClosableTrace {
 public:
  ClosableTrace(bool keep_calls, std::uint64_t kept_bytes, bool with_stacks, int threads) {
    TraceOptions options;
    options.keep_calls = keep_calls;
    options.kept_bytes = kept_bytes;
    options.threads = threads;
    if (with_stacks) options.program_code = python_code();
    trace_ = std::make_unique<OperatorTrace>(std::move(options));
  }
  ~ClosableTrace() {
    // Waits for callbacks of other threads, which may need the GIL for a stack.
    if (trace_ && PyGILState_Check() != 0) {
      const py::gil_scoped_release release;
      trace_.reset();
    }
  }
  ClosableTrace(const ClosableTrace&) = delete;  // owns the one trace of the process
  ClosableTrace& operator=(const ClosableTrace&) = delete;

  OperatorTrace& get() {
    if (!trace_) throw UsageError("this OperatorTrace is closed; make a new one");
    return *trace_;
  }
  void close() { trace_.reset(); }

 private:
  std::unique_ptr<OperatorTrace> trace_;
};

/// Not a context manager, which would cost two more Python calls.
class PythonKernelCall {
 public:
  PythonKernelCall(const std::string& name, const NamedPairs& arguments) {
    std::vector<KernelArgument> tensors;
    tensors.reserve(arguments.size());
    for (const auto& [argument, tensor] : arguments) tensors.push_back({argument, tensor});
    call_.emplace(name, std::move(tensors));
  }
  void end(const std::vector<at::Tensor>& results) {
    if (call_) call_->end(results);
  }
  void close() { call_.reset(); }
  std::int64_t number() const { return call_ ? call_->number() : 0; }

 private:
  std::optional<KernelCall> call_;
};

}  // namespace

std::vector<NamedTensor> named_tensors(const NamedPairs& pairs) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : pairs) tensors.push_back({name, tensor});
  return tensors;
}

void bind_trace(py::module_& m) {
  m.def(
      "set_current_microbatch",
      [](std::optional<int> microbatch, std::optional<int> chunk) {
        set_current_microbatch({microbatch, chunk});
      },
      "microbatch"_a, "chunk"_a, "What every observer writes beside a module's name.");
  py::class_<PythonKernelCall>(m, "KernelCall",
                               "nanlocator::KernelCall; `close` it on the thread that made it.")
      .def(py::init<const std::string&, const NamedPairs&>(), "name"_a, "arguments"_a, ReleaseGil())
      .def("end", &PythonKernelCall::end, "results"_a, ReleaseGil())
      .def("close", &PythonKernelCall::close, ReleaseGil())
      .def_property_readonly("number", &PythonKernelCall::number);
  py::class_<Transfer>(m, "Transfer", "nanlocator::Transfer.")
      .def(py::init<const std::string&, const std::vector<at::Tensor>&,
                    const std::vector<at::Tensor>&>(),
           "op"_a, "read"_a, "written"_a, ReleaseGil())
      .def("begin_wait", &Transfer::begin_wait, ReleaseGil())
      .def("end", &Transfer::end, ReleaseGil());
  py::class_<SerialisedOperators>(m, "SerialisedOperators", "nanlocator::SerialisedOperators.")
      .def(py::init<>(), ReleaseGil());
  m.def("name_process_group", &name_process_group, "nanlocator::name_process_group.", "group"_a,
        "name"_a, "members"_a, ReleaseGil());
  py::class_<TracedBirth>(m, "TracedBirth")
      .def_readonly("birth", &TracedBirth::birth)
      .def_property_readonly("has_call", [](const TracedBirth& t) { return t.call.has_value(); });
  py::class_<Explanation>(m, "Explanation")
      .def_readonly("births", &Explanation::births)
      .def_readonly("masked", &Explanation::masked)
      .def_readonly("operators", &Explanation::operators)
      .def_readonly("notes", &Explanation::notes);
  // Every call may wait for an operator of another thread that needs the GIL.
  py::class_<ClosableTrace>(m, "OperatorTrace")
      .def(py::init<bool, std::uint64_t, bool, int>(), "keep_calls"_a = true,
           "kept_bytes"_a = std::uint64_t{4} << 30, "with_stacks"_a = true, "threads"_a = 1,
           ReleaseGil())
      .def(
          "declare",
          [](ClosableTrace& t, const at::Tensor& tensor, const std::string& as, std::string name) {
            t.get().declare(tensor, declared_as(as), std::move(name));
          },
          "tensor"_a, "declared_as"_a, "name"_a, ReleaseGil())
      .def(
          "begin_pass", [](ClosableTrace& t) { t.get().begin_pass(); }, ReleaseGil())
      .def(
          "enter_phase",
          [](ClosableTrace& t, const std::optional<std::string>& name) {
            std::optional<Phase> phase;
            if (name) phase = choice<Phase>("phase", *name);
            t.get().enter_phase(phase);
          },
          "phase"_a, ReleaseGil())
      .def(
          "explain",
          [](ClosableTrace& t, const NamedPairs& losses, const NamedPairs& gradients) {
            return t.get().explain(named_tensors(losses), named_tensors(gradients));
          },
          "losses"_a, "gradients"_a, ReleaseGil(), "Both: pairs of name and tensor.")
      .def("pause", [](ClosableTrace& t) { t.get().pause(); })
      .def("resume", [](ClosableTrace& t) { t.get().resume(); })
      .def("close", &ClosableTrace::close, ReleaseGil())
      .def(
          "__enter__", [](ClosableTrace& t) -> ClosableTrace& { return t; },
          py::return_value_policy::reference)
      .def("__exit__", [](ClosableTrace& t, const py::args&) {
        const py::gil_scoped_release release;
        t.close();
      });
}

}  // namespace nanlocator
