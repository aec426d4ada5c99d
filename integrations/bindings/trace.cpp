// The operator trace.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/trace/microbatch_scope.hpp"
#include "nanlocator/trace/operator_trace.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<NamedTensor> named(const NamedTensors& pairs) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : pairs) tensors.push_back({name, tensor});
  return tensors;
}

DeclaredAs declared_as(const std::string& name) {
  if (name == "parameter") return DeclaredAs::parameter;
  if (name == "buffer") return DeclaredAs::buffer;
  if (name == "data") return DeclaredAs::data;
  throw UsageError("declare: '" + name + "' must be 'parameter', 'buffer' or 'data'");
}

/// Python ends an object when it likes; `close` ends the observation at once.
class ClosableTrace {
 public:
  ClosableTrace(bool keep_calls, std::uint64_t kept_bytes, bool with_stacks, int threads) {
    TraceOptions options;
    options.keep_calls = keep_calls;
    options.kept_bytes = kept_bytes;
    options.threads = threads;
    if (with_stacks) options.python_stack = &python_stack;
    trace_ = std::make_unique<OperatorTrace>(std::move(options));
  }
  ~ClosableTrace() {
    // Waits for callbacks of other threads, which may want the GIL for a stack.
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

/// The folder of a package that is imported, with a slash at its end, as its frames' files begin.
std::string folder_of(const char* package) {
  const auto file = py::module_::import(package).attr("__file__").cast<std::string>();
  return file.substr(0, file.rfind('/') + 1);
}

}  // namespace

std::vector<std::string> python_stack() {
  constexpr std::size_t kMostFrames = 24;
  if (Py_IsInitialized() == 0) return {};
  const py::gil_scoped_acquire gil;
  // Where the packages are, not what a folder is called: a user's own may be named so, too.
  const auto own = folder_of("nanlocator");
  const auto torch = folder_of("torch");
  std::vector<std::string> stack;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && stack.size() < kMostFrames) {
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    const auto file = code.attr("co_filename").cast<std::string>();
    const bool is_ours =
        file.starts_with(own) || file.starts_with(torch) || file.starts_with("<frozen");
    if (!is_ours) {
      stack.push_back(file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
                      code.attr("co_name").cast<std::string>());
    }
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return stack;
}

void bind_trace(py::module_& m) {
  m.def(
      "set_current_microbatch",
      [](std::optional<int> microbatch, std::optional<int> chunk) {
        set_current_microbatch({microbatch, chunk});
      },
      "microbatch"_a, "chunk"_a, "What every observer writes beside a module's name.");
  py::class_<TracedBirth>(m, "TracedBirth")
      .def_readonly("birth", &TracedBirth::birth)
      .def_property_readonly("has_call", [](const TracedBirth& t) { return t.call.has_value(); });
  py::class_<Explanation>(m, "Explanation")
      .def_readonly("births", &Explanation::births)
      .def_readonly("healed", &Explanation::healed)
      .def_readonly("operators", &Explanation::operators)
      .def_readonly("notes", &Explanation::notes);
  // Every call may wait for an operator of another thread that wants the GIL.
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
            if (name) phase = phase_from_name(*name);
            if (name && !phase) throw UsageError("unknown phase '" + *name + "'");
            t.get().enter_phase(phase);
          },
          "phase"_a, ReleaseGil())
      .def(
          "explain",
          [](ClosableTrace& t, const NamedTensors& losses, const NamedTensors& gradients) {
            return t.get().explain(named(losses), named(gradients));
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
