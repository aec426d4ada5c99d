// Remembers how the tensors of a step came about, so that the step can be executed again though
// nobody has handed over a closure.
//
// A step is a sequence of events: a call (of a module, a custom function) and a backward, which the
// program's language executes, and between them operators, which are executed here. This class
// hears of the operators by itself, on the thread that has made it, and keeps for each its
// arguments: a tensor that an event has made is kept by name, data as a copy, as programs load the
// next batch into the same memory, and the rest, weights and what is too large, by reference.
// Nothing is scanned, so a step without a fault costs the host some microseconds for each
// operator that is outside of calls. What no later event needs is forgotten as soon as its tensors
// are gone.
//
//     recorder.pause(); loss = model(batch); recorder.resume();
//     recorder.add_call(payload, {batch}, {loss});
//     ...
//     StepReplay replay(recorder.needed());
//     for (const auto& event : replay.events()) ...
//
// Not recorded, because they are kept as what they have computed: operators under no_grad and in
// inference mode, and those that draw random numbers for something that needs no gradient.
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

/// Output `index` of an event, as a name.
struct RecordedValue {
  std::shared_ptr<const RecordedEvent> event;
  int index = 0;
  bool became_leaf = false;  // `requires_grad_` was called on it since
};

/// One event; opaque but for what its executor must know.
class RecordedEvent {
 public:
  RecordedEvent();
  ~RecordedEvent();
  RecordedEvent(const RecordedEvent&) = delete;  // events refer to each other
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  /// An operator, which StepReplay::execute executes; else a call or a backward.
  [[nodiscard]] bool is_operator() const noexcept;
  /// What `add_call` was given; null for operators.
  [[nodiscard]] const std::shared_ptr<void>& payload() const noexcept;
  /// How many backwards were recorded before.
  [[nodiscard]] int backwards_before() const noexcept;

  struct Data;  // src/recorder
  [[nodiscard]] const Data& data() const noexcept { return *data_; }
  [[nodiscard]] Data& data() noexcept { return *data_; }

 private:
  std::unique_ptr<Data> data_;
};

struct RecorderOptions {
  std::shared_ptr<ProgramCode> program_code;
  /// The call of a custom autograd function that begins on this thread, as `add_call` takes it:
  /// payload (null where the program's language does not know it) and the tensors that it is given.
  std::function<std::pair<std::shared_ptr<void>, std::vector<at::Tensor>>()> function_call;
  /// Memory that is kept for operators alone (not: what modules were given, and parameters).
  std::uint64_t most_bytes = std::uint64_t{256} << 20;
};

class StepRecorder {
 public:
  /// Records the operators of this thread from now on; all methods belong to it. One per thread at
  /// a time: throws UsageError for a second.
  explicit StepRecorder(RecorderOptions options);
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;  // registers callbacks with its address
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Parameters whose gradients may be written between backward and update.
  void set_parameters(std::vector<at::Tensor> parameters);

  /// Parameters that were written to since the last `note_weights`.
  [[nodiscard]] std::vector<at::Tensor> changed_weights() const;
  void note_weights();

  /// Records nothing any more, and makes room for another one.
  void close() noexcept;
  /// A number that is another one when any of their gradients has been made or written to.
  [[nodiscard]] std::uint64_t state_of_gradients() const;
  /// Stops and goes on; counted.
  void pause() noexcept;
  void resume();

  /// A new step: the backwards of the one before, and what they have used up, belong to it no more.
  /// What has been computed and not been differentiated yet stays: the images of a generator, whose
  /// discriminator is updated first.
  void begin_step();
  /// What was recorded belongs to no step.
  void forget();

  /// Operators outside of calls are of this module from now on (a loss that has no parameters);
  /// null: of none.
  void enter_module(ModulePath module) noexcept;

  /// The event that has made `tensor`; nullopt for one that was there before or came from
  /// elsewhere.
  [[nodiscard]] std::optional<RecordedValue> value_of(const at::Tensor& tensor);

  /// For a call that is about to be given them: of each a copy that stays as it is now, of equal
  /// ones the same; or the tensor itself where it is a weight, shares its memory with another one,
  /// or the copies of this step would take more than 64 MiB of the host or 32 MiB of a device.
  [[nodiscard]] std::vector<at::Tensor> steady(const std::vector<at::Tensor>& tensors);

  /// These came from other ranks in this step: kept by reference, as a trace knows them by their
  /// memory. The caller keeps them alive until the next step begins.
  void note_received(std::span<const at::Tensor> tensors);

  /// A call that is over. `payload` tells its executor what to call; `inputs`: the tensors that it
  /// was given, `outputs`: those that it returned, in an order that the executor can repeat.
  std::shared_ptr<const RecordedEvent> add_call(std::shared_ptr<void> payload,
                                                std::span<const at::Tensor> inputs,
                                                std::span<const at::Tensor> outputs);
  /// The same for a backward into the leaves' gradients, which is what a step is repeated for.
  void add_backward(std::shared_ptr<void> payload, std::span<const at::Tensor> roots);
  [[nodiscard]] int backwards() const noexcept;

  /// The events that have made the gradients, in their order.
  [[nodiscard]] std::vector<std::shared_ptr<const RecordedEvent>> needed() const;
  /// What was computed and waits for a backward: live tensors with a gradient function that nothing
  /// else which has one was computed from.
  [[nodiscard]] std::vector<at::Tensor> unfinished() const;
  /// Those of them with one element that the program has read, by asking for a number that was
  /// computed from them (`item`) or whether something is true; kept alive for it until a backward
  /// or the next step begins.
  [[nodiscard]] std::vector<at::Tensor> take_read() noexcept;
  /// Whether some of both was computed from the same call; true where it is not known.
  [[nodiscard]] bool have_common_calls(std::span<const at::Tensor> some,
                                       std::span<const at::Tensor> others);
  /// Why they cannot be executed again, a clause: "..., as {problem}"; empty where they can.
  [[nodiscard]] std::string problem() const;
  /// Live tensors and events, for tests.
  [[nodiscard]] std::pair<std::size_t, std::size_t> size() const;

  struct Impl;  // src/recorder

 private:
  std::unique_ptr<Impl> impl_;
};

/// Executes events again, in their order; on any one thread.
class StepReplay {
 public:
  /// `events` as StepRecorder::needed gives them.
  explicit StepReplay(std::vector<std::shared_ptr<const RecordedEvent>> events);
  ~StepReplay();
  StepReplay(const StepReplay&) = delete;  // holds the tensors of a step
  StepReplay& operator=(const StepReplay&) = delete;

  [[nodiscard]] const std::vector<std::shared_ptr<const RecordedEvent>>& events() const noexcept;
  /// What stands for `value` in this execution. Throws Error where its event has not made it.
  [[nodiscard]] at::Tensor tensor(const RecordedValue& value) const;
  /// Runs `work`, which executes `call`, as called from the line of the first time.
  static void run(const RecordedEvent& call, const std::function<void()>& work);
  /// What a call has returned now, in the order of the first time; of a custom function, in that of
  /// its node's outputs, undefined where autograd does not record one.
  void set_outputs(const RecordedEvent& call, std::span<const at::Tensor> outputs);
  /// Executes an operator as it was called, its line of the program included. Throws what it
  /// throws, and Error where something that it reads has been overwritten since.
  void execute(const RecordedEvent& operation);
  /// Lets go of what no later event reads.
  void leave(const RecordedEvent& event);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline recorder_room
