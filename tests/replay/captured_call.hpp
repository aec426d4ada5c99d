// Captures the last call of one operator while a function runs, as the operator trace does.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "nanlocator/replay/capture.hpp"

namespace nanlocator::testing {

struct CaptureState {
  std::string op;  // "aten::div.Tensor"
  std::optional<OperatorCall> call;
  std::string problem;
};
inline CaptureState& capture_state() {
  static thread_local CaptureState state;
  return state;
}

struct CaptureContext : at::ObserverContext {
  std::optional<CallCapture> capture;
};

inline std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  auto context = std::make_unique<CaptureContext>();
  const auto name = call.operator_name();
  try {
    if (name && c10::toString(*name) == capture_state().op) {
      context->capture.emplace();
      context->capture->begin(call);
    }
  } catch (const std::exception& error) {
    capture_state().problem = error.what();
  }
  return context;
}

inline void on_end(const at::RecordFunction& call, at::ObserverContext* context) {
  auto& capture = static_cast<CaptureContext*>(context)->capture;
  if (!capture) return;
  try {
    capture_state().call = capture->end(call);
  } catch (const std::exception& error) {
    capture_state().problem = error.what();
  }
}

/// The last call of `op` that `compute` makes on this thread.
inline OperatorCall captured(const std::string& op, const std::function<void()>& compute) {
  capture_state() = {op, std::nullopt, ""};
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_start, &on_end)
                                                     .needsInputs(true)
                                                     .needsOutputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  compute();
  at::removeCallback(handle);
  if (!capture_state().problem.empty()) throw std::runtime_error(capture_state().problem);
  if (!capture_state().call) throw std::runtime_error(op + " was not called");
  return *capture_state().call;
}

}  // namespace nanlocator::testing
