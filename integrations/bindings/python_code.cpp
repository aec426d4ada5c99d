// Finds the Python line that calls an operator: the user's or a framework's, not torch's or our
// own.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "recorder/recorded_caller.hpp"

namespace py = pybind11;

namespace nanlocator {
namespace {

enum class Owner : std::uint8_t {
  skipped,    // torch, nanlocator, Python's own library: never the place of a fault
  engine,     // torch, where it begins a backward
  framework,  // an installed package, or one of kFrameworks, wherever it is
  user,
  recorded,  // nanlocator, executing a recorded step
};

constexpr auto kFrameworks =
    std::to_array<std::string_view>({"megatron", "transformers", "transformer_engine", "apex",
                                     "deepspeed", "accelerate", "lightning", "pytorch_lightning"});

/// Holds the GIL if the thread has a Python state; a thread without one runs no Python frame.
/// Garbage collection is disabled meanwhile: it would run unrelated finalizers in the middle of an
/// operator, and one that drops a trace would wait for the callback that it runs in.
class Gil {
 public:
  Gil() : has_frames_(Py_IsInitialized() != 0 && PyGILState_GetThisThreadState() != nullptr) {
    if (!has_frames_) return;
    state_ = PyGILState_Ensure();
    collected_garbage_ = PyGC_Disable() != 0;
  }
  ~Gil() {
    if (!has_frames_) return;
    if (collected_garbage_) PyGC_Enable();
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;  // released once
  Gil& operator=(const Gil&) = delete;
  [[nodiscard]] bool has_frames() const noexcept { return has_frames_; }

 private:
  bool has_frames_;
  bool collected_garbage_ = false;
  PyGILState_STATE state_{};
};

/// The folder of an imported package, with a trailing slash: the prefix of its frames' file names.
std::string folder_of(const char* package) {
  const auto file = py::module_::import(package).attr("__file__").cast<std::string>();
  return file.substr(0, file.rfind('/') + 1);
}

std::string folder_of_the_standard_library() {
  return py::module_::import("sysconfig").attr("get_path")("stdlib").cast<std::string>() + "/";
}

bool is_installed(std::string_view file) {
  return file.find("/site-packages/") != std::string_view::npos ||
         file.find("/dist-packages/") != std::string_view::npos;
}

int instruction_of([[maybe_unused]] PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return -1;
#endif
}

/// Everything except the constructor and the destructor runs under the GIL.
class PythonCode final : public ProgramCode {
 public:
  Caller caller() override {
    const Gil gil;
    Caller caller;
    if (!gil.has_frames()) return caller;
    bool is_in_backward = false;
    for_each_frame([&](PyFrameObject* frame, PyCodeObject* code, Owner owner) {
      is_in_backward |= owner == Owner::engine;
      if (owner == Owner::skipped || owner == Owner::engine) return true;
      Position& position = owner == Owner::user ? caller.user : caller.framework;
      if (position.code == nullptr) {
        position = {code, PyFrame_GetLineNumber(frame), instruction_of(frame)};
      }
      return owner != Owner::user;
    });
    caller.is_programs = caller.user.code != nullptr && !is_in_backward;
    if (const Caller* recorded = is_cut_off_ ? RecordedCaller::current() : nullptr) {
      if (caller.user.code == nullptr) caller.user = recorded->user;
      if (caller.framework.code == nullptr) caller.framework = recorded->framework;
    }
    // In a program that lies entirely in a framework, the framework is the user.
    if (caller.user.code == nullptr) caller.user = std::exchange(caller.framework, {});
    return caller;
  }

  bool is_running() override {
    const Gil gil;
    return gil.has_frames() && PyEval_GetFrame() != nullptr;
  }

  std::optional<CodeLine> read(const Position& position) override {
    const Gil gil;
    if (!gil.has_frames() || position.code == nullptr) return std::nullopt;
    try {
      // The handle is a code object, which known_ keeps alive.
      const py::handle code(static_cast<PyObject*>(const_cast<void*>(position.code)));
      CodeLine line;
      line.file = code.attr("co_filename").cast<std::string>();
      line.line = std::max(position.line, 0);
      line.function = function_name(code);
      const auto text = py::module_::import("linecache").attr("getline")(line.file, line.line);
      line.text = py::str(text.attr("strip")()).cast<std::string>().substr(0, kLongestText);
      const auto found = py::module_::import("nanlocator.engine.expressions")
                             .attr("expression_at")(code, position.instruction, text);
      if (!found.is_none()) {
        auto [begin, end, call, arguments] =
            found.cast<std::tuple<int, int, std::string, std::vector<std::string>>>();
        line.expression = Expression{begin, end, std::move(call), std::move(arguments)};
      }
      return line;
    } catch (const py::error_already_set&) {
      return std::nullopt;
    }
  }

