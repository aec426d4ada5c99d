#include "nanlocator/operators/operator_trace.hpp"

#include <ATen/record_function.h>

#include <exception>
#include <map>
#include <thread>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/operators/earlier_write.hpp"
#include "nanlocator/operators/transfer.hpp"
#include "operators/operator_trace_impl.hpp"

namespace nanlocator::inline operators_room {
namespace {

std::atomic<OperatorTrace::Impl*> active_trace = nullptr;
/// Callbacks that now hold `active_trace`: other threads may run operators while a trace ends.
std::atomic<int> running_callbacks = 0;
thread_local int callbacks_of_this_thread = 0;

class ActiveTrace {
 public:
  ActiveTrace() {
    running_callbacks.fetch_add(1);
    ++callbacks_of_this_thread;
    trace_ = active_trace.load();
  }
  ~ActiveTrace() {
    --callbacks_of_this_thread;
    running_callbacks.fetch_sub(1);
  }
  ActiveTrace(const ActiveTrace&) = delete;  // counts once
  ActiveTrace& operator=(const ActiveTrace&) = delete;
  [[nodiscard]] OperatorTrace::Impl* get() const noexcept { return trace_; }

 private:
  OperatorTrace::Impl* trace_;
};

/// The message of a c10 error has a stack after its first line.
void note_failure(OperatorTrace::Impl& trace, std::string_view name, const std::exception& error) {
  const std::string_view text = error.what();
  trace.note("could not scan " + std::string(name) + ": " +
             std::string(text.substr(0, text.find('\n'))));
}

/// Catches everything: at::RecordFunction would only warn of an exception.
template <class Work>
void observe(OperatorTrace::Impl& trace, const at::RecordFunction& call,
             const Work& work) noexcept {
  try {
    work();
  } catch (const std::exception& error) {
    try {
      note_failure(trace, call.name(), error);
    } catch (...) {
    }
  } catch (...) {
  }
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  ThreadFrames& frames = this_thread_frames();
  const ActiveTrace trace;
  if (trace.get() == nullptr) {
    frames.push().is_ignored = true;
  } else {
    const std::size_t depth = frames.depth();
    bool is_started = false;
    observe(*trace.get(), call, [&] {
      trace.get()->start(call, frames);
      is_started = true;
    });
    if (!is_started) {  // it threw: this call is unknown
      if (frames.depth() == depth) frames.push();
      frames.top()->is_ignored = true;
    }
  }
  return nullptr;
}

void on_finish(const at::RecordFunction& call, at::ObserverContext*) {
  ThreadFrames& frames = this_thread_frames();
  const ActiveTrace trace;
  if (trace.get() != nullptr) {
    observe(*trace.get(), call, [&] { trace.get()->finish(call, frames); });
  }
  frames.pop();
}

/// Never reused: threads store their knowledge of a pass by its number.
std::uint64_t next_pass() {
  static std::atomic<std::uint64_t> passes = 0;
  return ++passes;
}

std::mutex lifetime_mutex;
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

}  // namespace

namespace {

std::mutex calls_mutex;
std::map<std::string, std::int64_t> calls_by_name;

std::int64_t next_number(const std::string& name) {
  const std::lock_guard lock(calls_mutex);
  return calls_by_name[name]++;
}

}  // namespace

void count_kernel_calls_from_zero() {
  const std::lock_guard lock(calls_mutex);
  calls_by_name.clear();
}

KernelCall::KernelCall(const std::string& name, std::vector<KernelArgument> arguments)
    : arguments_(std::move(arguments)), number_(next_number(name)) {
  ThreadFrames& frames = this_thread_frames();
  const ActiveTrace trace;
  if (trace.get() == nullptr || trace.get()->is_paused.load(std::memory_order_relaxed)) return;
  const Frame* around = frames.top();
  if (around != nullptr && around->is_ignored) return;
  const std::size_t outside = frames.depth();
  try {
    trace.get()->start_kernel(name, number_, arguments_, frames);
    depth_ = frames.depth();
  } catch (const std::exception& error) {
    while (frames.depth() > outside) frames.pop();
    note_failure(*trace.get(), name, error);
  }
}

KernelCall::~KernelCall() {
  ThreadFrames& frames = this_thread_frames();
  while (depth_ != 0 && frames.depth() >= depth_) frames.pop();
}

void KernelCall::end(std::span<const at::Tensor> results) {
  ThreadFrames& frames = this_thread_frames();
  const ActiveTrace trace;
  if (trace.get() == nullptr || depth_ == 0 || frames.depth() != depth_) return;
  try {
    trace.get()->finish_kernel(arguments_, results, frames);
  } catch (const std::exception& error) {
    note_failure(*trace.get(), frames.top()->name, error);
  }
}

Transfer::Transfer(const std::string& op, const std::vector<at::Tensor>& read,
                   const std::vector<at::Tensor>& written) {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr || trace->is_paused.load(std::memory_order_relaxed)) return;
  const ProgramCode::Caller caller = trace->caller_now();
  static std::atomic<std::uint64_t> numbers = 0;
  number_ = ++numbers;
  pass_ = trace->pass;
  const std::lock_guard lock(trace->mutex);
  trace->transfers.begin(number_, {op, caller}, read, written);
  trace->are_transfers_in_flight = trace->transfers.is_any_under_way();
}

