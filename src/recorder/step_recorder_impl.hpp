// Between the files of StepRecorder.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nanlocator/recorder/step_recorder.hpp"
#include "operators/operator_info.hpp"
#include "recorder/recorded_event.hpp"
#include "recorder/recorded_parameters.hpp"
#include "recorder/unrepeated_writes.hpp"
#include "tensor/steady_copy.hpp"

namespace nanlocator::inline recorder_room {

/// No training step has more events that are still needed.
constexpr std::size_t kMostEvents = 20000;
/// Operators that a program executes in a step under `no_grad`, outside of modules, for what the
/// loss uses: targets, advantages, statistics. A rollout has more; of its results only the line is
/// known.
constexpr std::size_t kMostWithoutGradient = 2000;
/// Limits for copies of data per step: more than most programs' batches, and little beside a model.
constexpr std::uint64_t kMostCopiedOnHost = std::uint64_t{64} << 20;
constexpr std::uint64_t kMostCopiedOnDevice = std::uint64_t{32} << 20;
/// Limit for one tensor that an operator reads: larger ones are frozen weights rather than data.
constexpr std::uint64_t kMostOfAnOperator = std::uint64_t{1} << 20;

struct StepRecorder::Impl {
  explicit Impl(RecorderOptions recorder_options)
      : options(std::move(recorder_options)), unrepeated(options.program_code) {}

  struct Known {
    WeakTensor tensor;
    const c10::StorageImpl* storage = nullptr;  // only to be compared
    std::shared_ptr<const RecordedEvent> event;
    int index = 0;
    bool required_grad = false;
    bool is_detached = false;  // another tensor of the same memory, without its gradient: `.data`
  };
  /// Memory that an event has made. An operator that writes there writes again in the replay.
  struct OwnMemory {
    WeakStorage storage;
    RecordedEvents writers;
    std::uint32_t version = 0;  // after the last write
    std::shared_ptr<const RecordedEvent> maker;
    int index = 0;                 // among the maker's results
    Region region;                 // of that result
    at::Tensor content = {};       // bytes, of memory that numpy has, too, when it was read last
    bool is_content_made = false;  // by the maker; nothing else has written there since
  };

  struct Context final : at::ObserverContext {
    const OperatorInfo* info = nullptr;  // null: a custom function
    std::vector<c10::IValue> arguments;
    std::vector<std::uint32_t> versions;  // of the tensors, in order
    GeneratorStates generators;
    bool is_transformed = false;  // nothing is noted: what it calls is outermost
    bool draws = false;
    int uncaught = std::uncaught_exceptions();  // when it began
    bool is_kept = true;                        // false: only what it wrote is noted
    std::vector<at::Tensor> sent;               // of an exchange in place: the data before it
    at::Tensor before;  // of data that is written in place: a copy of its content then
  };

  /// A call of a custom function.
  struct Function {
    std::shared_ptr<RecordedEvent> event;
    std::string node;  // "SquareBackward"
  };
  /// A result of an exchange that the program has not read yet; it may still be under way.
  struct Arriving {
    Region region;
    std::shared_ptr<const RecordedEvent> event;
    std::size_t index = 0;  // in the event's results
  };

  RecorderOptions options;
  int paused = 0;
  bool is_closed = false;
  std::atomic<bool> is_abandoned = false;  // destroyed by another thread
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  std::string standing_problem;
  ModulePath module = nullptr;
  bool is_loading = false;  // see set_loading
  RecordedParameters parameters;
  UnrepeatedWrites unrepeated;

  // Values that events made, by address. Their tensors may be gone (`forget_the_dead`).
  std::unordered_map<const c10::TensorImpl*, Known> known;
  std::unordered_map<const c10::StorageImpl*, OwnMemory> memory;
  std::map<const std::byte*, WeakStorage> by_address;  // of `memory`, once `has_seen_shared`
  bool has_seen_shared = false;  // a tensor whose memory numpy or another library may have
  std::unordered_map<std::uint64_t, Function> functions;  // by their nodes' sequence numbers
  std::size_t sweep_at = 1024;
  /// That have made losses; line 0 stands for the whole function.
  std::set<std::pair<const void*, int>> loss_lines;

  // Of this step.
  std::uint64_t next_number = 0;
  RecordedEvents roots;
  RecordedEvents exchanges;
  RecordedEvents hooks;  // on gradients of this step's values
  std::unordered_multimap<const c10::StorageImpl*, Arriving> arriving;
  std::vector<at::Tensor> read;  // by the program, before a backward
  std::vector<at::Tensor> refused;
  bool has_reduced_gradients = false;
  bool has_taken_gradients = false;
  bool has_checked_gradients = false;
  int backwards = 0;
  std::size_t without_gradient = 0;  // operators outside of autograd
  std::uint64_t kept_bytes = 0;
  std::uint64_t copied_on_host = 0, copied_on_device = 0;  // bytes

