// The trace's state, and the way from a finished operator to a birth. Used only inside this room.
//
//   observe.cpp     callbacks of at::RecordFunction: frames in, scans outputs, the healthy path
//   births.cpp      attributes a bad output: rules b to d, roots
//   kernels.cpp     the same for calls outside the dispatcher (KernelCall)
//   transfers.cpp   operators that use a transfer's memory before the program waits for it
//   threads.cpp     operators that use memory which another thread of the program uses, too
//   explain.cpp     rule e: the births that reached a loss or a gradient
//
// Thread-safe: `mutex` guards all but the atomics. It is never held while a tensor is scanned or
// Python is called.
#pragma once

#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanlocator/operators/kernel_call.hpp"
#include "nanlocator/operators/operator_trace.hpp"
#include "operators/call_values.hpp"
#include "operators/declarations.hpp"
#include "operators/frames.hpp"
#include "operators/lineage.hpp"
#include "operators/thread_accesses.hpp"
#include "operators/transfers_in_flight.hpp"

namespace nanlocator::inline operators_room {

/// A tensor in a call's values. `element`: index in a list, -1 outside lists.
struct TensorAt {
  at::Tensor values;  // observable
  int index = 0;
  int element = -1;
  Content content = Content::finite;  // of an output, after its scan
};

/// The source of a value that was already bad when first read.
struct Root {
  BirthKind kind = BirthKind::data;
  std::optional<Place> inside;         // opaque
  std::shared_ptr<const Place> place;  // received: the place
  std::string writer;                  // the last operator that wrote or allocated it
  bool is_temporary = false;           // of the running kernel, which moves it into its result
  LastSeen last_seen = LastSeen::unknown;
  std::optional<Declarations::Declared> declared;  // the bad one among those that share the memory
};

/// A custom node of backward that has run, and its forward's parameters.
struct CustomNode {
  std::shared_ptr<const Place> place;
  std::vector<std::string> parameters;
  std::uint64_t start = 0;  // the trace's clock
};

/// True for "aten::div.Tensor" and "aten::div".
[[nodiscard]] inline bool is_call_of(const std::string& op, const std::string& name) {
  return op == name || (op.starts_with(name) && op[name.size()] == '.');
}

struct OperatorTrace::Impl {
  explicit Impl(TraceOptions trace_options) : options(std::move(trace_options)) {}

  // ---- observe.cpp
  void start(const at::RecordFunction& call, ThreadFrames& frames);
  void finish(const at::RecordFunction& call, ThreadFrames& frames);
  void start_operation(const at::RecordFunction& call, Frame& frame, ThreadFrames& frames);
  void start_container(std::string_view name, const at::RecordFunction& call, Frame& frame,
                       ThreadFrames& frames);
  void start_node(const at::RecordFunction& call, Frame& frame, ThreadFrames& frames);
  void scan_given(c10::ArrayRef<const c10::IValue> inputs, const Place& place, Frame& frame,
                  ThreadFrames& frames);
  void scan_received(Frame& frame, ThreadFrames& frames);
  void finish_operation(const at::RecordFunction& call, Frame& frame, ThreadFrames& frames);
  void finish_node(Frame& frame, ThreadFrames& frames);
  void scan_what_is_sent(Frame& frame, ThreadFrames& frames);
  void note_allocation(const at::RecordFunction& call, ThreadFrames& frames);
  void fill_fresh_memory(const at::Tensor& tensor) const;
  void fill_growth(const at::Tensor& tensor, std::size_t bytes_before) const;
  [[nodiscard]] bool is_fresh_memory_nan() const {
    return options.fresh_memory && std::isnan(*options.fresh_memory);
  }
  void note_roots_of_backward();
  void note_forward_call(const Frame& frame, const ThreadFrames& frames, const std::string* op,
                         const ProgramCode::Caller& caller, bool is_view);
  [[nodiscard]] ModulePath module_used_last(const ThreadFrames& frames) const;
  void note_received(const at::RecordFunction& call, Frame& frame, ThreadFrames& frames);
  [[nodiscard]] std::shared_ptr<const Place> place_of_collective(const Frame& collective,
                                                                 ThreadFrames& frames);
  void scan_before_write(Frame& frame, ThreadFrames& frames);
  void use_declared_module(const Frame& frame, ThreadFrames& frames);
  void note_bytes(const std::vector<at::Tensor>& written, const Frame& frame, ThreadFrames& frames);
  [[nodiscard]] bool is_fresh_constant(const at::Tensor& values);
  void note_constant_of_device(const at::Tensor& values, const OperatorInfo& info);
  [[nodiscard]] bool inner_operators_wrote(const std::vector<TensorAt>& outputs,
                                           const Frame& frame);

