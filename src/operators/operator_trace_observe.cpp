#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "nanlocator/watch/microbatch_scope.hpp"
#include "operators/operator_trace_impl.hpp"
#include "tensor/own_work.hpp"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"

namespace nanlocator::inline operators_room {
namespace {

constexpr std::string_view kEvaluate = "autograd::engine::evaluate_function: ";

/// torch.use_deterministic_algorithms fills fresh memory with NaN, by fill_ inside the operator
/// that allocated it (structured kernels; ATen/native/TensorFactories.h). This does not count as a
/// write of a value.
bool is_deterministic_fill(const OperatorInfo& info, const at::RecordFunction& call,
                           const Frame* parent) {
  if (!info.is_fill || parent == nullptr || parent->info == nullptr) return false;
  const auto& context = at::globalContext();
  if (!context.deterministicAlgorithms() || !context.deterministicFillUninitializedMemory()) {
    return false;
  }
  const auto inputs = last_values(call.inputs(), info.arguments.size());
  return inputs.size() == 2 && inputs[1].isDouble() && std::isnan(inputs[1].toDouble());
}

/// True if the __torch_dispatch__ of a tensor's class gets the call, without a frame inside that
/// shows it.
bool is_silently_python(const at::RecordFunction& call) {
  bool is_python = false;
  if constexpr (!kPythonSubclassHasAFrame) {
    for (const auto& input : call.inputs()) {
      for_each_tensor_at(input, [&](const at::Tensor& tensor, int) {
        is_python = is_python || tensor.key_set().has(c10::DispatchKey::Python);
      });
    }
  }
  return is_python;
}

}  // namespace

const std::string* intern_name(const std::string& name) {
  static auto& mutex = *new std::mutex;
  static auto& names = *new std::unordered_set<std::string>;  // its elements never move
  const std::lock_guard lock(mutex);
  return &*names.emplace(name).first;
}

ProgramCode::Caller OperatorTrace::Impl::caller_now() const {
  return options.program_code ? options.program_code->caller() : ProgramCode::Caller{};
}

bool OperatorTrace::Impl::is_process_groups_own(const ThreadFrames& frames) const {
  return frames.is_of_gloo && !(options.program_code && options.program_code->is_running());
}

void OperatorTrace::Impl::start(const at::RecordFunction& call, ThreadFrames& frames) {
  const Frame* parent = frames.top();
  const bool is_inside_ignored =
      parent != nullptr &&
      (parent->is_ignored || (parent->info != nullptr && parent->info->is_allocator));
  Frame& frame = frames.push();
  if (is_inside_ignored || is_process_groups_own(frames) || call.isAsync() ||
      is_paused.load(std::memory_order_relaxed)) {
    frame.is_ignored = true;
    return;
  }
  if (const auto now = pass.load(std::memory_order_relaxed); frames.pass != now) {
    frames.pass = now;
    frames.last_module = nullptr;
    frames.last_custom_node = nullptr;
  }
  frame.start = clock.load(std::memory_order_relaxed);
  frame.module = current_module();
  if (call.scope() == at::RecordScope::BACKWARD_FUNCTION) return start_node(call, frame, frames);
  if (is_silently_python(call)) return start_container("PythonSubclass", call, frame, frames);
  frame.info = operator_info(call);
  if (frame.info == nullptr) return start_container(call.name(), call, frame, frames);
  if (is_deterministic_fill(*frame.info, call, parent) ||
      (frame.info->is_copy && parent != nullptr && parent->info != nullptr &&
       parent->info->owns_its_copy)) {
    frame.is_ignored = true;
    return;
  }
  start_operation(call, frame, frames);
}

static ResizedStorage resized_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return {};
  const auto bytes = tensor.storage().sym_nbytes().maybe_as_int();
  if (!bytes) return {};  // a symbolic size of torch.compile
  return {tensor.storage().unsafeGetStorageImpl(), static_cast<std::size_t>(*bytes)};
}

