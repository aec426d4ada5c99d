// The running calls of this thread, innermost last, and the data that forward operators leave for
// backward ones.
//
// A frame is an operator with a schema, or a container without one: a custom autograd function, a
// compiled region, the engine's evaluate_function, a node of backward. Frames belong to their
// thread and need no lock.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "nanlocator/replay/capture.hpp"
#include "nanlocator/scan/content.hpp"
#include "nanlocator/watch/module_scope.hpp"
#include "operators/operator_info.hpp"
#include "operators/place.hpp"
#include "operators/torch_versions.hpp"

namespace nanlocator::inline operators_room {

enum class FrameKind : std::uint8_t {
  operation,  // has a schema
  container,  // a custom function's forward, a compiled region
  passage,    // Torch's own name around operators: "detach"
  evaluate,   // autograd::engine::evaluate_function: hooks, the node, accumulation
  node,       // the node's own backward
};

/// An in-place argument, or one that shares its storage, before the call.
struct BeforeWrite {
  const c10::TensorImpl* tensor = nullptr;
  Content content = Content::finite;
  BirthIds births;
};

/// A bad kernel argument without a known writer. It was an input if the call leaves it
/// unchanged, else memory to be filled.
struct UnclearArgument {
  at::Tensor values;
  Content content = Content::finite;  // before the call, as the fingerprint
  std::uint64_t fingerprint = 0;
};

/// The storage passed to resize_ or set_, before the call.
struct ResizedStorage {
  const c10::StorageImpl* storage = nullptr;
  std::size_t bytes = 0;
};

struct Frame {
  FrameKind kind = FrameKind::operation;
  const OperatorInfo* info = nullptr;
  /// Inside an allocator, which may fill its memory with NaN on purpose, or inside a copy that the
  /// frame above reports. Nothing here is scanned.
  bool is_ignored = false;
  bool has_arguments = false;
  std::vector<c10::IValue> arguments;  // one per argument of the schema
  std::vector<BeforeWrite> before_write;
  ResizedStorage resized;
  bool is_captured = false;
  std::uint64_t bytes_not_captured = 0;  // size of a capture that did not fit
  CallCapture capture;
  std::uint64_t start = 0;  // the trace's clock
  BirthIds nested;          // births that calls inside made or passed on
  BirthIds sent;            // of a collective: births in its inputs
  double largest_sent = 0;  // of a reduction: the largest finite magnitude in them

  // Containers, nodes and evaluate_function. Operations, if autograd records them:
  std::string name;  // without "autograd::engine::evaluate_function: "
  /// Containers and custom nodes: their inputs, and bad values that operators inside made since.
  /// The trace's lock guards the pointee.
  std::shared_ptr<Given> given;
  std::vector<at::Tensor> received;  // by collectives inside; scanned when the frame ends
  /// The place of a KernelCall; null otherwise.
  std::shared_ptr<const Place> kernel;
  std::int64_t kernel_call = 0;    // number of a KernelCall
  bool has_bad_unwritten = false;  // an argument was bad memory without a known write
  std::vector<UnclearArgument> unclear;
  std::uint64_t forward_thread = 0;
  std::int64_t sequence = -1;
  bool records = false;         // a node: autograd records its computation (create_graph)
  bool is_custom = false;       // a node that Torch does not define
  bool node_has_run = false;    // evaluate: its node has run
  std::vector<BirthId> hooks;   // evaluate: births of hooks; the node supplies their module
  ModulePath module = nullptr;  // the thread's module when the frame began

  void reset();
};

/// Data that a forward call leaves for the node it creates, by (thread, sequence number).
struct ForwardCall {
  ModulePath module = nullptr;
  const std::string* op = nullptr;  // interned
  bool is_module_inferred = false;
  ProgramCode::Caller caller = {};
  std::shared_ptr<Given> given = nullptr;  // of a container
  bool is_view = false;
};

class ThreadFrames {
 public:
  Frame& push();
  void pop();
  [[nodiscard]] std::size_t depth() const noexcept { return depth_; }
  [[nodiscard]] Frame* top() { return depth_ == 0 ? nullptr : frames_[depth_ - 1].get(); }
  /// 0 is the innermost; null beyond the outermost.
  [[nodiscard]] Frame* above(std::size_t distance) {
    return distance < depth_ ? frames_[depth_ - 1 - distance].get() : nullptr;
  }

  /// A thread of a process group (ProcessGroupGloo.cpp, runLoop). What it does by itself, copying
  /// data between ranks, is not part of the program; what the program calls there, after a
  /// transfer, is.
  const bool is_of_gloo = is_thread_of_gloo();

  ModulePath last_module = nullptr;          // owner of the last used parameter, if none is entered
  std::optional<int> microbatch_of_modules;  // the one at the last operator inside a module
  std::shared_ptr<const Place> last_custom_node;
  std::uint64_t last_custom_start = 0, last_custom_end = 0;  // of that node, by the trace's clock
  std::uint64_t pass = 0;                                    // of those above
  std::size_t backward_depth = 0;  // number of running nodes and evaluate_functions

 private:
  std::vector<std::unique_ptr<Frame>> frames_;  // reused, to keep the memory of their vectors
  std::size_t depth_ = 0;
};

[[nodiscard]] ThreadFrames& this_thread_frames();

/// True for a node that Torch does not define: a custom autograd function's.
[[nodiscard]] bool is_custom_node(const std::string& name);

/// "SquareBug" for the frames "SquareBug" and "SquareBugBackward", and for C++'s
/// "torch::autograd::CppNode<SquareBug>"; "" for such functions of Torch's own.
[[nodiscard]] std::string custom_function_of(std::string_view frame);

/// The place of this thread's innermost frame, in the terms of a birth.
struct Location {
  bool is_backward = false;
  bool is_hook = false;
  bool is_after_gradient = false;  // the gradient of a parameter has been added up
  std::string node;
  const Frame* node_frame = nullptr;
  Frame* evaluate_frame = nullptr;   // set if the node has not begun: a pre-hook
  const Frame* container = nullptr;  // innermost custom function or compiled region
};
/// `is_in_backward`: a backward has begun, and no module was entered since.
[[nodiscard]] Location locate_frames(ThreadFrames& frames, bool is_in_backward);

/// The collective around the innermost frame; null if none.
[[nodiscard]] const Frame* collective_around(ThreadFrames& frames);

}  // namespace nanlocator::inline operators_room
