// The calls that are running on this thread, innermost last, and what forward operators leave for
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
#include "operators/lineage.hpp"
#include "operators/operator_info.hpp"
#include "operators/torch_versions.hpp"

namespace nanlocator::inline operators_room {

enum class FrameKind : std::uint8_t {
  operation,  // has a schema
  container,  // a custom function's forward, a compiled region
  passage,    // a name that Torch gives to its own code around operators: "detach"
  evaluate,   // autograd::engine::evaluate_function: hooks, the node, accumulation
  node,       // the node's own backward
};

/// An in-place argument, or one that shares its storage, as it was before the call.
struct BeforeWrite {
  const c10::TensorImpl* tensor = nullptr;
  Content content = Content::finite;
  BirthIds births;
};

/// A kernel was given it bad, and nobody has seen who wrote it: an input if the call leaves it as
/// it is, memory to be filled if not.
struct UnclearArgument {
  at::Tensor values;
  Content content = Content::finite;  // before the call, as the fingerprint
  std::uint64_t fingerprint = 0;
};

/// What resize_ and set_ were given.
struct ResizedStorage {
  const c10::StorageImpl* storage = nullptr;
  std::size_t bytes = 0;
};

struct Frame {
  FrameKind kind = FrameKind::operation;
  const OperatorInfo* info = nullptr;
  /// In an allocator, which may fill its memory with NaN on purpose; or in a copy that the frame
  /// above answers for. Nothing here is scanned.
  bool is_ignored = false;
  bool has_arguments = false;
  std::vector<c10::IValue> arguments;  // as many as the schema has
  std::vector<BeforeWrite> before_write;
  ResizedStorage resized;
  bool is_captured = false;
  std::uint64_t bytes_not_captured = 0;  // that a capture would have taken
  CallCapture capture;
  std::uint64_t start = 0;  // the trace's clock
  BirthIds nested;          // what calls inside this one made or passed on
  BirthIds sent;            // of a collective: what its inputs were bad from

  // Containers, nodes and evaluate_function; of operations, where autograd records them:
  std::string name;  // without "autograd::engine::evaluate_function: "
  /// Containers and custom nodes: what went in, and what operators inside made bad since. The
  /// trace's lock guards what it points to.
  std::shared_ptr<Given> given;
  std::vector<at::Tensor> received;  // by collectives inside; scanned when it ends
  /// Of a KernelCall: what it is; null otherwise.
  std::shared_ptr<const Place> kernel;
  std::int64_t kernel_call = 0;    // of a KernelCall: its number
  bool has_bad_unwritten = false;  // it was given memory that is bad and that nobody has written
  std::vector<UnclearArgument> unclear;
  std::uint64_t forward_thread = 0;
  std::int64_t sequence = -1;
  bool records = false;         // a node: autograd records what it computes (create_graph)
  bool is_custom = false;       // a node that is not one of Torch's own
  bool node_has_run = false;    // evaluate: its node
  std::vector<BirthId> hooks;   // evaluate: births of hooks, whose module the node will tell
  ModulePath module = nullptr;  // the thread's when the frame began

  void reset();
};

/// What a forward call leaves for the node it creates, by (thread, sequence number).
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

  /// A thread of a process group, which copies what crosses between ranks (ProcessGroupGloo.cpp,
  /// runLoop): no part of the program.
  const bool is_process_groups = is_thread_of_gloo();

  ModulePath last_module = nullptr;  // whose parameter was used last; for programs without scopes
  std::optional<int> microbatch_of_modules;  // that was running when a module's operator ran last
  std::shared_ptr<const Place> last_custom_node;
  std::uint64_t pass = 0;          // of the two above
  std::size_t backward_depth = 0;  // nodes and evaluate_functions that are running

 private:
  std::vector<std::unique_ptr<Frame>> frames_;  // reused: a frame keeps its vectors' memory
  std::size_t depth_ = 0;
};

[[nodiscard]] ThreadFrames& this_thread_frames();

/// A node that Torch does not define itself: a custom autograd function's.
[[nodiscard]] bool is_custom_node(const std::string& name);

/// "SquareBug" of the frames "SquareBug" and "SquareBugBackward", and of C++'s
/// "torch::autograd::CppNode<SquareBug>"; "" of what Torch itself makes as such a function.
[[nodiscard]] std::string custom_function_of(std::string_view frame);

/// Where the innermost frame of this thread is, in the words of a birth.
struct Location {
  bool is_backward = false;
  bool is_hook = false;
  std::string node;
  const Frame* node_frame = nullptr;
  Frame* evaluate_frame = nullptr;   // set where the node has not begun: a pre-hook
  const Frame* container = nullptr;  // innermost custom function or compiled region
};
[[nodiscard]] Location locate_frames(ThreadFrames& frames);

/// The collective that the innermost frame runs inside of; null where it does not.
[[nodiscard]] const Frame* collective_around(ThreadFrames& frames);

}  // namespace nanlocator::inline operators_room
