// `nanlocator-replay`: executes the operator call of a bundle again and says whether the fault
// comes back. `nanlocator replay` starts it, so that `nanlocator` itself needs no Torch.
//
// Exit code 0: not bad this time, 1: bad again, 2: wrong use or a call that cannot be executed.
#include <dlfcn.h>
#include <unistd.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "files/printable.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/replay/export_python.hpp"
#include "nanlocator/replay/replay.hpp"

namespace nanlocator {
namespace {

constexpr int kClean = 0;
constexpr int kBadAgain = 1;
constexpr int kWrongUse = 2;

struct Arguments {
  std::string bundle;
  std::string device;
  int repeats = ReplayOptions().repeats;
  bool as_json = false;
  bool only_this_device = false;
  std::vector<std::string> libraries;
  std::optional<std::string> script;  // "-": standard output
};

/// Where the call ran: the first device that is not the host, without its number.
at::Device recorded_device(const OpenBundle& bundle) {
  at::Device device(at::kCPU);
  auto copy = bundle.bundle();
  copy.module_call.reset();
  for_each_bundle_tensor(copy, [&](const BundleTensor& tensor) {
    if (device.is_cpu() && tensor.device.rfind("cpu", 0) != 0) device = at::Device(tensor.device);
  });
  return device.is_cpu() ? device : at::Device(device.type(), 0);
}

at::Device device_for(const Arguments& arguments, const OpenBundle& bundle) {
  if (arguments.device.empty()) return recorded_device(bundle);
  try {
    return at::Device(arguments.device);
  } catch (const c10::Error&) {
    throw UsageError("--device " + arguments.device + ": expected cpu, cuda or cuda:N");
  }
}

void load(const std::string& library) {
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
  throw UsageError("--load " + library + ": " + ::dlerror());
}

/// Torch's operators on a GPU. They take a second to load, so nothing here is linked with them; and
/// they have to be there before Torch is first asked about a GPU: it remembers the answer.
void load_operators_of(at::Device device) {
  if (!device.is_cuda()) return;
  const bool are_loaded = ::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr ||
                          ::dlopen("libtorch_hip.so", RTLD_NOW | RTLD_GLOBAL) != nullptr;
  if (!are_loaded || at::detail::getCUDAHooks().deviceCount() == 0) {
    throw UsageError("the call is to be executed on " + device.str() +
                     ", and Torch finds no GPU here; on the CPU: --device cpu");
  }
}

int write_script(const OpenBundle& bundle, const std::string& file) {
  const auto script = python_script(bundle);
  if (file == "-") {
    std::cout << script;
    return kClean;
  }
  std::ofstream out(file);
  out << script;
  out.close();
  if (!out) throw IoError("cannot write " + file);
  std::cerr << "wrote " << printable(file) << '\n';
  return kClean;
}

bool came_out_bad(const ReplayReport& report) {
  for (const auto& run : report.runs) {
    if (run.variant != ReplayVariant::recorded) continue;
    for (const auto& output : run.outputs) {
      if (!output.stats.is_finite()) return true;
    }
  }
  return false;
}

ReplayTextStyle style_of_terminal() {
  ReplayTextStyle style;
  style.colour = ::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  return style;
}

int run(const Arguments& arguments) {
  for (const auto& library : arguments.libraries) load(library);
  const OpenBundle bundle(arguments.bundle);
  if (arguments.script) return write_script(bundle, *arguments.script);
  const at::Device device = device_for(arguments, bundle);
  load_operators_of(device);
  const auto report =
      replay(operator_call_of(bundle, device), {.repeats = arguments.repeats,
                                                .other_devices = !arguments.only_this_device,
                                                .cpu_limit = std::nullopt});
  if (arguments.as_json) {
    std::cout << to_json(report) << '\n';
  } else {
    std::cout << format_replay(report, style_of_terminal());
  }
  std::cout.flush();
  if (!std::cout) throw IoError("cannot write the output");
  for (const auto& replayed : report.runs) {
    if (replayed.variant == ReplayVariant::recorded && !replayed.problem.empty()) return kWrongUse;
  }
  return came_out_bad(report) ? kBadAgain : kClean;
}

int fail(const std::string& message) {
  std::cerr << "nanlocator replay: " << printable(message) << '\n';
  return kWrongUse;
}

int parse_and_run(int argument_count, char** argument_values) {
  CLI::App app("Executes the operator call of a bundle again: does the fault come back?",
               "nanlocator replay");
  app.footer(
      "Exit codes: 0 not bad this time, 1 bad again, 2 wrong use or a call that cannot be "
      "executed.\n"
      "Examples:\n"
      "  nanlocator replay nanlocator_run/a0/bundles/step12-backward-rank0-layers.3\n"
      "  nanlocator replay BUNDLE --repeats 20 --json\n"
      "  nanlocator replay BUNDLE --export-python bug.py");
  Arguments arguments;
  app.add_option("BUNDLE", arguments.bundle, "The bundle's folder, or the bundle.json in it")
      ->required();
  app.add_option("--device", arguments.device,
                 "Execute it there: cpu, cuda, cuda:1 (default: the recorded type of device)");
  app.add_option("--repeats", arguments.repeats, "Executions as recorded")->capture_default_str();
  app.add_flag("--this-device-only", arguments.only_this_device,
               "Do not compare with the CPU's kernel");
  app.add_option("--load", arguments.libraries,
                 "A shared library that registers operators; may be given more than once")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--json", arguments.as_json, "Print JSON");
  auto* const script = app.add_option(
      "--export-python", arguments.script,
      "Execute nothing; write a short Python script that does, to FILE or standard output");
  script->expected(0, 1)->type_name("FILE")->default_str("-");
  try {
    app.parse(argument_count, argument_values);
  } catch (const CLI::Success& success) {  // --help
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return fail(std::string(error.what()) + "; see nanlocator replay --help");
  }
  if (script->count() > 0 && (!arguments.script || arguments.script->empty())) {
    arguments.script = "-";
  } else if (script->count() == 0) {
    arguments.script.reset();
  }
  try {
    return run(arguments);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // namespace
}  // namespace nanlocator

int main(int argument_count, char** arguments) {
  return nanlocator::parse_and_run(argument_count, arguments);
}