  // --- values

  Known* find(const at::Tensor& tensor);
  /// Registers another tensor of what an event has made, which is no operator's result.
  Known* find_alias(const at::Tensor& tensor);
  /// Registers an output of a custom function on its first use, by the node that made it.
  void find_maker(const at::Tensor& tensor);
  [[nodiscard]] RecordedValue name_of(const Known& known, const at::Tensor& tensor);
  /// Null: no event has made it.
  OwnMemory* memory_of(const at::Tensor& tensor);
  /// The memory that numpy or another library has handed back as this tensor.
  OwnMemory* memory_behind(const at::Tensor& tensor);
  void note_address(const OwnMemory& own);
  /// A value that is read needs a gradient that no recorded event gave it.
  void check_gradient(const Known& known, const at::Tensor& tensor);
  at::Tensor content_of(OwnMemory& own, const at::Tensor& tensor);
  void keep_content(OwnMemory& own, const c10::StorageImpl& storage);

  std::shared_ptr<RecordedEvent> new_event();
  /// Names a value that `data` reads, with all events that have written to it.
  void depend_on(RecordedEvent::Data& data, const RecordedValue& value, const at::Tensor& tensor);
  void made(const std::shared_ptr<RecordedEvent>& event, const at::Tensor& tensor, int index,
            bool may_be_written);
  /// A recorded event has written to `tensor`, in memory that an event made.
  void wrote(const std::shared_ptr<const RecordedEvent>& event, const at::Tensor& tensor);
  [[nodiscard]] ProgramCode::Caller caller_now() const {
    return options.program_code ? options.program_code->caller() : ProgramCode::Caller{};
  }

  void forget_the_dead();
  /// What made an event's results, if it has only moved them; nullopt for data.
  [[nodiscard]] std::optional<EarlierWrite> write_of(const RecordedEvent& event) const;
  /// The replay of later steps does not repeat the events that made these.
  void forget_events_of_step();
  void clear();

  // --- copies

  /// Why a step that would keep more than the limit cannot be executed again.
  [[nodiscard]] std::string too_much_for(std::string_view what) const;

  [[nodiscard]] bool may_copy(const at::Tensor& tensor) const {
    const bool is_on_host = tensor.device().is_cpu();
    return steady_bytes(tensor) + (is_on_host ? copied_on_host : copied_on_device) <=
           (is_on_host ? kMostCopiedOnHost : kMostCopiedOnDevice);
  }
  [[nodiscard]] bool may_copy_for_an_operator(const at::Tensor& tensor) const {
    return steady_bytes(tensor) <= kMostOfAnOperator && may_copy(tensor);
  }
  /// A copy that the program cannot write to, or the tensor itself beyond the limits.
  at::Tensor steady(const at::Tensor& tensor);
  /// A copy, or the tensor and a sample of what it holds.
  void keep(RecordedInput& content, const at::Tensor& tensor);
  /// A batch that is normalised in place, for example; no state that the program keeps over steps,
  /// such as an average of weights.
  [[nodiscard]] bool is_new_data(const at::Tensor& tensor) const;

  // --- operators (step_recorder_operators.cpp)

  std::unique_ptr<Context> start(const at::RecordFunction& call, const OperatorInfo& info);
  void finish(const at::RecordFunction& call, Context& context);
  std::unique_ptr<Context> start_function(const at::RecordFunction& call);
  void note_read(const at::RecordFunction& call);
  void note_checked(const at::RecordFunction& call);
  void note_taken(const RecordedEvent::Data& data, const at::Tensor& tensor);
  /// An operator has ended by an error.
  void note_refused(const Context& context);
  void note_unkept(const at::RecordFunction& call, const Context& context);
  /// True for an operator that only moves values that no operator of the program made, as those of
  /// a loaded checkpoint.
  [[nodiscard]] bool moves_data(const Context& context);
  void note_unrepeated(const Context& context, std::span<const at::Tensor> written);
  void take_inputs(const std::shared_ptr<RecordedEvent>& event, std::span<const at::Tensor> inputs);
  /// `is_written`: the call has written to it, too.
  [[nodiscard]] RecordedInput input_of(const at::Tensor& tensor, std::uint32_t version,
                                       bool is_written);
  [[nodiscard]] std::vector<const RecordedEvent*> differentiable_behind(
      const std::shared_ptr<const RecordedEvent>& event) const;

  // --- collectives (step_recorder_exchanges.cpp)

  static bool is_exchange(const OperatorInfo& info) {
    return info.collective && info.collective != CollectiveKind::send &&
           info.name.starts_with("c10d::");
  }
  void start_exchange(Context& context);
  void finish_exchange(const at::RecordFunction& call, Context& context);
  /// The program is about to read `tensor`, so what it holds has arrived.
  void take_arrived(const at::Tensor& tensor);
};

}  // namespace nanlocator::inline recorder_room