void Transfer::begin_wait() {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr || pass_ == 0 || trace->pass != pass_) return;
  const std::lock_guard lock(trace->mutex);
  trace->transfers.begin_wait(number_);
  trace->are_transfers_in_flight = trace->transfers.is_any_under_way();
}

void Transfer::end() {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr || pass_ == 0 || trace->pass != pass_) return;
  const std::lock_guard lock(trace->mutex);
  trace->transfers.end(number_, trace->lineage, trace->clock.load(std::memory_order_relaxed));
  trace->are_transfers_in_flight = trace->transfers.is_any_under_way();
}

RepeatedExchange::RepeatedExchange() noexcept {
  is_exchange_repeated = true;
}

RepeatedExchange::~RepeatedExchange() {
  is_exchange_repeated = false;
}

void note_earlier_write(const at::Tensor& tensor, const EarlierWrite& write) {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr || !tensor.has_storage()) return;
  Place place;
  place.frame = write.op;
  place.caller = write.caller;
  place.group = write.group;
  place.is_of_first_pass = write.is_received;
  place.is_rewritten = write.is_rewritten;
  const auto shared = std::make_shared<const Place>(std::move(place));
  const std::lock_guard lock(trace->mutex);
  if (!trace->declarations.find_all(tensor).empty()) {
    return trace->declarations.note_writer(tensor, shared);
  }
  if (write.is_received) {
    trace->lineage.note_received(tensor, ++trace->clock, intern_name(write.op), shared, {});
  } else {
    trace->lineage.note_earlier(tensor, intern_name(write.op), shared);
  }
}

void note_copy(const at::Tensor& tensor, const at::Tensor& copy) {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr || !tensor.has_storage() || tensor.is_alias_of(copy)) return;
  const std::lock_guard lock(trace->mutex);
  Lineage& lineage = trace->lineage;
  const Known known = lineage.known_of(tensor);
  if (known.state == MemoryState::earlier) lineage.note_earlier(copy, known.writer, known.place);
  if (known.state != MemoryState::received) return;
  lineage.note_received(copy, known.clock, known.writer, known.place, known.births);
}

OperatorTrace::OperatorTrace(TraceOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->pass = next_pass();
  const std::lock_guard lock(lifetime_mutex);
  OperatorTrace::Impl* expected = nullptr;
  if (!active_trace.compare_exchange_strong(expected, impl_.get())) {
    throw UsageError(
        "an OperatorTrace observes this process already; one at a time: destroy the other first");
  }
  callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_start, &on_finish)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

