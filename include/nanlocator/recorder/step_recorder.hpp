// Records how the tensors of a step are made, so that the step can be executed again without a
// closure from the user.
//
// A step is a sequence of events: calls (of a module, a custom function) and backwards, which the
// program's language executes, and operators between them, which are executed here. This class
// observes the operators itself, on the thread that made it, and keeps their arguments: a tensor
// made by an event by name, data as a copy (programs load the next batch into the same memory), and
// the rest, weights and tensors that are too large, by reference. Nothing is scanned, so a healthy
// step costs the host some microseconds per operator outside calls. An event that no later event
// needs is forgotten as soon as its tensors are gone.
//
//     recorder.pause(); loss = model(batch); recorder.resume();
//     recorder.add_call(payload, {batch}, {loss});
//     ...
//     StepReplay replay(recorder.needed());
//     for (const auto& event : replay.events()) ...
//
// Not recorded, because only their results are kept: operators under no_grad and in inference mode,
// and random ones whose results need no gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/operators/program_code.hpp"
#include "nanlocator/watch/module_scope.hpp"

namespace nanlocator::inline recorder_room {

class RecordedEvent;

/// The name of an event's output: the event and the output's index.
struct RecordedValue {
  std::shared_ptr<const RecordedEvent> event;
  int index = 0;
  bool became_leaf = false;  // `requires_grad_` has been called on it since
  bool is_detached = false;  // without its gradient, by something that is no operator: `.data`
  /// What it held when it was read, if code that is no operator may write to it, too: numpy. Else
  /// undefined.
  at::Tensor content = {};
};

/// One event, opaque except for what its executor needs.
class RecordedEvent {
 public:
  RecordedEvent();
  ~RecordedEvent();
  RecordedEvent(const RecordedEvent&) = delete;  // events refer to each other
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  /// True for an operator, which StepReplay::execute executes; false for a call or a backward.
  [[nodiscard]] bool is_operator() const noexcept;
  /// The payload passed to `add_call`; null for operators.
  [[nodiscard]] const std::shared_ptr<void>& payload() const noexcept;
  /// The number of backwards recorded before.
  [[nodiscard]] int backwards_before() const noexcept;

  struct Data;  // src/recorder
  [[nodiscard]] const Data& data() const noexcept { return *data_; }
  [[nodiscard]] Data& data() noexcept { return *data_; }

 private:
  std::unique_ptr<Data> data_;
};

struct RecorderOptions {
  std::shared_ptr<ProgramCode> program_code;
  /// Describes the custom autograd function call that begins on this thread, as for `add_call`:
  /// payload (null if the program's language does not know it) and input tensors.
  std::function<std::pair<std::shared_ptr<void>, std::vector<at::Tensor>>()> function_call;
  /// Limit of memory kept only for operators (excluding inputs of modules, and parameters).
  std::uint64_t most_bytes = std::uint64_t{256} << 20;
};

class StepRecorder {
 public:
  /// Starts to record this thread's operators; call all methods on this thread. Any thread may
  /// destroy it. One per thread at a time: throws UsageError for a second.
  explicit StepRecorder(RecorderOptions options);
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;  // registers callbacks with its address
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Parameters whose gradients may be written between backward and update.
  void set_parameters(std::vector<at::Tensor> parameters);

  /// Parameters that were written to since the last `note_weights`.
  [[nodiscard]] std::vector<at::Tensor> changed_weights() const;
  void note_weights();
  /// Parameters that the program itself has written to or given other memory (`p.data = x`) before
  /// the step, and no update since.
  [[nodiscard]] std::vector<at::Tensor> written_by_program() const;
  /// After an update: weights whose memory it has replaced are not the program's.
  void note_updated();
  /// Around a call of a module, which may write to its own weights (Embedding's max_norm).
  void begin_call();
  void end_call();
  /// While a checkpoint is loaded into the weights, copies of what no operator made are no writes
  /// of the program.
  void set_loading(bool is_loading);

  /// Stops recording, and allows another recorder.
  void close() noexcept;
  /// A number that changes whenever a parameter's gradient is made or written to.
  [[nodiscard]] std::uint64_t state_of_gradients() const;
  /// Parameters whose gradients were made or written to since the last backward by something that
  /// was not recorded. Does not see writes off the dispatcher.
  [[nodiscard]] std::vector<at::Tensor> changed_gradients() const;
  /// Parameters whose gradients the program has filled with zeros by an operator, `p.grad.zero_()`,
  /// since the last backward.
  [[nodiscard]] std::vector<at::Tensor> zeroed_gradients() const;
  /// The gradients of these parameters are as something else has restored them: what has written to
  /// them since their last recorded write does not count.
  void note_restored(std::span<const at::Tensor> parameters);
  /// Parameters whose gradients are values that the program has computed by operators, and these.
  [[nodiscard]] std::vector<std::pair<at::Tensor, RecordedValue>> assigned_gradients();
  /// True if a collective of the program itself wrote to gradients in this step, or sent them. A
  /// replay ends before it.
  [[nodiscard]] bool has_reduced_gradients() const noexcept;
  /// Since the backward, the program has asked for numbers of its gradients (whether they are
  /// finite), and has not put what it computed of them elsewhere, where it may use it later.
  [[nodiscard]] bool has_checked_gradients() const noexcept;
  /// Pauses and resumes; calls nest.
  void pause() noexcept;
  void resume();

  /// Starts a new step: drops the previous step's backwards and the graphs that they used. Tensors
  /// that still wait for a backward stay, such as the images of a generator whose discriminator is
  /// updated first.
  void begin_step();
  /// Drops everything recorded.
  void forget();

