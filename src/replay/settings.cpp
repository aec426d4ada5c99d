#include "replay/settings.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <limits>

#include "nanlocator/error.hpp"
#include "nanlocator/replay/operator_call.hpp"
#include "replay/torch_versions.hpp"
#include "tensor/dtypes.hpp"

namespace nanlocator::inline replay_room {
namespace {

at::Context& context() {
  return at::globalContext();
}

constexpr const char* kOn = "on";
constexpr const char* kOff = "off";
std::string on_or_off(bool value) {
  return value ? kOn : kOff;
}
bool is_on(const std::string& text) {
  if (text == kOn || text == kOff) return text == kOn;
  throw UsageError("it must be 'on' or 'off'");
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const auto end = std::min(text.find(' ', begin), text.size());
    if (end > begin) words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

// Autocast is off for a device type exactly if its dispatch key is excluded on this thread. The key
// is also excluded while autocast's own kernel runs the operator that it wraps: the recorded call
// then has cast inputs and is repeated without autocast.
constexpr std::array kAutocastDevices = {at::kCPU, at::kCUDA};

std::string autocast() {
  std::string text;
  for (const auto device : kAutocastDevices) {
    if (!at::autocast::is_autocast_enabled(device)) continue;
    text += std::string(text.empty() ? "" : " ") + (device == at::kCPU ? "cpu " : "cuda ") +
            std::string(torch_name(at::autocast::get_autocast_dtype(device)));
  }
  return text.empty() ? kOff : text;
}

void set_autocast(const std::string& text) {
  const auto words = text == kOff ? std::vector<std::string>() : words_of(text);
  if (words.size() % 2 != 0) throw UsageError("expected pairs of a device type and a dtype");
  for (const auto device : kAutocastDevices) {
    bool is_enabled = false;
    for (std::size_t i = 0; i < words.size(); i += 2) {
      if (words[i] != (device == at::kCPU ? "cpu" : "cuda")) continue;
      const auto dtype = scalar_type_from(words[i + 1]);
      if (!dtype) throw UsageError("unknown dtype '" + words[i + 1] + "'");
      at::autocast::set_autocast_dtype(device, *dtype);
      is_enabled = true;
    }
    at::autocast::set_autocast_enabled(device, is_enabled);
  }
}

std::string deterministic_algorithms() {
  if (!context().deterministicAlgorithms()) return kOff;
  return context().deterministicAlgorithmsWarnOnly() ? "warn" : kOn;
}
void set_deterministic_algorithms(const std::string& text) {
  const bool only_warns = text == "warn";
  context().setDeterministicAlgorithms(only_warns || is_on(text), only_warns);
}

template <Float32Use use>
std::string float32_precision_of() {
  return float32_precision(use);
}
template <Float32Use use>
void set_float32_precision_of(const std::string& text) {
  set_float32_precision(use, text);
}

constexpr const char* kOffWithoutSplitK = "off without split-k";
std::string reduction_text(CublasReduction reduction) {
  return reduction.splits_k ? on_or_off(reduction.is_reduced) : kOffWithoutSplitK;
}
CublasReduction reduction_from(const std::string& text) {
  if (text == kOffWithoutSplitK) return {.is_reduced = false, .splits_k = false};
  return {.is_reduced = is_on(text)};
}

std::string attention_kernels() {
  std::string text;
  if (context().userEnabledFlashSDP()) text += "flash ";
  if (context().userEnabledMemEfficientSDP()) text += "efficient ";
  if (context().userEnabledCuDNNSDP()) text += "cudnn ";
  if (context().userEnabledMathSDP()) text += "math ";
  return text.empty() ? "none" : text.substr(0, text.size() - 1);
}
void set_attention_kernels(const std::string& text) {
  const auto words = words_of(text);
  const auto has = [&](const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  context().setSDPUseFlash(has("flash"));
  context().setSDPUseMemEfficient(has("efficient"));
  context().setSDPUseCuDNN(has("cudnn"));
  context().setSDPUseMath(has("math"));
}

// Torch sets the processor's flags but has no function to read them, so this asks the processor.
bool flushes_denormals() {
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  volatile float one = 1;
  return denormal * one == 0;
}

int threads_from(const std::string& text) {
  try {
    if (const int threads = std::stoi(text); threads >= 1 && threads <= 4096) return threads;
  } catch (const std::logic_error&) {  // not a number, or out of range
  }
  throw UsageError("expected a number of threads from 1 to 4096");
}

struct Setting {
  const char* name;
  std::string (*get)();
  void (*set)(const std::string&);
};

// In alphabetical order, as in docs/replay.md.
const Setting kSettings[] = {
    {"attention_kernels", attention_kernels, set_attention_kernels},
    {"autocast", autocast, set_autocast},
    {"bf16_reduced_precision_reduction", [] { return reduction_text(bf16_cublas_reduction()); },
     [](const std::string& text) { set_bf16_cublas_reduction(reduction_from(text)); }},
    {"cudnn", [] { return on_or_off(context().userEnabledCuDNN()); },
     [](const std::string& text) { context().setUserEnabledCuDNN(is_on(text)); }},
    {"cudnn_benchmark", [] { return on_or_off(context().benchmarkCuDNN()); },
     [](const std::string& text) { context().setBenchmarkCuDNN(is_on(text)); }},
    {"cudnn_deterministic", [] { return on_or_off(context().deterministicCuDNN()); },
     [](const std::string& text) { context().setDeterministicCuDNN(is_on(text)); }},
    {"default_dtype",
     [] { return std::string(torch_name(c10::typeMetaToScalarType(c10::get_default_dtype()))); },
     [](const std::string& text) {
       const auto dtype = scalar_type_from(text);
       if (!dtype) throw UsageError("unknown dtype");
       c10::set_default_dtype(c10::scalarTypeToTypeMeta(*dtype));
     }},
    {"deterministic_algorithms", deterministic_algorithms, set_deterministic_algorithms},
    {"fill_uninitialized_memory",
     [] { return on_or_off(context().deterministicFillUninitializedMemory()); },
     [](const std::string& text) {
       context().setDeterministicFillUninitializedMemory(is_on(text));
     }},
    {"float32_precision.cuda_conv", float32_precision_of<Float32Use::cuda_conv>,
     set_float32_precision_of<Float32Use::cuda_conv>},
    {"float32_precision.cuda_matmul", float32_precision_of<Float32Use::cuda_matmul>,
     set_float32_precision_of<Float32Use::cuda_matmul>},
    {"float32_precision.cuda_rnn", float32_precision_of<Float32Use::cuda_rnn>,
     set_float32_precision_of<Float32Use::cuda_rnn>},
    {"float32_precision.mkldnn_conv", float32_precision_of<Float32Use::mkldnn_conv>,
     set_float32_precision_of<Float32Use::mkldnn_conv>},
    {"float32_precision.mkldnn_matmul", float32_precision_of<Float32Use::mkldnn_matmul>,
     set_float32_precision_of<Float32Use::mkldnn_matmul>},
    {"float32_precision.mkldnn_rnn", float32_precision_of<Float32Use::mkldnn_rnn>,
     set_float32_precision_of<Float32Use::mkldnn_rnn>},
    {"flush_denormal", [] { return on_or_off(flushes_denormals()); },
     [](const std::string& text) {
       if (!context().setFlushDenormal(is_on(text))) throw UsageError("this processor cannot");
     }},
    {"fp16_accumulation", [] { return on_or_off(accumulates_in_fp16()); },
     [](const std::string& text) { set_accumulates_in_fp16(is_on(text)); }},
    {"fp16_reduced_precision_reduction", [] { return reduction_text(fp16_cublas_reduction()); },
     [](const std::string& text) { set_fp16_cublas_reduction(reduction_from(text)); }},
    {"grad_mode", [] { return on_or_off(at::GradMode::is_enabled()); },
     [](const std::string& text) { at::GradMode::set_enabled(is_on(text)); }},
    {"mkldnn", [] { return on_or_off(context().userEnabledMkldnn()); },
     [](const std::string& text) { context().setUserEnabledMkldnn(is_on(text)); }},
    {"mkldnn_deterministic", [] { return on_or_off(context().deterministicMkldnn()); },
     [](const std::string& text) { context().setDeterministicMkldnn(is_on(text)); }},
    {"threads", [] { return std::to_string(at::get_num_threads()); },
     [](const std::string& text) { at::set_num_threads(threads_from(text)); }},
};

// Calls made inside another operator's kernel, below autograd.
constexpr const char* kBelowAutograd = "below_autograd";
std::string below_autograd() {
  return on_or_off(
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality));
}

}  // namespace

std::map<std::string, std::string> current_settings() {
  std::map<std::string, std::string> settings = {{kBelowAutograd, below_autograd()}};
  for (const auto& setting : kSettings) settings[setting.name] = setting.get();
  return settings;
}

std::map<std::string, std::string> current_versions() {
  std::map<std::string, std::string> versions = {
      {"nanlocator", NANLOCATOR_VERSION},
      {"torch", TORCH_VERSION},
      {"cpu", at::get_cpu_capability()},
  };
  if (at::hasCUDA()) {
    const auto& hooks = at::detail::getCUDAHooks();
    versions["cuda"] = std::to_string(hooks.versionCUDART());
    if (hooks.compiledWithCuDNN()) versions["cudnn"] = std::to_string(hooks.versionCuDNN());
  }
  return versions;
}

ScopedSettings::ScopedSettings(const std::map<std::string, std::string>& settings) {
  for (const auto& [name, value] : settings) {
    if (name == kBelowAutograd) {
      if (value == kOn) below_autograd_.emplace();
      continue;
    }
    const auto setting = std::find_if(std::begin(kSettings), std::end(kSettings),
                                      [&](const Setting& known) { return known.name == name; });
    const auto problem = [&](const std::string& why) {
      problems_.push_back("The setting " + name + " = '" + value +
                          "' could not be restored: " + why + ".");
    };
    if (setting == std::end(kSettings)) {
      problem("this version of nanlocator does not know it");
      continue;
    }
    auto before = setting->get();
    if (before == value) continue;
    try {
      setting->set(value);
      before_.emplace_back(name, std::move(before));
    } catch (const std::exception& error) {
      problem(error.what());
    }
  }
}

ScopedSettings::~ScopedSettings() {
  below_autograd_.reset();
  for (const auto& [name, value] : before_) {
    for (const auto& setting : kSettings) {
      if (setting.name != name) continue;
      try {
        setting.set(value);
      } catch (const std::exception&) {  // it was in force before: nothing better can be done here
      }
    }
  }
}

}  // namespace nanlocator::inline replay_room
