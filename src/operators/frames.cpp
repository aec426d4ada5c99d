#include "operators/frames.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace nanlocator::inline operators_room {
namespace {

bool is_accumulate_grad(std::string_view node) {
  return node.ends_with("AccumulateGrad");
}

/// True for operators that the engine and AccumulateGrad dispatch themselves: input_buffer.cpp,
/// accumulate_grad.h, and validate_outputs of engine.cpp, which fits a gradient to its input's
/// shape and dtype.
bool may_be_the_engines(const Frame& operation, bool in_accumulate_grad) {
  constexpr auto kFits = std::to_array<std::string_view>(
      {"aten::add", "aten::add_", "aten::to", "aten::_to_copy", "aten::sum"});
  constexpr auto kStores = std::to_array<std::string_view>(
      {"aten::detach", "aten::clone", "aten::copy_", "aten::empty_like", "aten::empty_strided",
       "aten::new_empty_strided", "aten::_indices", "aten::_values"});
  const std::string_view name = operation.info->name;
  if (std::find(kFits.begin(), kFits.end(), name) != kFits.end()) return true;
  return in_accumulate_grad && std::find(kStores.begin(), kStores.end(), name) != kStores.end();
}

}  // namespace

void Frame::reset() {
  kind = FrameKind::operation;
  info = nullptr;
  is_ignored = has_arguments = is_captured = records = is_custom = node_has_run = false;
  arguments.clear();
  before_write.clear();
  resized = {};
  bytes_not_captured = 0;
  start = 0;
  nested.clear();
  sent.clear();
  name.clear();
  given.reset();
  received.clear();
  kernel.reset();
  has_bad_unwritten = false;
  unclear.clear();
  forward_thread = 0;
  sequence = -1;
  hooks.clear();
  module = nullptr;
}

Frame& ThreadFrames::push() {
  if (depth_ == frames_.size()) frames_.push_back(std::make_unique<Frame>());
  Frame& frame = *frames_[depth_++];
  frame.reset();
  return frame;
}

void ThreadFrames::pop() {
  Frame& frame = *frames_[--depth_];
  if (frame.kind == FrameKind::node || frame.kind == FrameKind::evaluate) --backward_depth;
  if (frame.is_captured) frame.capture = CallCapture();
  frame.arguments.clear();  // release the tensors
  frame.received.clear();
  frame.unclear.clear();
  frame.is_captured = false;
}

ThreadFrames& this_thread_frames() {
  thread_local ThreadFrames frames;
  return frames;
}

bool is_custom_node(const std::string& name) {
  // Generated nodes end in "Backward" and a digit; the others of torch/csrc/autograd/functions are
  // in one of Torch's namespaces or listed here. C++ custom functions are CppNode<...>.
  if (name.find("CppNode") != std::string::npos) return true;
  if (name.starts_with("torch::autograd::")) return false;
  constexpr auto kEngines =
      std::to_array<std::string_view>({"CopySlices", "CopyBackwards", "GraphRoot", "UndefinedGrad",
                                       "UndefinedGradBackward", "AccumulateGrad", "NotImplemented",
                                       "DelayedError", "Error", "Identity", "Scatter", "Gather"});
  if (std::find(kEngines.begin(), kEngines.end(), name) != kEngines.end()) return false;
  const auto digits = name.find_last_not_of("0123456789");
  if (digits == std::string::npos || digits + 1 == name.size()) return true;
  return !std::string_view(name).substr(0, digits + 1).ends_with("Backward");
}

std::string custom_function_of(std::string_view frame) {
  constexpr std::string_view kBackward = "Backward";
  constexpr std::string_view kNode = "CppNode<";
  if (const auto begin = frame.find(kNode); begin != std::string_view::npos) {
    frame.remove_prefix(begin + kNode.size());
    return std::string(frame.substr(0, frame.rfind('>')));
  }
  if (frame.ends_with(kBackward)) frame.remove_suffix(kBackward.size());
  const bool is_torchs = frame == "CheckpointFunction" || frame == "CompiledFunction";
  return is_torchs ? std::string() : std::string(frame);
}

Location locate_frames(ThreadFrames& frames, bool is_in_backward) {
  Location location;
  const Frame* outermost_operation = nullptr;  // below the node or evaluate_function
  for (std::size_t i = 0; Frame* frame = frames.above(i); ++i) {
    switch (frame->kind) {
      case FrameKind::operation:
        outermost_operation = frame;
        break;
      case FrameKind::passage:
        break;
      case FrameKind::container:
        if (location.container == nullptr) location.container = frame;
        break;
      case FrameKind::node:
        location.is_backward = true;
        location.node = frame->name;
        location.node_frame = frame;
        location.is_after_gradient = is_accumulate_grad(frame->name);
        location.is_hook = location.is_after_gradient && outermost_operation != nullptr &&
                           !may_be_the_engines(*outermost_operation, true);
        return location;
      case FrameKind::evaluate:
        location.is_backward = true;
        location.node = frame->name;
        location.is_after_gradient = frame->node_has_run && is_accumulate_grad(frame->name);
        if (frame->node_has_run) {
          location.node_frame = frame;
        } else {
          location.evaluate_frame = frame;
        }
        location.is_hook =
            outermost_operation != nullptr &&
            !(frame->node_has_run && may_be_the_engines(*outermost_operation, false));
        return location;
    }
  }
  // What a communication hook does with a reduced bucket (reducer.cpp, finalize_backward).
  const bool is_hook = frames.is_of_gloo && is_in_backward;
  location.is_backward = location.is_hook = location.is_after_gradient = is_hook;
  return location;
}

const Frame* collective_around(ThreadFrames& frames) {
  for (std::size_t i = 1; const Frame* each = frames.above(i); ++i) {
    if (each->kind == FrameKind::operation && each->info->collective) return each;
  }
  return nullptr;
}

}  // namespace nanlocator::inline operators_room