void OperatorTrace::Impl::start_operation(const at::RecordFunction& call, Frame& frame,
                                          ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  operators.fetch_add(1, std::memory_order_relaxed);
  const auto microbatch = current_microbatch().microbatch;
  if (microbatch) microbatches_are_known.store(true, std::memory_order_relaxed);
  if (frame.module != nullptr) {
    modules_are_entered.store(true, std::memory_order_relaxed);
    if (frames.backward_depth == 0) has_ended_backward.store(false, std::memory_order_relaxed);
    frames.microbatch_of_modules = microbatch;
  }
  if (info.is_allocator && info.writes) {
    const auto inputs = last_values(call.inputs(), info.arguments.size());
    if (!inputs.empty() && inputs[0].isTensor()) frame.resized = resized_of(inputs[0].toTensor());
  }
  if (!info.is_allocator && !info.is_view) {
    const auto inputs = last_values(call.inputs(), info.arguments.size());
    frame.arguments.assign(inputs.begin(), inputs.end());
    frame.has_arguments = frame.arguments.size() == info.arguments.size();
    if (frame.module == nullptr && frames.backward_depth == 0) use_declared_module(frame, frames);
  }
  if (call.seqNr() >= 0) {
    frame.sequence = call.seqNr();
    frame.forward_thread = at::RecordFunction::currentThreadId();
    const ProgramCode::Caller caller = caller_now();
    const std::lock_guard lock(mutex);
    note_forward_call(frame, frames, &info.full_name, caller, info.is_view);
  }
  if (!frame.has_arguments) return;
  if (info.collective) return scan_what_is_sent(frame, frames);
  if (are_transfers_in_flight.load(std::memory_order_relaxed)) {
    note_unordered_accesses(frame, frames);
  }
  if (follows_threads()) start_beside_threads(frame, frames);
  // An optimizer writes all weights and states in place: too much to copy at every call.
  const bool is_optimizers = info.writes && is_in_optimizer.load(std::memory_order_relaxed);
  if (options.keep_calls && info.facts != nullptr && !is_optimizers) capture(call, frame);
  if (info.writes) scan_before_write(frame, frames);
}

bool OperatorTrace::Impl::has_known_nan(const Frame& operation) {
  const OperatorInfo& info = *operation.info;
  bool has = false;
  const std::lock_guard lock(mutex);
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    if (!is_read(info, operation.arguments, i)) continue;
    for_each_tensor_at(operation.arguments[i], [&](const at::Tensor& tensor, int) {
      has = has || (is_plainly_observable(tensor) && lineage.is_known_to_have_nan(tensor));
    });
  }
  return has;
}

void OperatorTrace::Impl::capture(const at::RecordFunction& call, Frame& frame) {
  if (has_known_nan(frame)) return;  // bad outputs come from it: no birth
  if (has_subclass(call.inputs())) return;
  std::uint64_t wanted = 0;
  frame.is_captured = frame.capture.begin(call, *frame.info->facts, [&](std::uint64_t bytes) {
    wanted = bytes;
    const std::lock_guard lock(mutex);
    return has_room_for(bytes);
  });
  if (!frame.is_captured) frame.bytes_not_captured = wanted;
}

static bool is_only_written(const Frame& collective) {
  if (!is_from_root(*collective.info->collective)) return false;
  const std::size_t i = index_of_group(*collective.info, collective.arguments.size());
  if (i + 1 >= collective.arguments.size()) return false;
  const auto group = collective.arguments[i].toCustomClass<c10d::ProcessGroup>();
  return collective.arguments[i + 1].toInt() != group->getRank();
}