  std::vector<std::string> stack() override {
    constexpr std::size_t kMostFrames = 24;
    const Gil gil;
    std::vector<std::string> stack;
    if (!gil.has_frames()) return stack;
    for_each_frame([&](PyFrameObject* frame, PyCodeObject* code, Owner owner) {
      if (owner == Owner::skipped || owner == Owner::engine) return true;
      const py::handle object(reinterpret_cast<PyObject*>(code));
      stack.push_back(object.attr("co_filename").cast<std::string>() + ":" +
                      std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
                      object.attr("co_name").cast<std::string>());
      return stack.size() < kMostFrames;
    });
    return stack;
  }

 private:
  static constexpr std::size_t kLongestText = 200;
  /// Limits the memory for a program that creates functions at run time.
  static constexpr std::size_t kMostFunctions = 100000;

  /// Visits frames from the innermost outwards, until `visit` returns false or the execution of a
  /// recorded step is reached: the program called that step's events from other lines.
  template <typename Visit>
  void for_each_frame(const Visit& visit) {
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    bool goes_on = true;
    is_cut_off_ = false;
    while (frame != nullptr && goes_on) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const Owner owner = owner_of(frame, code);
      is_cut_off_ = owner == Owner::recorded;
      goes_on = !is_cut_off_ && visit(frame, code, owner);
      Py_DECREF(code);
      PyFrameObject* outer = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = outer;
    }
    Py_XDECREF(frame);
  }

  Owner owner_of(PyFrameObject* frame, PyCodeObject* code) {
    if (const auto found = known_.find(code); found != known_.end()) return found->second;
    if (known_.size() >= kMostFunctions) return Owner::skipped;
    const Owner owner = look_up_owner(frame, code);
    Py_INCREF(code);  // keeps its address unique
    known_.emplace(code, owner);
    return owner;
  }

  static bool has_name(PyCodeObject* code, std::string_view name) {
    return py::handle(reinterpret_cast<PyObject*>(code)).attr("co_name").cast<std::string>() ==
           name;
  }

  Owner look_up_owner(PyFrameObject* frame, PyCodeObject* code) {
    // Compares locations of packages, not folder names: a user's folder may have the same name.
    if (own_.empty()) {
      own_ = folder_of("nanlocator");
      torch_ = folder_of("torch");
      library_ = folder_of_the_standard_library();
    }
    const auto file =
        py::handle(reinterpret_cast<PyObject*>(code)).attr("co_filename").cast<std::string>();
    if (file == own_ + "loops/recorder.py" && has_name(code, "run_again")) return Owner::recorded;
    if (file == torch_ + "autograd/graph.py" && has_name(code, "_engine_run_backward")) {
      return Owner::engine;
    }
    // Communication hooks of DistributedDataParallel, which a program chooses.
    if (file.starts_with(torch_ + "distributed/algorithms/ddp_comm_hooks/"))
      return Owner::framework;
    const bool is_ours = file.starts_with(own_) || file.starts_with(torch_) ||
                         file.starts_with("<frozen") || file.starts_with("<eval_with_key>");
    if (is_ours) return Owner::skipped;
    if (file.starts_with(library_) && !is_installed(file)) return Owner::skipped;
    const py::dict globals = py::handle(reinterpret_cast<PyObject*>(frame)).attr("f_globals");
    const std::string module =
        globals.contains("__name__") ? py::str(globals["__name__"]).cast<std::string>() : "";
    const std::string package = module.substr(0, module.find('.'));
    if (package == "torch") return Owner::skipped;  // what Inductor has written
    const bool is_framework =
        is_installed(file) || std::ranges::find(kFrameworks, package) != kFrameworks.end();
    return is_framework ? Owner::framework : Owner::user;
  }

  /// "Attention.forward"; before Python 3.11 "forward".
  static std::string function_name(py::handle code) {
    constexpr std::string_view kLocals = "<locals>.";
    if (!py::hasattr(code, "co_qualname")) return code.attr("co_name").cast<std::string>();
    const auto name = code.attr("co_qualname").cast<std::string>();
    const auto locals = name.rfind(kLocals);
    return locals == std::string::npos ? name : name.substr(locals + kLocals.size());
  }

  std::unordered_map<const PyCodeObject*, Owner> known_;  // holds a reference to each
  std::string own_, torch_, library_;
  bool is_cut_off_ = false;  // the latest walk ended at a recorded step
};

}  // namespace

std::shared_ptr<ProgramCode> python_code() {
  // Never destroyed: Python may be finalized before the process ends.
  static auto& code = *new std::shared_ptr<ProgramCode>(std::make_shared<PythonCode>());
  return code;
}

}  // namespace nanlocator