  // ---- kernels.cpp
  void start_kernel(const std::string& name, std::int64_t number,
                    std::span<const KernelArgument> arguments, ThreadFrames& frames);
  /// Counts arguments that the call left unchanged as inputs; keeps the written ones.
  void settle_unclear(Frame& frame, ThreadFrames& frames);
  void note_bytes_of_kernel(std::span<const KernelArgument> arguments, const Frame& frame);
  void finish_kernel(std::span<const KernelArgument> arguments, std::span<const at::Tensor> results,
                     ThreadFrames& frames);
  BirthId add_kernel_birth(const Frame& frame, std::span<const KernelArgument> arguments,
                           const at::Tensor& values, const std::string& role, ThreadFrames& frames);

  // ---- transfers.cpp
  void note_unordered_accesses(const Frame& frame, ThreadFrames& frames);
  void add_unordered(UnorderedAccess access, const at::Tensor& tensor);
  /// The parameter whose gradient or weight lies there; "" if none. The caller holds the lock.
  [[nodiscard]] std::string parameter_in(const at::Tensor& tensor) const;

  [[nodiscard]] Location located(ThreadFrames& frames) const {
    return locate_frames(frames, has_ended_backward.load(std::memory_order_relaxed));
  }
  [[nodiscard]] bool is_in_programs_code() const;
  [[nodiscard]] bool is_process_groups_own(const ThreadFrames& frames) const;

  // ---- threads.cpp
  [[nodiscard]] bool follows_threads() const {
    return options.follows_threads || options.reordered.has_value();
  }
  void start_beside_threads(const Frame& frame, ThreadFrames& frames);
  void finish_beside_threads(const Frame& frame, ThreadFrames& frames);
  [[nodiscard]] ThreadOrder::Place place_among_threads(const Frame& frame,
                                                       const ThreadFrames& frames) const;
  void describe_thread_order(std::size_t order, const at::Tensor& tensor);

  // ---- births.cpp
  void explain_bad_outputs(const at::RecordFunction& call, Frame& frame, ThreadFrames& frames,
                           std::vector<TensorAt> outputs);
  /// The births in `outputs` that the operator's own kernel has made by the arithmetic of others.
  [[nodiscard]] BirthIds arithmetic_of(const Frame& frame,
                                       const std::vector<const TensorAt*>& outputs);
  /// Makes the birth one of the frame's operator, which its kernel made by arithmetic of others: a
  /// loss whose kernel divides by the number of elements.
  void see_whole(BirthId id, const at::RecordFunction& call, Frame& frame, ThreadFrames& frames,
                 const TensorAt& output);
  /// The births of the bad values in `values`; a new root's if none are known.
  BirthIds origins_of(const at::Tensor& values, ThreadFrames& frames, const std::string& reader);
  /// The births of bad one-element tensors among the arguments of the surrounding operators.
  BirthIds origins_of_numbers(ThreadFrames& frames);
  BirthIds roots_of(const at::Tensor& values, ThreadFrames& frames, const std::string& reader);
  /// The births of the bad gradients that lie in `values`: one that changed after its last write is
  /// a new root. Empty if there are none, or if the trace does not know their last write.
  BirthIds roots_of_gradients_in(const at::Tensor& values, ThreadFrames& frames,
                                 const std::string& reader);
  /// The births of a bad gradient that a kernel off the dispatcher may have written; empty if none
  /// may.
  BirthIds fused_origins_of(const NamedTensor& gradient, const Root& root, ThreadFrames& frames);
  /// Custom nodes that began after the last write of the gradient by an operator and used this
  /// parameter or, if no operator has added to the gradient, are of its module.
  [[nodiscard]] std::vector<std::shared_ptr<const Place>> fused_writers_of(
      const NamedTensor& gradient);
  /// True if neither the declarations, the lineage nor autograd knows it.
  [[nodiscard]] bool is_seen_first(const at::Tensor& values);
  [[nodiscard]] Root find_root(const at::Tensor& values, ThreadFrames& frames);
  [[nodiscard]] bool is_kept_by_a_module(const at::Tensor& values);
  BirthId add_root(const Root& root, const at::Tensor& values, ThreadFrames& frames,
                   const std::string& reader);
  /// The births of bad inputs of the frame that made `root`; empty if the root is the origin.
  BirthIds passed_through(const Root& root, const at::Tensor& values, ThreadFrames& frames);
  /// The births of inputs of `inside` that explain such values; empty if it made them itself.
  [[nodiscard]] BirthIds passed_through(const Place& inside, Content content);
  /// Removes births of literals. The caller holds the lock.
  [[nodiscard]] BirthIds without_literals(BirthIds ids) const;
  /// The birth in the forward call whose derivative the running node computes.
  [[nodiscard]] std::optional<BirthId> birth_of_function(const Frame& node,
                                                         const std::string& forward_op);
  BirthId add_birth(TracedBirth birth);
  void locate(Birth& birth, ThreadFrames& frames);
  [[nodiscard]] Place current_place(ThreadFrames& frames);
  /// True if the running operator reads or writes a parameter's gradient.
  [[nodiscard]] bool uses_gradients(ThreadFrames& frames);
  void read_code(Birth& birth, const ProgramCode::Caller& caller) const;
  /// Arguments in `written` are described without values: they now hold the result.
  void describe_operands(Birth& birth, const Frame& frame,
                         const std::vector<c10::IValue>& arguments,
                         const std::vector<BeforeWrite>& written,
                         const std::vector<std::int64_t>& output_shape) const;
  [[nodiscard]] ProgramCode::Caller caller_now() const;
  void describe(Sighting& sighting, const at::Tensor& values) const;
  void capture(const at::RecordFunction& call, Frame& frame);
  /// True if it reads a NaN that an operator of this pass wrote.
  [[nodiscard]] bool has_known_nan(const Frame& operation);
  void keep_call(TracedBirth& birth, const at::RecordFunction& call, Frame& frame);
  /// True if copies of calls may take `bytes` more: within `kept_bytes`, and at most half of the
  /// host's free memory. The caller holds the lock.
  [[nodiscard]] bool has_room_for(std::uint64_t bytes) const;
  [[nodiscard]] ForwardCall forward_call_of(std::uint64_t thread, std::int64_t sequence);
  [[nodiscard]] ForwardCall forward_call_locked(std::uint64_t thread, std::int64_t sequence) const;