/// Scans the input of a collective or a send, which is the last tensor argument of c10d's operators
/// (torch/csrc/distributed/c10d/Ops.cpp); recv_ has none. Scanned before the call, because most
/// write in place, on their own threads.
void OperatorTrace::Impl::scan_what_is_sent(Frame& frame, ThreadFrames& frames) {
  if (frame.info->collective == CollectiveKind::receive || frame.arguments.empty()) return;
  if (is_only_written(frame)) return;
  const auto holds_tensors = [](const c10::IValue& value) {
    return value.isTensor() || value.isTensorList() || value.isList();
  };
  const bool is_sum = is_reduction(*frame.info->collective);
  const bool has_output_first = frame.arguments.size() > 1 && holds_tensors(frame.arguments[1]);
  const auto add = [&](const at::Tensor& tensor, int) {
    if (!is_plainly_observable(tensor)) {
      if (!has_own_memory(tensor)) return;
      const std::lock_guard lock(mutex);
      return unite(frame.sent, lineage.births_in(tensor));
    }
    if (is_sum) {
      const TensorStats stats = stats_of(tensor, options.threads);
      if (stats.has_finite()) frame.largest_sent = std::max(frame.largest_sent, stats.absmax);
      if (stats.is_finite()) return;
    } else if (!is_bad(tensor)) {
      return;
    }
    unite(frame.sent, origins_of(tensor, frames, frame.info->full_name));
  };
  const c10::IValue& input = frame.arguments[has_output_first ? 1 : 0];
  for_each_tensor_at(input, add);
  if (input.isList()) {
    for (const c10::IValue& inner : input.toListRef()) {
      if (inner.isList()) for_each_tensor_at(inner, add);
    }
  }
  if (frame.sent.empty()) return;
  const std::lock_guard lock(mutex);
  auto& sent = located(frames).is_backward ? sent_in_backward : sent_in_forward;
  sent.insert(frame.sent.begin(), frame.sent.end());
  if (*frame.info->collective == CollectiveKind::send) {
    sent_to_one.insert(frame.sent.begin(), frame.sent.end());
  }
}

void OperatorTrace::Impl::use_declared_module(const Frame& frame, ThreadFrames& frames) {
  if (modules_are_entered.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex);
  if (declarations.empty()) return;
  for (const auto& argument : frame.arguments) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      if (!is_plainly_observable(tensor)) return;
      const auto* declared = declarations.find(tensor);
      if (declared != nullptr && declared->as != DeclaredAs::data) {
        frames.last_module = intern_module_path(declared->module);
      }
    });
  }
}

/// True for memory that the function around a kernel has allocated as the kernel's output.
static bool is_unwritten(const Known& memory) {
  return memory.is_unwritten() && memory.touched_by == nullptr;
}