OperatorTrace::~OperatorTrace() {
  const std::lock_guard lock(lifetime_mutex);
  at::removeCallback(callback);
  active_trace.store(nullptr);
  const int own = callbacks_of_this_thread;
  while (running_callbacks.load() != own) std::this_thread::yield();
  // A callback released the last owner (a tensor's finalizer may). It still needs the state it runs
  // in, which is leaked.
  if (own != 0) (void)impl_.release();
}

void OperatorTrace::declare(const at::Tensor& tensor, DeclaredAs as, std::string name) {
  const at::Tensor values = values_of(tensor);
  if (!values.defined()) return;
  const std::lock_guard lock(impl_->mutex);
  impl_->declarations.declare(values, as, std::move(name));
}

void note_model_inputs(std::span<const at::Tensor> inputs, bool is_all) {
  const ActiveTrace active;
  OperatorTrace::Impl* const trace = active.get();
  if (trace == nullptr) return;
  const std::lock_guard lock(trace->mutex);
  trace->knows_model_inputs &= is_all;
  for (const at::Tensor& tensor : inputs) {
    const at::Tensor values = values_of(tensor);
    if (values.defined())
      trace->model_inputs.inputs.push_back(values.storage().getWeakStorageImpl());
  }
}

void OperatorTrace::begin_pass() {
  Impl& trace = *impl_;
  count_kernel_calls_from_zero();
  std::vector<TracedBirth> old_births;  // destroyed without the lock: may call Python
  Lineage old_lineage;
  {
    const std::lock_guard lock(trace.mutex);
    std::swap(old_births, trace.births);
    std::swap(old_lineage, trace.lineage);
    trace.forward_calls.clear();
    trace.bad_calls.clear();
    trace.functions.clear();
    trace.arithmetic.clear();
    trace.custom_nodes.clear();
    trace.roots_of_backward.clear();
    trace.sent_in_forward.clear();
    trace.sent_in_backward.clear();
    trace.sent_to_one.clear();
    trace.notes.clear();
    trace.transfers.clear();
    trace.unordered.clear();
    trace.declarations.refresh();
    trace.model_inputs = {};
    trace.knows_model_inputs = true;
    trace.threads.begin_pass();
    trace.turn.begin_pass();
    trace.kept_bytes = 0;
    trace.calls_not_kept = trace.births_not_kept = 0;
    trace.first_not_kept.clear();
    trace.entered_phase.reset();
  }
  trace.operators = 0;
  trace.is_in_optimizer = false;
  trace.are_transfers_in_flight = trace.has_overlap = false;
  trace.modules_are_entered = false;
  trace.has_ended_backward = false;
  trace.microbatches_are_known = false;
  trace.pass = next_pass();
}

void OperatorTrace::enter_phase(std::optional<Phase> phase) {
  const std::lock_guard lock(impl_->mutex);
  impl_->entered_phase = phase;
  impl_->is_in_optimizer = phase == Phase::params_after;
}

Explanation OperatorTrace::explain(std::span<const NamedTensor> losses,
                                   std::span<const NamedTensor> gradients) {
  return impl_->explain(losses, gradients);
}

Explanation OperatorTrace::explain_sent() {
  return impl_->explain_sent();
}

std::vector<UnorderedAccess> OperatorTrace::unordered_accesses() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->unordered;
}

std::vector<ThreadOrder> OperatorTrace::thread_orders() const {
  return impl_->threads.orders();
}

bool OperatorTrace::has_reordered() const noexcept {
  return impl_->turn.has_come();
}

bool OperatorTrace::has_overlap() const noexcept {
  return impl_->has_overlap;
}

bool OperatorTrace::was_in_transfer(const at::Tensor& tensor) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->transfers.has_overlapped(tensor);
}

void OperatorTrace::pause() noexcept {
  impl_->is_paused = true;
}

void OperatorTrace::resume() noexcept {
  impl_->is_paused = false;
}

}  // namespace nanlocator::inline operators_room