  /// True inside an operator or a custom function, which is one event with all that it calls.
  [[nodiscard]] static bool is_inside_event() noexcept;

  /// Assigns later operators outside calls to this module (a loss without parameters); null: to
  /// none.
  void enter_module(ModulePath module) noexcept;

  /// The event that made `tensor`; nullopt for a tensor from before or from elsewhere.
  [[nodiscard]] std::optional<RecordedValue> value_of(const at::Tensor& tensor);
  /// True if the program has made `tensor` by filling it with a NaN or Inf: `torch.full`.
  [[nodiscard]] bool is_filled_with_bad(const at::Tensor& tensor);
  /// The tensors that the latest operator outside of modules was given, if an error has ended it.
  [[nodiscard]] const std::vector<at::Tensor>& refused() const noexcept;

  /// For the inputs of a call that is about to begin: a copy of each, which will not change, and
  /// one copy if a tensor occurs twice. The tensor itself if it is a weight, if it shares memory
  /// with another one, or if this step's copies would exceed 64 MiB on the host or 32 MiB on a
  /// device.
  [[nodiscard]] std::vector<at::Tensor> steady(const std::vector<at::Tensor>& tensors);

  /// Tensors received from another rank.
  void note_received(std::span<const at::Tensor> tensors);

  /// Tells the running trace where memory was written last that a replay reads and does not write:
  /// by a collective, before the step, by more operators than a step keeps.
  void note_earlier_writes() const;

  /// A call that has ended. `payload` says which call its executor repeats; `inputs` and `outputs`:
  /// its tensors, in an order that the executor can reproduce.
  std::shared_ptr<const RecordedEvent> add_call(std::shared_ptr<void> payload,
                                                std::span<const at::Tensor> inputs,
                                                std::span<const at::Tensor> outputs);
  /// The same for a backward into the leaves' gradients. A step is repeated for these gradients.
  void add_backward(std::shared_ptr<void> payload, std::span<const at::Tensor> roots);
  /// A hook that the program has registered on the gradient of `tensor`, a result of this step. It
  /// is due if a backward goes through the event that made the tensor.
  void add_hook(std::shared_ptr<void> payload, const at::Tensor& tensor);
  [[nodiscard]] int backwards() const noexcept;

  /// The events that made the gradients, in order.
  [[nodiscard]] std::vector<std::shared_ptr<const RecordedEvent>> needed() const;
  /// Live tensors that wait for a backward: they have a gradient function, and no other such tensor
  /// was computed from them.
  [[nodiscard]] std::vector<at::Tensor> unfinished() const;
  /// Counted from 1.
  [[nodiscard]] std::uint64_t latest_event() const noexcept;
  /// A replay does not repeat what came after that event.
  void forget_since(std::uint64_t event);
  /// Whether what this step needs has computed `tensor`, or an operator of it has read its memory
  /// or a copy of what it holds. Waits for the device.
  [[nodiscard]] bool has_read(const at::Tensor& tensor) const;
  /// Those with one element that the program has read, by fetching a number computed from them
  /// (`item`) or by a truth test. Kept alive for this until a backward or the next step begins.
  [[nodiscard]] std::vector<at::Tensor> take_read() noexcept;
  /// True if tensors of both lists were computed from the same call, or if this is unknown.
  [[nodiscard]] bool have_common_calls(std::span<const at::Tensor> some,
                                       std::span<const at::Tensor> others);
  /// A backward begins from these: their lines, and those of what they were computed from last, are
  /// remembered over steps.
  void note_losses(std::span<const at::Tensor> losses);
  /// True if a line of the program that has made losses (`in_function`: a function) has made
  /// `tensor`, or if that is unknown. False for what the program only measures.
  [[nodiscard]] bool is_like_losses(const at::Tensor& tensor, bool in_function);
  /// Why they cannot be executed again, a clause: "..., as {problem}"; empty if they can.
  [[nodiscard]] std::string problem() const;
  /// Live tensors and events, for tests.
  [[nodiscard]] std::pair<std::size_t, std::size_t> size() const;

  struct Impl;  // src/recorder

 private:
  std::unique_ptr<Impl> impl_;
};

/// Executes events again, in order; on any one thread.
class StepReplay {
 public:
  /// `events` as StepRecorder::needed gives them.
  explicit StepReplay(std::vector<std::shared_ptr<const RecordedEvent>> events);
  ~StepReplay();
  StepReplay(const StepReplay&) = delete;  // holds the tensors of a step
  StepReplay& operator=(const StepReplay&) = delete;

  [[nodiscard]] const std::vector<std::shared_ptr<const RecordedEvent>>& events() const noexcept;
  /// The tensor for `value` in this execution. Throws Error if its event has not made it.
  [[nodiscard]] at::Tensor tensor(const RecordedValue& value) const;
  /// Runs `work`, which executes `call`, as if called from the recorded program line.
  static void run(const RecordedEvent& call, const std::function<void()>& work);
  /// Sets a call's new outputs, in the recorded order; for a custom function in the order of its
  /// node's outputs, undefined if autograd does not record one.
  void set_outputs(const RecordedEvent& call, std::span<const at::Tensor> outputs);
  /// Executes an operator as it was called, including its program line. Throws its errors, and
  /// Error if one of its inputs has been overwritten since.
  void execute(const RecordedEvent& operation);
  /// Releases tensors that no later event reads.
  void leave(const RecordedEvent& event);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline recorder_room