  // ---- explain.cpp
  [[nodiscard]] Explanation explain(std::span<const NamedTensor> losses,
                                    std::span<const NamedTensor> gradients);
  [[nodiscard]] Explanation explain_sent();
  using ReachedByBirth = std::map<BirthId, std::vector<Reached>>;
  void blame_forward(ReachedByBirth& reached) const;
  void blame_functions(ReachedByBirth& reached) const;
  [[nodiscard]] Explanation explanation_of(ReachedByBirth reached, bool are_losses_unknown);
  void follow_roots_of_backward(ReachedByBirth& reached);
  [[nodiscard]] BirthIds without_quiet_literals(BirthIds ids) const;
  /// Adds the magnitudes of its module's parameters.
  void weigh(Birth& birth);
  BirthIds origins_of_result(const NamedTensor& result, const at::Tensor& values, bool is_gradient);

  void note(const std::string& text);

  TraceOptions options;
  std::atomic<bool> is_paused = false;
  std::atomic<bool> modules_are_entered = false;
  std::atomic<bool> microbatches_are_known = false;  // a schedule announces its microbatch
  std::atomic<bool> is_in_optimizer = false;         // entered_phase is params_after
  std::atomic<std::int64_t> operators = 0;
  std::atomic<std::uint64_t> pass = 0;
  std::atomic<bool> has_ended_backward = false;  // and no module was entered since
  std::atomic<int> graph_task = -1;      // autograd's number of the latest outermost backward pass
  std::atomic<std::uint64_t> clock = 1;  // one tick per operator that wrote something
  std::atomic<bool> are_transfers_in_flight = false;
  std::atomic<bool> has_overlap = false;  // an operator has run during a transfer

  std::mutex mutex;
  std::optional<Phase> entered_phase;
  Lineage lineage;
  Declarations declarations;
  Given model_inputs;              // of this pass: only `inputs`
  bool knows_model_inputs = true;  // all of them
  std::unordered_map<std::uint64_t, std::unordered_map<std::int64_t, ForwardCall>> forward_calls;
  /// Births that made outputs of forward calls bad, by (thread, sequence number).
  std::map<std::pair<std::uint64_t, std::int64_t>, BirthIds> bad_calls;
  /// Of births in derivatives: that in the forward call which they are the derivative of.
  std::unordered_map<BirthId, BirthId> functions;
  /// Births in arithmetic that kernels of other operators may have done: when that call began.
  std::unordered_map<BirthId, std::uint64_t> arithmetic;
  BirthIds roots_of_backward;  // births that made the roots of a backward pass (the losses) bad
  std::vector<CustomNode> custom_nodes;
  std::vector<TracedBirth> births;
  std::set<BirthId> sent_in_forward, sent_in_backward;  // to other ranks
  std::set<BirthId> sent_to_one;                        // of these
  TransfersInFlight transfers;
  std::vector<UnorderedAccess> unordered;
  ThreadAccesses threads;  // has its own lock
  Turn turn;               // has its own lock
  std::uint64_t kept_bytes = 0;
  std::int64_t calls_not_kept = 0;
  std::string first_not_kept;  // the operator, and the size of its copies
  std::int64_t births_not_kept = 0;
  std::set<std::string> notes;
};

/// See RepeatedExchange.
inline thread_local bool is_exchange_repeated = false;

[[nodiscard]] const std::string* intern_name(const std::string& name);

}  // namespace nanlocator::inline operators_room
