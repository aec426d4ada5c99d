// A library for tests/pytorch/test_replay_coverage.py: keeps the first call of every distinct
// operator that a process makes and writes each as a bundle. Plain C functions, for ctypes.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "nanlocator/replay/capture.hpp"

namespace nanlocator::testing {
namespace {

struct Sampler {
  std::mutex mutex;
  std::set<std::string> seen;
  std::map<std::string, OperatorCall> calls;
  std::map<std::string, std::string> problems;
  at::CallbackHandle handle = 0;
};
Sampler& sampler() {
  static auto& instance = *new Sampler();
  return instance;
}

struct Context : at::ObserverContext {
  std::string op;
  std::optional<CallCapture> capture;
};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  auto context = std::make_unique<Context>();
  const auto name = call.operator_name();
  if (!name) return context;
  const auto op = c10::toString(*name);
  {
    const std::lock_guard lock(sampler().mutex);
    if (!op.starts_with("aten::") || !sampler().seen.insert(op).second) return context;
  }
  try {
    context->op = op;
    context->capture.emplace();
    context->capture->begin(call);
  } catch (const std::exception& error) {
    context->capture.reset();
    const std::lock_guard lock(sampler().mutex);
    sampler().problems[op] = error.what();
  }
  return context;
}

void on_end(const at::RecordFunction& call, at::ObserverContext* base) {
  auto& context = static_cast<Context&>(*base);
  if (!context.capture) return;
  try {
    auto kept = context.capture->end(call);
    const std::lock_guard lock(sampler().mutex);
    sampler().calls[context.op] = std::move(kept);
  } catch (const std::exception& error) {
    const std::lock_guard lock(sampler().mutex);
    sampler().problems[context.op] = error.what();
  }
}

}  // namespace
}  // namespace nanlocator::testing

using namespace nanlocator;

extern "C" {

__attribute__((visibility("default"))) void operator_sampler_start() {
  auto& sampler = testing::sampler();
  sampler.handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&testing::on_start, &testing::on_end)
                                .needsInputs(true)
                                .needsOutputs(true)
                                .scopes({at::RecordScope::FUNCTION}));
}

/// Stops and writes bundles below `run_dir`; returns their number. Problems go to stderr.
__attribute__((visibility("default"))) int operator_sampler_write(const char* run_dir) {
  auto& sampler = testing::sampler();
  at::removeCallback(sampler.handle);
  const at::RecordFunctionGuard unobserved(false);
  BundleStore store(run_dir, {.bytes = std::numeric_limits<std::uint64_t>::max(),
                              .count = std::numeric_limits<int>::max()});
  int written = 0;
  for (const auto& [op, call] : sampler.calls) {
    try {
      Bundle bundle;
      bundle.birth.sighting.op = op;
      bundle.birth.sighting.module = op;  // the folder is named after it
      StorageCollector storages;
      add_to_bundle(call, bundle, storages);
      const auto contents = storages.finish(bundle);
      if (store.write(bundle, contents).empty()) throw std::runtime_error("dropped");
      ++written;
    } catch (const std::exception& error) {
      sampler.problems[op] = error.what();
    }
  }
  for (const auto& [op, problem] : sampler.problems) {
    std::fprintf(stderr, "%s: %s\n", op.c_str(), problem.c_str());
  }
  return written;
}

}  // extern "C"
