// `nanlocator-replay`: executes the operator call of a bundle again and says whether the fault
// comes back. `nanlocator replay` starts it, so that `nanlocator` itself needs no Torch.
//
// Exit code 0: not bad this time, 1: bad again, 2: wrong use or a call that cannot be executed.
#include <dlfcn.h>
#include <unistd.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "command/replay_options.hpp"
#include "files/printable.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/replay/export_python.hpp"
#include "nanlocator/replay/replay.hpp"

namespace nanlocator {
namespace {

constexpr int kClean = 0;
constexpr int kBadAgain = 1;
constexpr int kWrongUse = 2;

using command::Arguments;

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

at::Device device_for(const Arguments& given, const OpenBundle& bundle) {
  const std::string device = given.text("--device");
  if (device.empty()) return recorded_device(bundle);
  try {
    return at::Device(device);
  } catch (const c10::Error&) {
    throw UsageError("--device " + device + ": expected cpu, cuda or cuda:N");
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

int run(const Arguments& given) {
  if (const auto option = command::python_option(given); !option.empty()) {
    throw UsageError(std::string(option) +
                     " needs Python: use nanlocator replay, or python -m nanlocator.replay");
  }
  for (const auto& library : given.texts("--load")) load(library);
  const OpenBundle bundle(given.text("BUNDLE"));
  if (given.has("--export-python")) return write_script(bundle, given.text("--export-python"));
  const at::Device device = device_for(given, bundle);
  load_operators_of(device);
  const auto report = replay(operator_call_of(bundle, device),
                             {.repeats = static_cast<int>(*given.integer("--repeats")),
                              .other_devices = !given.has("--this-device-only"),
                              .cpu_limit = std::nullopt});
  if (given.has("--json")) {
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

int parse_and_run(const std::vector<std::string>& words) {
  try {
    const std::string name = "nanlocator replay";
    const Arguments given = command::parse(command::kReplay, name, words);
    if (!given.asks_for_help) return run(given);
    std::cout << command::help_of(command::kReplay, name, command::help_width());
    return kClean;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // namespace
}  // namespace nanlocator

int main(int argument_count, char** arguments) {
  return nanlocator::parse_and_run({arguments + 1, arguments + argument_count});
}