void OperatorTrace::Impl::scan_before_write(Frame& frame, ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  std::vector<const c10::StorageImpl*> written;
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    if (info.arguments[i] == ArgumentUse::read) continue;
    for_each_tensor_at(frame.arguments[i], [&](const at::Tensor& tensor, int) {
      if (is_plainly_observable(tensor)) {
        written.push_back(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    if (!is_read(info, frame.arguments, i)) continue;
    for_each_tensor_at(frame.arguments[i], [&](const at::Tensor& tensor, int) {
      if (!is_plainly_observable(tensor)) return;
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (std::find(written.begin(), written.end(), storage) == written.end()) return;
      BeforeWrite before{.tensor = tensor.unsafeGetTensorImpl(), .births = {}};
      bool is_known_finite = false, is_to_fill = false;
      {
        const std::lock_guard lock(mutex);
        const Known known = lineage.known_of(tensor);
        is_to_fill = info.is_custom && is_unwritten(known);
        // A captured copy shows whether the memory has changed since its last write.
        is_known_finite = frame.is_captured && known.state == MemoryState::finite;
      }
      if (!is_known_finite) before.content = content_of(tensor);
      if (before.content != Content::finite) {
        // A library's operator passes it to its kernel as output; the content afterwards says more.
        if (is_to_fill) return;
        before.births = origins_of(tensor, frames, info.full_name);
      }
      frame.before_write.push_back(std::move(before));
    });
  }
}

void OperatorTrace::Impl::start_container(std::string_view name, const at::RecordFunction& call,
                                          Frame& frame, ThreadFrames& frames) {
  if (name.starts_with(kEvaluate)) {
    name.remove_prefix(kEvaluate.size());
    frame.kind = FrameKind::evaluate;
    frame.name = name;
    ++frames.backward_depth;
    return;
  }
  if (name == "detach" || name == "detach_") {  // VariableTypeManual.cpp
    frame.kind = FrameKind::passage;
    return;
  }
  frame.kind = FrameKind::container;
  frame.name = name;
  frame.sequence = call.seqNr();
  frame.forward_thread = at::RecordFunction::currentThreadId();
  frame.given = std::make_shared<Given>();
  Place here = current_place(frames);
  if (here.is_called_by_program) here.caller = caller_now();
  here.custom_function = custom_function_of(frame.name);
  const std::string* interned = intern_name(frame.name);
  scan_given(call.inputs(), here, frame, frames);
  const std::lock_guard lock(mutex);
  if (frame.sequence >= 0) note_forward_call(frame, frames, interned, here.caller, false);
}

/// True for memory that an operator allocated around the frame and that has no known write: the
/// frame must fill it, so its present content is not an input.
static bool is_to_be_filled(const Known& memory, const Place& frame) {
  if (!memory.is_unwritten()) return false;
  if (memory.place == nullptr || memory.place->given != nullptr) return false;
  const std::string& around = memory.place->module;
  return around.empty() || frame.module == around || frame.module.starts_with(around + ".");
}

/// Scans the inputs of a frame off the dispatcher when it is entered: its reads are not seen, and
/// it may overwrite them.
void OperatorTrace::Impl::scan_given(c10::ArrayRef<const c10::IValue> inputs, const Place& place,
                                     Frame& frame, ThreadFrames& frames) {
  std::vector<at::Tensor> given, unwritten, bytes;
  for (const auto& input : inputs) {
    for_each_tensor_at(input, [&](const at::Tensor& tensor, int) {
      if (at::Tensor values = values_of(tensor); values.defined()) {
        given.push_back(values);
      } else if (has_own_memory(tensor)) {
        bytes.push_back(tensor);
      }
    });
  }
  {
    const std::lock_guard lock(mutex);
    for (const auto& tensor : bytes) {
      if (const BirthIds moved = lineage.births_in(tensor); !moved.empty()) {
        frame.given->add(Content::nan, moved);
      }
      const bool may_be_payload = tensor.element_size() == 1 && tensor.scalar_type() != at::kBool;
      if (may_be_payload && lineage.state_of(tensor) == MemoryState::bytes) {
        frame.given->has_unread = true;
      }
    }
    for (const auto& tensor : given) {
      frame.given->inputs.push_back(tensor.storage().getWeakStorageImpl());
      for (const auto* declared : declarations.find_all(tensor)) {
        if (declared->as != DeclaredAs::parameter) continue;
        frame.given->parameters.push_back(declared->name);
      }
    }
    std::erase_if(given, [&](const at::Tensor& each) {
      const Known known = lineage.known_of(each);
      if (frame.kernel == nullptr) return is_to_be_filled(known, place);
      if (is_unwritten(known)) unwritten.push_back(each);
      return is_unwritten(known);
    });
  }
  for (const auto& each : unwritten) {
    frame.has_bad_unwritten = frame.has_bad_unwritten || is_bad(each);
  }
  std::vector<const at::Tensor*> scanned;
  for (const auto& tensor : given) scanned.push_back(&tensor);
  if (any_is_bad(scanned)) {
    for (const auto& tensor : given) {
      const Content content = content_of(tensor);
      if (content == Content::finite) continue;
      if (frame.kernel != nullptr && is_seen_first(tensor)) {
        frame.unclear.push_back({tensor, content, stats_of(tensor, options.threads).fingerprint});
        continue;
      }
      const BirthIds births_of_it = origins_of(tensor, frames, frame.name);
      const std::lock_guard lock(mutex);
      frame.given->add(content, births_of_it);
    }
  }
  const auto touched_by = std::make_shared<const Place>(place);
  const std::lock_guard lock(mutex);
  for (const auto& input : inputs) {
    for_each_tensor_at(input, [&](const at::Tensor& tensor, int) {
      if (has_own_memory(tensor)) lineage.note_touch(tensor, touched_by);
    });
  }
}

/// The caller holds the lock.
void OperatorTrace::Impl::note_forward_call(const Frame& frame, const ThreadFrames& frames,
                                            const std::string* op,
                                            const ProgramCode::Caller& caller, bool is_view) {
  const ModulePath last = frame.module != nullptr ? nullptr : module_used_last(frames);
  forward_calls[frame.forward_thread][frame.sequence] = {
      .module = frame.module != nullptr ? frame.module : last,
      .op = op,
      .is_module_inferred = last != nullptr,
      .caller = caller,
      .given = frame.given,
      .is_view = is_view};
}

/// For programs that enter no modules. If modules are entered, code outside them has none.
ModulePath OperatorTrace::Impl::module_used_last(const ThreadFrames& frames) const {
  return modules_are_entered.load(std::memory_order_relaxed) ? nullptr : frames.last_module;
}

/// The tensors that backward() was called on are losses, even if not declared as such: births that
/// made them bad have reached the loss.
void OperatorTrace::Impl::note_roots_of_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (graph_task.exchange(task, std::memory_order_relaxed) == task) return;
  has_ended_backward.store(true, std::memory_order_relaxed);  // when a later operator asks
  const auto first = torch::autograd::get_current_node();
  if (first == nullptr) return;
  std::vector<const torch::autograd::Node*> roots = {first.get()};
  if (first->name().ends_with("GraphRoot")) {  // of several losses
    roots.clear();
    for (const auto& edge : first->next_edges()) roots.push_back(edge.function.get());
  }
  const std::lock_guard lock(mutex);
  for (const auto* node : roots) {
    constexpr int kMostViews = 8;
    for (int views = 0; node != nullptr && views < kMostViews; ++views) {
      const auto sequence = static_cast<std::int64_t>(node->sequence_nr());
      if (const auto bad = bad_calls.find({node->thread_id(), sequence}); bad != bad_calls.end()) {
        unite(roots_of_backward, bad->second);
        break;
      }
      const bool is_view = forward_call_locked(node->thread_id(), sequence).is_view;
      node = is_view && node->num_outputs() == 1 ? node->next_edge(0).function.get() : nullptr;
    }
  }
}

void OperatorTrace::Impl::start_node(const at::RecordFunction& call, Frame& frame,
                                     ThreadFrames& frames) {
  frame.kind = FrameKind::node;
  ++frames.backward_depth;
  frame.name = call.name();
  frame.sequence = call.seqNr();
  frame.forward_thread = call.forwardThreadId();
  frame.records = at::GradMode::is_enabled();
  frame.is_custom = is_custom_node(frame.name);
  Frame* evaluate = frames.above(1);
  const bool is_engines = evaluate != nullptr && evaluate->kind == FrameKind::evaluate;
  if (is_engines) {
    evaluate->sequence = frame.sequence;
    evaluate->forward_thread = frame.forward_thread;
    evaluate->records = frame.records;
    constexpr std::size_t kOutermost = 2;  // evaluate_function and the node in it
    if (frames.backward_depth == kOutermost) note_roots_of_backward();
  }
  if (frames.last_custom_node) {
    const std::lock_guard lock(mutex);
    for (const auto& input : call.inputs()) {
      if (!input.isTensor() || !is_plainly_observable(input.toTensor())) continue;
      lineage.note_foreign(input.toTensor(), frames.last_custom_node);
      // What that node wrote by operators, it may have written to in other ways, too.
      const std::uint64_t written = lineage.last_write_of(input.toTensor()).clock;
      if (frames.last_custom_start < written && written <= frames.last_custom_end) {
        lineage.note_touch(input.toTensor(), frames.last_custom_node);
      }
    }
  }
  if (frame.is_custom) {
    // Its saved tensors may contain its forward's inputs.
    frame.given = std::make_shared<Given>();
    const ForwardCall forward = forward_call_of(frame.forward_thread, frame.sequence);
    if (forward.given != nullptr) {
      const std::lock_guard lock(mutex);
      frame.given->with_nan = forward.given->with_nan;
      frame.given->with_any = forward.given->with_any;
      frame.given->parameters = forward.given->parameters;
    }
    scan_given(call.inputs(), current_place(frames), frame, frames);
  }
  if (!is_engines || evaluate->hooks.empty()) return;
  const std::lock_guard lock(mutex);
  const ForwardCall forward = forward_call_locked(frame.forward_thread, frame.sequence);
  for (const BirthId id : evaluate->hooks) {
    Birth& birth = births[static_cast<std::size_t>(id)].birth;
    if (forward.module != nullptr) birth.sighting.module = *forward.module;
    birth.is_module_inferred = forward.is_module_inferred;
    if (forward.op != nullptr) birth.forward_op = *forward.op;
  }
}

void OperatorTrace::Impl::finish(const at::RecordFunction& call, ThreadFrames& frames) {
  Frame& frame = *frames.top();
  if (frame.is_ignored) return;
  if (frame.given != nullptr) scan_received(frame, frames);
  if (frame.kind == FrameKind::node) return finish_node(frame, frames);
  if (frame.kind != FrameKind::operation) return;
  finish_operation(call, frame, frames);
  if (follows_threads()) finish_beside_threads(frame, frames);
}

/// Scans the results of collectives inside the frame, which its kernels read: it gathered a part of
/// its input. They have been waited for when the frame ends, or when an operator reads its kernels'
/// results.
void OperatorTrace::Impl::scan_received(Frame& frame, ThreadFrames& frames) {
  const std::vector<at::Tensor> received = std::exchange(frame.received, {});
  for (const at::Tensor& tensor : received) {
    const at::Tensor values = values_of(tensor);
    const Content content = values.defined() ? content_of(values) : Content::finite;
    if (content == Content::finite) continue;
    const BirthIds births_of_it = origins_of(values, frames, frame.name);
    const std::lock_guard lock(mutex);
    frame.given->add(content, births_of_it);
  }
}

/// The innermost custom function around a collective, whose kernels may read the result. Null for
/// such functions of Torch's own, which may gather very much.
static Frame* custom_frame_around(ThreadFrames& frames) {
  for (std::size_t i = 1; Frame* each = frames.above(i); ++i) {
    if (each->given != nullptr) return custom_function_of(each->name).empty() ? nullptr : each;
    if (each->kind == FrameKind::node || each->kind == FrameKind::evaluate) return nullptr;
  }
  return nullptr;
}

void OperatorTrace::Impl::finish_node(Frame& frame, ThreadFrames& frames) {
  if (frame.is_custom) {
    frames.last_custom_node = std::make_shared<const Place>(current_place(frames));
    frames.last_custom_start = frame.start;
    frames.last_custom_end = clock.load(std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    custom_nodes.push_back({.place = frames.last_custom_node,
                            .parameters = frame.given->parameters,
                            .start = frame.start});
  }
  Frame* evaluate = frames.above(1);
  if (evaluate != nullptr && evaluate->kind == FrameKind::evaluate) evaluate->node_has_run = true;
}

void OperatorTrace::Impl::finish_operation(const at::RecordFunction& call, Frame& frame,
                                           ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  if (info.is_allocator) return note_allocation(call, frames);
  if (info.collective) return note_received(call, frame, frames);
  if (info.is_view && !info.is_lift_fresh) return;
  thread_local std::vector<TensorAt> outputs;
  thread_local std::vector<at::Tensor> bytes;  // outputs of integers
  struct LetGo {
    ~LetGo() {
      outputs.clear();
      bytes.clear();
    }
  } const let_go;
  const auto returned = last_values(call.outputs(), info.returns_alias.size());
  const auto add = [&](const c10::IValue& value, int index) {
    for_each_tensor_at(value, [&](const at::Tensor& tensor, int element) {
      if (is_plainly_observable(tensor)) {
        outputs.push_back({tensor, index, element});
      } else if (at::Tensor values = values_of(tensor); values.defined()) {
        outputs.push_back({std::move(values), index, element});
      } else if (has_own_memory(tensor)) {
        bytes.push_back(tensor);
      }
    });
  };
  for (std::size_t i = 0; i < returned.size(); ++i) {
    // lift_fresh ends torch.tensor(...) and returns the new tensor.
    if (!info.returns_alias[i] || info.is_lift_fresh) add(returned[i], static_cast<int>(i));
  }
  const bool returns_what_it_writes = !returned.empty() && !info.updates_statistics;
  if (!returns_what_it_writes && info.writes && frame.has_arguments) {
    for (std::size_t i = 0; i < frame.arguments.size(); ++i) {
      if (info.arguments[i] != ArgumentUse::read) add(frame.arguments[i], static_cast<int>(i));
    }
  }
  if (!bytes.empty()) note_bytes(std::exchange(bytes, {}), frame, frames);
  if (outputs.empty()) return;
  if (const Frame* collective = collective_around(frames)) {
    // A copy that the process group writes to later (ProcessGroupGloo::_reduce_scatter_base).
    const auto place = place_of_collective(*collective, frames);
    const std::lock_guard lock(mutex);
    for (const auto& output : outputs) {
      lineage.note_received(output.values, clock.load(std::memory_order_relaxed),
                            &collective->info->full_name, place, collective->sent);
    }
    return;
  }
  if (info.is_lift_fresh && !is_fresh_constant(outputs.front().values)) {
    return note_constant_of_device(outputs.front().values, info);
  }
  if (info.is_composite && !info.owns_its_copy && inner_operators_wrote(outputs, frame)) return;

  thread_local std::vector<const at::Tensor*> scanned;
  scanned.clear();
  for (const auto& output : outputs) scanned.push_back(&output.values);
  if (any_is_bad(scanned)) {
    // Its births may call Python, whose operators re-enter this function: pass on the list itself.
    return explain_bad_outputs(call, frame, frames, std::exchange(outputs, {}));
  }
  // A custom function zeroes memory for its kernels to add to.
  std::shared_ptr<const Place> adds_to_it;
  if (info.is_filler) {
    Place place = current_place(frames);
    if (place.given != nullptr) adds_to_it = std::make_shared<const Place>(std::move(place));
  }
  const std::lock_guard lock(mutex);
  const std::uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
  for (const auto& output : outputs) {
    lineage.note_finite_write(output.values, now, &info.full_name, info.is_filler);
    if (adds_to_it != nullptr) lineage.note_touch(output.values, adds_to_it);
  }
}

/// Births follow values that are moved as bytes: a float8 payload that is viewed as uint8, copied
/// or gathered, and viewed as float8 again.
void OperatorTrace::Impl::note_bytes(const std::vector<at::Tensor>& written, const Frame& frame,
                                     ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  const auto place = std::make_shared<Place>(current_place(frames));
  place->frame = info.full_name;
  const std::lock_guard lock(mutex);
  BirthIds moved;
  bool are_finite = info.moves_values, are_known = !info.moves_values;
  for (std::size_t i = 0; frame.has_arguments && i < frame.arguments.size(); ++i) {
    if (info.arguments[i] == ArgumentUse::overwritten) continue;
    for_each_tensor_at(frame.arguments[i], [&](const at::Tensor& tensor, int) {
      if (!has_own_memory(tensor) || is_plainly_observable(tensor)) return;
      unite(moved, lineage.births_in(tensor));
      are_finite = are_finite && lineage.state_of(tensor) == MemoryState::finite;
      are_known = are_known || lineage.knows(tensor);
    });
  }
  const std::uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
  for (const at::Tensor& tensor : written) {
    if (!moved.empty()) {
      lineage.note_bad_write(tensor, now, &info.full_name, moved, Content::finite);
    } else if (are_finite || info.is_filler) {
      lineage.note_finite_write(tensor, now, &info.full_name, info.is_filler);
    } else if (are_known) {
      lineage.note_bytes(tensor, now, &info.full_name, place);
    } else {
      lineage.forget(tensor);
    }
  }
}

/// True for torch.tensor(...), which fills memory that an operator allocated: a constant of the
/// program. The result of torch.from_numpy(...) has no such record, because it was computed
/// elsewhere.
bool OperatorTrace::Impl::is_fresh_constant(const at::Tensor& values) {
  const std::lock_guard lock(mutex);
  return lineage.state_of(values) == MemoryState::allocated;
}

/// torch.tensor(..., device="cuda") fills host memory and copies it, before lift_fresh. So the
/// unwritten memory that this copy has just read was a constant, too.
void OperatorTrace::Impl::note_constant_of_device(const at::Tensor& values,
                                                  const OperatorInfo& info) {
  const std::lock_guard lock(mutex);
  const BirthIds ids = lineage.births_in(values);
  if (ids.size() != 1 || static_cast<std::size_t>(ids.front()) + 1 != births.size()) return;
  Birth& birth = births.back().birth;
  if (birth.kind != BirthKind::opaque || birth.last_seen != LastSeen::allocated) return;
  birth.kind = BirthKind::literal;
  birth.sighting.op = info.full_name;
  birth.last_seen = LastSeen::unknown;
  birth.writer.clear();
  birth.inside.clear();
}

bool OperatorTrace::Impl::inner_operators_wrote(const std::vector<TensorAt>& outputs,
                                                const Frame& frame) {
  const std::lock_guard lock(mutex);
  return std::all_of(outputs.begin(), outputs.end(), [&](const TensorAt& output) {
    const Piece last = lineage.last_write_of(output.values);
    return last.is_written() && !last.is_filler && last.clock > frame.start;
  });
}

/// Keeps the version counter, so that autograd sees no change.
void OperatorTrace::Impl::fill_fresh_memory(const at::Tensor& tensor) const {
  const at::Tensor values = values_of(tensor);
  if (!values.defined() || values.numel() == 0) return;
  const OwnWork own_work;
  (void)values.fill_(*options.fresh_memory);
}

/// Fills the elements that a resize_ has added to the storage.
void OperatorTrace::Impl::fill_growth(const at::Tensor& tensor, std::size_t bytes_before) const {
  const std::size_t element = tensor.element_size();
  const auto begin = static_cast<std::int64_t>((bytes_before + element - 1) / element);
  const auto end = static_cast<std::int64_t>(tensor.storage().nbytes() / element);
  if (begin >= end) return;
  const OwnWork own_work;
  const at::Tensor growth =
      at::empty({0}, tensor.options()).set_(tensor.storage(), begin, {end - begin}, {1});
  (void)growth.fill_(*options.fresh_memory);
}

void OperatorTrace::Impl::note_allocation(const at::RecordFunction& call, ThreadFrames& frames) {
  const Frame& frame = *frames.top();
  const OperatorInfo& info = *frame.info;
  const auto returned = last_values(call.outputs(), info.returns_alias.size());
  // Inside another operator, the kernel that allocated the memory writes it next.
  const Frame* parent = frames.above(1);
  const bool is_inside_operator = parent != nullptr && parent->kind == FrameKind::operation;
  std::shared_ptr<Place> place;
  if (!is_inside_operator) place = std::make_shared<Place>(current_place(frames));
  // resize_ and set_ keep existing content.
  const auto has_grown = [&](const at::Tensor& tensor) {
    const auto& [storage, bytes] = frame.resized;
    return is_plainly_observable(tensor) && tensor.storage().unsafeGetStorageImpl() == storage &&
           tensor.storage().nbytes() > bytes;
  };
  if (options.fresh_memory) {
    if (place != nullptr) place->allocated_at = caller_now();
    for (const auto& value : returned) {
      for_each_tensor_at(value, [&](const at::Tensor& tensor, int) {
        if (!info.writes) {
          fill_fresh_memory(tensor);
        } else if (has_grown(tensor)) {
          fill_growth(tensor, frame.resized.bytes);
        }
      });
    }
  }
  const std::lock_guard lock(mutex);
  for (const auto& value : returned) {
    for_each_tensor_at(value, [&](const at::Tensor& tensor, int) {
      if (!has_own_memory(tensor)) return;
      const std::uint64_t now = clock.load(std::memory_order_relaxed);
      if (!info.writes || !lineage.knows(tensor)) {
        lineage.note_allocation(tensor, now, &info.full_name, place);
      } else if (has_grown(tensor)) {
        const auto bytes_before = static_cast<std::int64_t>(frame.resized.bytes);
        lineage.note_growth(tensor, bytes_before, now, &info.full_name, place);
      }
    });
  }
}

std::shared_ptr<const Place> OperatorTrace::Impl::place_of_collective(const Frame& collective,
                                                                      ThreadFrames& frames) {
  Place place = current_place(frames);
  place.group = group_of(*collective.info, collective.arguments);
  place.largest_sent = collective.largest_sent;
  place.is_of_first_pass = is_exchange_repeated;
  return std::make_shared<const Place>(std::move(place));
}

void OperatorTrace::Impl::note_received(const at::RecordFunction& call, Frame& frame,
                                        ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  if (info.collective == CollectiveKind::send || info.collective == CollectiveKind::wait ||
      !frame.has_arguments) {
    return;
  }
  const auto place = place_of_collective(frame, frames);
  Frame* reader = custom_frame_around(frames);
  const std::lock_guard lock(mutex);
  bool is_returned = false;
  const auto receive = [&](const at::Tensor& tensor) {
    if (!has_own_memory(tensor)) return;
    is_returned = true;
    if (reader != nullptr) reader->received.push_back(tensor);
    lineage.note_received(tensor, clock.load(std::memory_order_relaxed), &info.full_name, place,
                          frame.sent);
  };
  for (const auto& value : last_values(call.outputs(), info.returns_alias.size())) {
    for_each_tensor_within(value, receive);
  }
  // recv_, reduce_, alltoall_base_, ... return only their Work and write their first argument.
  if (!is_returned && !frame.arguments.empty()) {
    for_each_tensor_within(frame.arguments[0], receive);
  }
}

}  // namespace nanlocator::inline operators_room
