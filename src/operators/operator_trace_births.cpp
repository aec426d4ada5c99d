#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "nanlocator/operators/gradient_work.hpp"
#include "nanlocator/watch/microbatch_scope.hpp"
#include "nanlocator/watch/position.hpp"
#include "operators/operator_trace_impl.hpp"
#include "replay/first_bad.hpp"
#include "replay/host_memory.hpp"
#include "replay/values.hpp"
#include "tensor/chunks.hpp"
#include "tensor/extent.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"

namespace nanlocator::inline operators_room {
namespace {

/// Beyond this many, births are kept without their calls.
constexpr std::size_t kMostBirths = 20000;

Content content_of_number(double number) {
  return std::isnan(number) ? Content::nan : std::isinf(number) ? Content::inf : Content::finite;
}

/// The content of a scalar argument, or of a list of them.
Content content_of_scalar(const c10::IValue& value) {
  Content content = Content::finite;
  const auto add = [&](double number) { content = std::max(content, content_of_number(number)); };
  if (value.isDouble()) add(value.toDouble());
  if (value.isComplexDouble()) {
    add(value.toComplexDouble().real());
    add(value.toComplexDouble().imag());
  }
  if (value.isDoubleList()) {
    for (const double number : value.toDoubleVector()) add(number);
  }
  return content;
}

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool has_literal(const Frame& operation) {
  return std::any_of(
      operation.arguments.begin(), operation.arguments.end(), [](const c10::IValue& argument) {
        if (content_of_scalar(argument) != Content::finite) return true;
        return argument.isTensor() && is_wrapped_number(argument.toTensor()) &&
               is_plainly_observable(argument.toTensor()) && is_bad(argument.toTensor());
      });
}

std::string role_of(const char* what, const TensorAt& at) {
  std::string role = std::string(what) + "[" + std::to_string(at.index) + "]";
  return at.element < 0 ? role : role + "[" + std::to_string(at.element) + "]";
}

}  // namespace

ForwardCall OperatorTrace::Impl::forward_call_of(std::uint64_t thread, std::int64_t sequence) {
  const std::lock_guard lock(mutex);
  return forward_call_locked(thread, sequence);
}

ForwardCall OperatorTrace::Impl::forward_call_locked(std::uint64_t thread,
                                                     std::int64_t sequence) const {
  const auto calls = forward_calls.find(thread);
  if (sequence < 0 || calls == forward_calls.end()) return {};
  // A C++ custom function is not recorded itself. The operator before it probably has its module.
  constexpr std::int64_t kFarthest = 16;
  for (std::int64_t back = 0; back <= std::min(kFarthest, sequence); ++back) {
    const auto found = calls->second.find(sequence - back);
    if (found == calls->second.end()) continue;
    if (back == 0) return found->second;
    return {found->second.module, nullptr, true};
  }
  return {};
}

Place OperatorTrace::Impl::current_place(ThreadFrames& frames) {
  const Location location = located(frames);
  if (location.container != nullptr && location.container->kernel != nullptr) {
    return *location.container->kernel;
  }
  const ModulePath module = current_module();
  Place place;
  if (location.container != nullptr) {
    place.given = location.container->given;
  } else if (location.node_frame != nullptr) {
    place.given = location.node_frame->given;
  }
  place.is_backward = location.is_backward;
  place.node = location.node;
  if (location.container != nullptr) place.frame = location.container->name;
  if (location.is_backward) {
    ForwardCall forward;
    if (location.node_frame != nullptr) {
      forward = forward_call_of(location.node_frame->forward_thread, location.node_frame->sequence);
      if (place.frame.empty() && location.node_frame->is_custom) place.frame = location.node;
    }
    if (forward.op != nullptr) place.forward_op = *forward.op;
    // Recomputation, a forward that runs again inside backward: its modules are entered, and
    // autograd records it, though not the backward around it.
    const Frame* node = location.node_frame;
    const bool is_in_new_module = module != nullptr && node != nullptr && node->module != module;
    place.is_recomputed =
        is_in_new_module || (node != nullptr && at::GradMode::is_enabled() && !node->records);
    const bool is_custom = node != nullptr && node->is_custom;
    place.is_called_by_program = place.is_recomputed || is_custom || location.is_hook;
    place.caller = forward.caller;
    if (is_in_new_module) {
      place.module = *module;
    } else if (forward.module != nullptr) {
      place.module = *forward.module;
      place.is_module_inferred = forward.is_module_inferred;
    }
    if (is_custom && !place.is_recomputed && !location.is_hook) {
      place.custom_function = custom_function_of(location.node);
    }
    return place;
  }
  // If a module was entered inside the function, that module's code computes.
  if (location.container != nullptr && location.container->module == module) {
    place.custom_function = custom_function_of(location.container->name);
  }
  if (module != nullptr) {
    place.module = *module;
  } else if (const ModulePath last = module_used_last(frames); last != nullptr) {
    place.module = *last;
    place.is_module_inferred = true;
  }
  return place;
}

/// Frames in which DistributedDataParallel distributes the reduced buckets
/// (torch/csrc/distributed/c10d/reducer.cpp).
static bool is_of_reducer(std::string_view frame) {
  return frame.starts_with("torch.distributed.ddp.reducer::");
}

static thread_local std::optional<bool> works_on_gradients;

GradientWork::GradientWork(bool is_on_gradients) noexcept
    : outer_(std::exchange(works_on_gradients, is_on_gradients)) {}

GradientWork::~GradientWork() {
  works_on_gradients = outer_;
}

std::optional<bool> GradientWork::current() noexcept {
  return works_on_gradients;
}

/// What a hook computes may be PyTorch's own: a communication hook that the program has only
/// chosen.
bool OperatorTrace::Impl::is_in_programs_code() const {
  return !options.program_code || caller_now().is_programs;
}

bool OperatorTrace::Impl::uses_gradients(ThreadFrames& frames) {
  bool is_gradient = false;
  for (std::size_t i = 0; const Frame* each = frames.above(i); ++i) {
    if (each->kind == FrameKind::passage) continue;
    if (each->kind != FrameKind::operation || is_gradient) break;
    for (const c10::IValue& argument : each->arguments) {
      for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
        const at::Tensor values = is_gradient ? at::Tensor() : values_of(tensor);
        if (!values.defined()) return;
        const std::lock_guard lock(mutex);
        is_gradient = declarations.has_gradient_in(values);
      });
    }
  }
  return is_gradient;
}

void OperatorTrace::Impl::locate(Birth& birth, ThreadFrames& frames) {
  const Place place = current_place(frames);
  std::optional<Phase> phase;
  {
    const std::lock_guard lock(mutex);
    phase = entered_phase;
  }
  birth.node = place.node;
  birth.forward_op = place.forward_op;
  birth.custom_function = place.custom_function;
  const MicrobatchPlace batch = current_microbatch();
  birth.sighting.microbatch = batch.microbatch;
  birth.sighting.chunk = batch.chunk;
  if (phase) {
    birth.sighting.phase = *phase;
  } else {
    birth.sighting.position = current_position();
    birth.sighting.module = place.module;
    birth.is_module_inferred = place.is_module_inferred;
    const bool is_outside =
        place.module.empty() && modules_are_entered.load(std::memory_order_relaxed);
    // Between the schedule's steps, only gradients are handled.
    const bool is_between_steps =
        is_outside && !batch.microbatch && microbatches_are_known.load(std::memory_order_relaxed);
    // Before its microbatch enters a module, the batch is being prepared.
    const bool is_loss = is_outside && frames.microbatch_of_modules == batch.microbatch;
    // The program's own: an in-place division, a clip, which computes its norm without gradients.
    bool is_on_gradients = false;
    if (is_outside && !place.is_backward && !is_between_steps) {
      const auto known = GradientWork::current();
      is_on_gradients =
          known ? *known
                : uses_gradients(frames) || (has_ended_backward.load(std::memory_order_relaxed) &&
                                             !at::GradMode::is_enabled());
    }
    birth.sighting.phase = is_of_reducer(place.custom_function) ? Phase::grad_reduced
                           : place.is_recomputed                ? Phase::forward
                           : place.is_backward                  ? Phase::backward
                           : is_between_steps                   ? Phase::grad_local
                           : is_on_gradients                    ? Phase::grad_norm
                           : is_loss                            ? Phase::loss
                                                                : Phase::forward;
  }
  if (!options.program_code) return;
  birth.stack = options.program_code->stack();
  read_code(birth, place.is_called_by_program ? caller_now() : place.caller);
}

void OperatorTrace::Impl::read_code(Birth& birth, const ProgramCode::Caller& caller) const {
  if (!options.program_code) return;
  birth.code = options.program_code->read(caller.user);
  birth.framework_code = options.program_code->read(caller.framework);
}

void OperatorTrace::Impl::describe(Sighting& sighting, const at::Tensor& values) const {
  sighting.dtype = dtype_name(values.scalar_type());
  sighting.shape = values.sizes().vec();
  if (values.is_complex()) sighting.shape.push_back(2);
  sighting.stats = stats_of(values, options.threads);
  if (sighting.stats.nan > 0 && sighting.stats.nonfinite() > sighting.stats.nan &&
      !values.is_complex() && has_plain_memory(values)) {  // an Inf may be a mask
    const OwnWork own_work;
    sighting.stats.first_bad =
        at::isnan(values).flatten().to(at::kByte).argmax().item<std::int64_t>();
  }
}

void OperatorTrace::Impl::note(const std::string& text) {
  const std::lock_guard lock(mutex);
  notes.insert(text);
}

std::optional<BirthId> OperatorTrace::Impl::birth_of_function(const Frame& node,
                                                              const std::string& forward_op) {
  const std::lock_guard lock(mutex);
  const auto bad = bad_calls.find({node.forward_thread, node.sequence});
  if (bad == bad_calls.end()) return std::nullopt;
  const auto is_its_own = [&](BirthId id) {  // and not received in an argument
    const Birth& birth = births[static_cast<std::size_t>(id)].birth;
    return birth.kind != BirthKind::literal && is_call_of(birth.sighting.op, forward_op);
  };
  const auto own = std::ranges::find_if(bad->second, is_its_own);
  return own == bad->second.end() ? std::nullopt : std::optional(*own);
}

BirthId OperatorTrace::Impl::add_birth(TracedBirth birth) {
  const std::lock_guard lock(mutex);
  births.push_back(std::move(birth));
  return static_cast<BirthId>(births.size() - 1);
}

bool OperatorTrace::Impl::has_room_for(std::uint64_t bytes) const {
  if (bytes > options.kept_bytes - std::min(options.kept_bytes, kept_bytes)) return false;
  constexpr std::uint64_t kNeverMissed = std::uint64_t{16} << 20;  // asking the system takes 20 us
  return bytes <= kNeverMissed || bytes <= free_host_memory() / 2;
}

void OperatorTrace::Impl::keep_call(TracedBirth& birth, const at::RecordFunction& call,
                                    Frame& frame) {
  if (!frame.is_captured && frame.bytes_not_captured == 0) return;
  if (has_subclass(call.outputs())) return;
  const std::uint64_t bytes =
      frame.is_captured ? frame.capture.bytes(call) : 2 * frame.bytes_not_captured;
  const auto leave_out = [&] {  // holds the lock
    if (++calls_not_kept > 1) return;
    first_not_kept = frame.info->full_name + " (" + std::to_string(bytes) + " bytes)";
  };
  {
    const std::lock_guard lock(mutex);
    if (!frame.is_captured || !has_room_for(bytes)) return leave_out();
    kept_bytes += bytes;
  }
  try {
    birth.call = frame.capture.end(call);
  } catch (const c10::Error&) {  // out of memory
    const std::lock_guard lock(mutex);
    kept_bytes -= bytes;
    leave_out();
    frame.capture = CallCapture();
  }
  birth.cpp_stack = c10::get_lazy_backtrace();
  frame.is_captured = false;
}

// ---- Roots: bad when first read -----------------------------------------------------------------

BirthIds OperatorTrace::Impl::origins_of(const at::Tensor& values, ThreadFrames& frames,
                                         const std::string& reader) {
  {
    const std::lock_guard lock(mutex);
    BirthIds known = lineage.births_in(values);
    if (!known.empty()) return known;
  }
  const BirthIds births_of_it = roots_of(values, frames, reader);
  const std::lock_guard lock(mutex);
  lineage.note_bad_content(values, births_of_it);
  return births_of_it;
}

BirthIds OperatorTrace::Impl::roots_of(const at::Tensor& values, ThreadFrames& frames,
                                       const std::string& reader) {
  const Root root = find_root(values, frames);
  if (root.is_temporary) return {};
  // Of a bucket, parts may have been written, or never.
  const bool may_be_of_gradients =
      root.kind == BirthKind::memory ||
      (root.kind == BirthKind::opaque && root.last_seen == LastSeen::allocated);
  if (may_be_of_gradients) {
    BirthIds of_gradients = roots_of_gradients_in(values, frames, reader);
    if (!of_gradients.empty()) return of_gradients;
  }
  BirthIds before = passed_through(root, values, frames);
  if (!before.empty()) return before;
  return {add_root(root, values, frames, reader)};
}

BirthIds OperatorTrace::Impl::roots_of_gradients_in(const at::Tensor& values, ThreadFrames& frames,
                                                    const std::string& reader) {
  std::vector<NamedTensor> gradients;
  {
    const std::lock_guard lock(mutex);
    gradients = declarations.gradients_in(values);
  }
  BirthIds found;
  std::vector<std::pair<NamedTensor, Root>> changed;  // after their last write
  for (const NamedTensor& gradient : gradients) {
    if (!is_bad(gradient.tensor)) continue;
    BirthIds known;
    {
      const std::lock_guard lock(mutex);
      known = lineage.births_in(gradient.tensor);
    }
    if (known.empty()) {
      Root root = find_root(gradient.tensor, frames);
      if (root.kind != BirthKind::memory) continue;
      known = fused_origins_of(gradient, root, frames);
      if (known.empty()) changed.emplace_back(gradient, std::move(root));
    }
    unite(found, known);
  }
  if (!found.empty() || changed.empty()) return found;
  // One fault, whether it hit one gradient or many.
  const auto& [gradient, root] = changed.front();
  if (changed.size() > 1) return {add_root(root, values, frames, reader)};
  const BirthId id = add_root(root, gradient.tensor, frames, reader);
  const std::lock_guard lock(mutex);
  Birth& birth = births[static_cast<std::size_t>(id)].birth;
  birth.sighting.parameter = gradient.name;
  birth.sighting.role = "grad";
  return {id};
}

std::vector<std::shared_ptr<const Place>> OperatorTrace::Impl::fused_writers_of(
    const NamedTensor& gradient) {
  const auto dot = gradient.name.rfind('.');
  const std::string module = dot == std::string::npos ? "" : gradient.name.substr(0, dot);
  const std::lock_guard lock(mutex);
  const Piece last_write = lineage.last_write_of(gradient.tensor);
  // If an operator adds up the gradient, no kernel inside a node of its module does.
  const bool is_added_by_operators = last_write.clock > 0 && !last_write.is_filler;
  std::vector<std::shared_ptr<const Place>> had_it, of_its_module;
  for (const CustomNode& node : custom_nodes) {
    if (node.start < last_write.clock) continue;
    if (std::ranges::find(node.parameters, gradient.name) != node.parameters.end()) {
      had_it.push_back(node.place);
    } else if (!module.empty() && node.place->module == module && !is_added_by_operators) {
      of_its_module.push_back(node.place);
    }
  }
  return had_it.empty() ? of_its_module : had_it;
}

BirthIds OperatorTrace::Impl::fused_origins_of(const NamedTensor& gradient, const Root& root,
                                               ThreadFrames& frames) {
  const auto writers = fused_writers_of(gradient);
  if (writers.empty()) return {};
  const Content content = content_of(gradient.tensor);
  BirthIds before;
  for (const auto& writer : writers) unite(before, passed_through(*writer, content));
  if (!before.empty()) return before;
  Root inside = root;
  inside.kind = BirthKind::opaque;
  inside.inside = *writers.back();
  const BirthId id = add_root(inside, gradient.tensor, frames, "explain");
  const std::lock_guard lock(mutex);
  Birth& birth = births[static_cast<std::size_t>(id)].birth;
  birth.sighting.parameter = gradient.name;
  birth.sighting.role = "grad";
  return {id};
}

BirthIds OperatorTrace::Impl::without_literals(BirthIds ids) const {
  std::erase_if(ids, [&](BirthId id) {
    return births[static_cast<std::size_t>(id)].birth.kind == BirthKind::literal;
  });
  return ids;
}

BirthIds OperatorTrace::Impl::passed_through(const Root& root, const at::Tensor& values,
                                             ThreadFrames& frames) {
  if (!root.inside) return {};
  if (root.inside->given != nullptr) {
    for (std::size_t i = 0; Frame* running = frames.above(i); ++i) {
      if (running->given == root.inside->given) scan_received(*running, frames);
    }
    const Content content = content_of(values);
    if (auto before = passed_through(*root.inside, content); !before.empty()) return before;
  }
  // A kernel called without a frame, or with its tensors in a list, reads its module's weights.
  constexpr std::size_t kMost = 16;
  std::vector<NamedTensor> parameters;
  if (!root.inside->module.empty()) {
    const std::lock_guard lock(mutex);
    parameters = declarations.parameters_of(root.inside->module, kMost);
  }
  BirthIds of_weights;
  for (const auto& [name, tensor] : parameters) {
    const at::Tensor weight = values_of(tensor);
    if (!weight.defined() || !is_bad(weight)) continue;
    if (find_root(weight, frames).kind != BirthKind::weight) continue;  // written in this pass
    unite(of_weights, origins_of(weight, frames, root.inside->frame));
  }
  return of_weights;
}

BirthIds OperatorTrace::Impl::passed_through(const Place& inside, Content content) {
  const std::lock_guard lock(mutex);
  if (inside.given == nullptr) return {};
  return without_literals(content == Content::nan ? inside.given->with_nan
                                                  : inside.given->with_any);
}

/// The first bad declared tensor that shares memory with `values`; if none is bad, the first.
static std::optional<Declarations::Declared> declared_behind(
    const std::vector<Declarations::Declared>& sharing) {
  for (const auto& declared : sharing) {
    const at::Tensor tensor = Declarations::tensor_of(declared);
    const at::Tensor whole = tensor.defined() ? values_of(tensor) : at::Tensor();
    if (whole.defined() && is_bad(whole)) return declared;
  }
  if (sharing.empty()) return std::nullopt;
  return sharing.front();
}

bool OperatorTrace::Impl::is_seen_first(const at::Tensor& values) {
  const std::lock_guard lock(mutex);
  return values.is_leaf() && !lineage.knows(values) && declarations.find(values) == nullptr;
}

static bool is_given(const Frame& operation, const at::Tensor& values) {
  bool is_given = false;
  for (const c10::IValue& argument : operation.arguments) {
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      is_given |= tensor.defined() && tensor.has_storage() && tensor.is_alias_of(values);
    });
  }
  return is_given;
}

/// True if the kernel of an operator around the reader allocated `values` for itself, as far as the
/// allocation's clock tells; 0 if it was not seen. Such a kernel may also fill them off the
/// dispatcher.
static bool is_memory_of_kernel(const at::Tensor& values, std::uint64_t allocated,
                                ThreadFrames& frames) {
  for (std::size_t i = 1; const Frame* outer = frames.above(i); ++i) {
    if (outer->kind == FrameKind::passage) continue;
    if (outer->kind != FrameKind::operation) return false;
    if (outer->info->is_composite || outer->info->is_custom) continue;
    if (allocated != 0 && allocated < outer->start) continue;
    if (!is_given(*outer, values)) return true;
  }
  return false;
}

/// True if `values` are memory of the outermost operator around the reader: not among its
/// arguments, and its kernel may also fill such memory off the dispatcher (mse_loss with a mean:
/// aten/src/ATen/native/Loss.cpp).
static bool is_memory_of_outer_operator(const at::Tensor& values, ThreadFrames& frames) {
  const Frame* outermost = nullptr;
  for (std::size_t i = 1; const Frame* outer = frames.above(i); ++i) {
    if (outer->kind == FrameKind::passage) continue;
    if (outer->kind != FrameKind::operation) break;
    outermost = outer;
  }
  return outermost != nullptr && !is_given(*outermost, values);
}

/// `tensor * float("nan")`, `tensor[i] = float("nan")`: Python makes the number's tensor without
/// the dispatcher (torch/csrc/autograd/python_variable_indexing.cpp). False for an element of a
/// larger tensor, and for a tensor without dimensions that is computed with: the program keeps it.
static bool is_number(const at::Tensor& values, ThreadFrames& frames) {
  if (values.dim() != 0 || values.storage().nbytes() != values.nbytes()) return false;
  if (values.unsafeGetTensorImpl()->is_wrapped_number()) return true;
  constexpr auto kAssigning = std::to_array<std::string_view>(
      {"aten::fill_", "aten::copy_", "aten::index_put_", "aten::_index_put_impl_"});
  const Frame* const reader = frames.above(0);
  return reader == nullptr || reader->info == nullptr ||
         std::ranges::count(kAssigning, reader->info->name) > 0;
}

Root OperatorTrace::Impl::find_root(const at::Tensor& values, ThreadFrames& frames) {
  Root root;
  Known known;
  const std::string* allocator = nullptr;
  std::vector<Declarations::Declared> sharing;
  {
    const std::lock_guard lock(mutex);
    known = lineage.known_of(values);
    allocator = lineage.allocator_of(values);
    const bool is_written_unseen = known.state == MemoryState::unknown &&
                                   lineage.has_been_used(values) &&
                                   declarations.has_gradient_in(values);
    if (is_written_unseen) known.state = MemoryState::written;
    for (const auto* declared : declarations.find_all(values)) sharing.push_back(*declared);
  }
  const MemoryState state = known.state;
  const bool is_written = known.is_written();
  // Its inputs were scanned when that frame was entered. Gradients of many parameters share a
  // storage, so only frames that had these very bytes count.
  const auto& touched_by = known.touched_by;
  if (known.writer != nullptr) root.writer = *known.writer;
  root.place = known.place;
  root.declared = declared_behind(sharing);
  const auto born_inside = [&](Place place) {
    if (is_of_reducer(place.frame)) {
      root.kind = BirthKind::collective;
      root.writer = place.frame;
      return;
    }
    root.kind = BirthKind::opaque;
    root.inside = std::move(place);
  };
  if ((is_written || state == MemoryState::received) && touched_by != nullptr) {
    born_inside(*touched_by);
    root.last_seen = LastSeen::finite;
  } else if (state == MemoryState::received) {
    root.kind = BirthKind::collective;
  } else if (state == MemoryState::finite && is_memory_of_outer_operator(values, frames)) {
    root.is_temporary = true;
  } else if (state == MemoryState::finite) {
    root.kind = BirthKind::memory;
    root.last_seen = LastSeen::finite;
  } else if (state == MemoryState::earlier && root.place && root.place->is_rewritten) {
    root.kind = BirthKind::data;
    root.last_seen = LastSeen::rewritten;
  } else if (state == MemoryState::earlier) {
    root.kind = BirthKind::buffer;
  } else if ((state == MemoryState::foreign || state == MemoryState::bytes) && root.place) {
    born_inside(*root.place);
  } else if (allocator != nullptr && is_fresh_memory_nan()) {  // all of it, or the rest
    root.kind = BirthKind::unwritten;
    root.writer = *allocator;
    root.last_seen = LastSeen::allocated;
    if (touched_by != nullptr) root.inside = *touched_by;
  } else if ((state == MemoryState::allocated || is_written) && root.place == nullptr &&
             is_memory_of_kernel(values, known.clock, frames)) {
    root.is_temporary = true;
  } else if (state == MemoryState::allocated || is_written) {
    // Allocated around a frame that was to fill it, or inside one.
    const bool is_filled_by_frame =
        touched_by != nullptr && (root.place == nullptr || root.place->given == nullptr);
    born_inside(is_filled_by_frame ? *touched_by
                : root.place       ? *root.place
                                   : current_place(frames));
    root.last_seen = LastSeen::allocated;
  } else if (!root.declared && is_number(values, frames)) {
    root.kind = BirthKind::literal;
  } else if (!root.declared && is_memory_of_kernel(values, 0, frames)) {
    root.is_temporary = true;
  } else if (root.declared) {
    root.kind = root.declared->as == DeclaredAs::parameter ? BirthKind::weight
                : root.declared->as == DeclaredAs::buffer  ? BirthKind::buffer
                                                           : BirthKind::data;
  } else {
    const Location location = located(frames);
    const auto* node = values.is_leaf() ? nullptr : torch::autograd::impl::grad_fn_unsafe(values);
    if (location.container != nullptr && !location.container->given->has_input(values)) {
      born_inside(current_place(frames));
    } else if (node != nullptr && !location.is_backward) {
      Place inside;
      inside.frame = node->name();
      const ForwardCall forward =
          forward_call_of(node->thread_id(), static_cast<std::int64_t>(node->sequence_nr()));
      if (forward.op != nullptr) inside.frame = *forward.op;
      if (forward.module != nullptr) inside.module = *forward.module;
      inside.is_module_inferred = forward.is_module_inferred;
      inside.caller = forward.caller;
      inside.given = forward.given;
      born_inside(std::move(inside));
    } else if (!location.is_backward && is_kept_by_a_module(values)) {
      root.kind = BirthKind::buffer;
    }
  }
  return root;
}

/// True if a module reads the tensor, and the program passed others to its models, but not this
/// one.
bool OperatorTrace::Impl::is_kept_by_a_module(const at::Tensor& values) {
  if (current_module() == nullptr) return false;
  const std::lock_guard lock(mutex);
  return knows_model_inputs && !model_inputs.inputs.empty() && !model_inputs.has_input(values);
}

BirthId OperatorTrace::Impl::add_root(const Root& root, const at::Tensor& values,
                                      ThreadFrames& frames, const std::string& reader) {
  TracedBirth traced;
  Birth& birth = traced.birth;
  birth.is_in_hook = located(frames).is_after_gradient;
  locate(birth, frames);
  birth.kind = root.kind;
  birth.reader = reader;
  birth.writer = root.writer;
  birth.last_seen = root.last_seen;
  birth.sighting.role = "output";
  const bool is_declared =
      root.declared && (root.kind == BirthKind::weight || root.kind == BirthKind::buffer ||
                        root.kind == BirthKind::data);
  if (root.inside) {
    const Place& inside = *root.inside;
    birth.sighting.op = inside.frame;
    birth.inside = inside.frame.empty() ? inside.module : inside.frame;
    birth.custom_function = inside.custom_function;
    if (inside.caller.user.code != nullptr) read_code(birth, inside.caller);
    // The reader's module is not that of a function in the loss.
    if (!inside.module.empty() || (inside.is_backward && !inside.custom_function.empty())) {
      birth.sighting.module = inside.module;
      birth.is_module_inferred = inside.is_module_inferred;
    }
    if (inside.is_backward && !inside.is_recomputed) {
      birth.sighting.phase = Phase::backward;
      birth.node = inside.node;
      birth.forward_op = inside.forward_op;
    }
    if (inside.given != nullptr) {  // NaN from an Inf of another origin
      const std::lock_guard lock(mutex);
      const BirthIds parents = without_literals(inside.given->with_any);
      if (!parents.empty()) birth.parent = parents.front();
    }
  } else if (root.kind == BirthKind::collective) {
    birth.sighting.op = root.writer;
    birth.sighting.role = "received";
    if (is_of_reducer(root.writer)) birth.sighting.phase = Phase::grad_reduced;
    if (root.place && root.place->group != nullptr) {
      birth.group = root.place->group->name;
      birth.members = root.place->group->members;
    }
    if (root.place && !root.place->module.empty()) birth.sighting.module = root.place->module;
    if (root.place && root.place->is_of_first_pass) birth.last_seen = LastSeen::first_pass;
    if (root.place && root.place->largest_sent > 0) birth.largest_sent = root.place->largest_sent;
  } else if (root.kind == BirthKind::memory) {
    birth.sighting.op = root.writer;
  } else if (root.kind == BirthKind::literal) {
    birth.sighting.op = reader;
    birth.sighting.role = "input";
  } else if (root.kind == BirthKind::unwritten) {
    birth.sighting.op = reader;
  } else {
    birth.sighting.role = root.kind == BirthKind::weight   ? "weight"
                          : root.kind == BirthKind::buffer ? "buffer"
                                                           : "input";
    birth.sighting.position.reset();  // it was bad before the pass
    const bool is_written = root.kind == BirthKind::weight && root.declared->writer != nullptr;
    const auto& made = is_written ? root.declared->writer : root.place;
    if (is_written) birth.writer = made->frame;
    if (is_written || (root.kind == BirthKind::buffer && !root.writer.empty())) {  // made earlier
      birth.sighting.op = birth.writer;
      if (made && made->caller.user.code != nullptr) read_code(birth, made->caller);
    }
    if (is_declared && root.kind != BirthKind::data) {
      birth.sighting.module = root.declared->module;
      birth.is_module_inferred = false;
    }
  }
  if (root.kind == BirthKind::unwritten) {
    if (root.place && options.program_code) {
      const auto& at = root.place->allocated_at;
      birth.allocated_at = options.program_code->read(at.user.code ? at.user : at.framework);
    }
    birth.extent = extent_of(values, stats_of(values, options.threads).nonfinite());
  }
  if (root.declared) birth.sighting.parameter = root.declared->name;
  at::Tensor described = values;
  if (is_declared) {
    const at::Tensor declared = Declarations::tensor_of(*root.declared);
    const at::Tensor whole = declared.defined() ? values_of(declared) : at::Tensor();
    if (whole.defined() && is_bad(whole)) described = whole;
  }
  describe(birth.sighting, described);
  return add_birth(std::move(traced));
}

// ---- An operator's bad output -------------------------------------------------------------------

namespace {

/// An operator's inputs that may explain its bad output.
struct Inputs {
  Content tensors = Content::finite;
  Content literals = Content::finite;
  BirthIds with_nan;
  BirthIds with_any;
};

}  // namespace

/// The custom function, compiled region or custom operator around the innermost operator.
static std::string around(const Location& location, ThreadFrames& frames) {
  for (std::size_t i = 1; const Frame* each = frames.above(i); ++i) {
    if (each->kind != FrameKind::operation) break;
    if (each->info->is_custom) return each->info->full_name;
  }
  return location.container == nullptr ? std::string() : location.container->name;
}

/// aten/src/ATen/native/LossNLL.cpp: labels equal to ignore_index do not count.
static void count_ignored_labels(Operand& labels, const OperatorInfo& info,
                                 const std::vector<c10::IValue>& arguments,
                                 const at::Tensor& tensor) {
  if (labels.name != "target" || !labels.stats) return;
  const auto named = std::ranges::find(info.argument_names, "ignore_index");
  if (named == info.argument_names.end()) return;
  const auto& ignored = arguments[named - info.argument_names.begin()];
  if (!ignored.isInt()) return;
  constexpr std::int64_t kChunk = std::int64_t{1} << 18;
  const OwnWork own_work;
  std::int64_t count = 0;
  for_each_chunk(tensor.detach(), kChunk, [&](const at::Tensor& chunk, std::int64_t) {
    count += chunk.eq(ignored.toInt()).sum().item<std::int64_t>();
  });
  labels.ignored = count;
}

void OperatorTrace::Impl::describe_operands(Birth& birth, const Frame& frame,
                                            const std::vector<c10::IValue>& arguments,
                                            const std::vector<BeforeWrite>& written,
                                            const std::vector<std::int64_t>& output_shape) const {
  const OperatorInfo& info = *frame.info;
  FirstBad first_bad{.index = unravel_index(birth.sighting.stats.first_bad, birth.sighting.shape),
                     .shape = output_shape,
                     .is_pointwise = info.is_pointwise};
  // Of a complex output, the last dimension has the two parts.
  if (birth.sighting.shape.size() == output_shape.size() + 1) first_bad.index.pop_back();
  const auto is_changed = [&](const at::Tensor& tensor) {
    return std::ranges::any_of(
        written, [&](const auto& each) { return each.tensor == tensor.unsafeGetTensorImpl(); });
  };
  const auto add = [&](Operand operand) {
    if (birth.operands.size() < kMostOperands) birth.operands.push_back(std::move(operand));
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (info.arguments[i] == ArgumentUse::overwritten) continue;
    const std::string& name = info.argument_names[i];
    for_each_tensor_at(arguments[i], [&](const at::Tensor& tensor, int element) {
      if (!tensor.defined() || birth.operands.size() >= kMostOperands) return;
      Operand operand;
      if (is_changed(tensor)) {
        operand.name = name;
        operand.dtype = dtype_name(tensor.scalar_type());
        operand.shape = tensor.sizes().vec();
        return add(std::move(operand));
      }
      operand = operand_of(name, tensor, options.threads);
      if (element >= 0) operand.element = element;
      if (element < 0) operand.requires_grad = frame.arguments[i].toTensor().requires_grad();
      count_ignored_labels(operand, info, arguments, tensor);
      if (element < 0 && first_bad.index.size() == output_shape.size() &&
          has_plain_memory(tensor)) {
        const OwnWork own_work;
        if (const auto at = element_at_first_bad(tensor, first_bad)) {
          operand.at_first_bad = at->value;
        }
      }
      add(std::move(operand));
    });
    const bool is_number = arguments[i].isDouble() || arguments[i].isInt();
    if (!is_number) continue;
    Operand number;
    number.name = name;
    number.number = arguments[i].isDouble() ? arguments[i].toDouble()
                                            : static_cast<double>(arguments[i].toInt());
    add(std::move(number));
  }
}

BirthIds OperatorTrace::Impl::origins_of_numbers(ThreadFrames& frames) {
  BirthIds ids;
  for (std::size_t i = 1; const Frame* operation = frames.above(i); ++i) {
    if (operation->kind != FrameKind::operation) break;
    for (const c10::IValue& argument : operation->arguments) {
      if (!argument.isTensor() || is_wrapped_number(argument.toTensor())) continue;
      const at::Tensor values = values_of(argument.toTensor());
      if (!values.defined() || values.numel() != 1 || !is_bad(values)) continue;
      unite(ids, origins_of(values, frames, operation->info->full_name));
    }
  }
  return ids;
}

BirthIds OperatorTrace::Impl::arithmetic_of(const Frame& frame,
                                            const std::vector<const TensorAt*>& outputs) {
  BirthIds own;
  if (frame.info->is_custom || frame.info->is_composite) return own;
  const std::lock_guard lock(mutex);
  for (const TensorAt* output : outputs) unite(own, lineage.births_in(output->values));
  std::erase_if(own, [&](BirthId id) {
    const auto found = arithmetic.find(id);
    return found == arithmetic.end() || found->second < frame.start;
  });
  return own;
}

void OperatorTrace::Impl::see_whole(BirthId id, const at::RecordFunction& call, Frame& frame,
                                    ThreadFrames& frames, const TensorAt& output) {
  TracedBirth whole;
  {
    const std::lock_guard lock(mutex);
    whole.birth = births[static_cast<std::size_t>(id)].birth;
  }
  keep_call(whole, call, frame);
  Birth& birth = whole.birth;
  birth.sighting.op = frame.info->full_name;
  birth.sighting.role = role_of("output", output);
  describe(birth.sighting, output.values);
  birth.extent = extent_of(output.values, birth.sighting.stats.nonfinite());
  birth.inside = around(located(frames), frames);
  birth.operands.clear();
  if (frame.has_arguments) {
    describe_operands(birth, frame, whole.call ? whole.call->arguments : frame.arguments,
                      whole.call ? std::vector<BeforeWrite>() : frame.before_write,
                      output.values.sizes().vec());
  }
  const std::lock_guard lock(mutex);
  births[static_cast<std::size_t>(id)] = std::move(whole);
  if (frame.info->is_arithmetic) {
    arithmetic[id] = frame.start;
  } else {
    arithmetic.erase(id);
  }
}

void OperatorTrace::Impl::explain_bad_outputs(const at::RecordFunction& call, Frame& frame,
                                              ThreadFrames& frames, std::vector<TensorAt> outputs) {
  const OperatorInfo& info = *frame.info;
  std::vector<const TensorAt*> bad;
  std::vector<const TensorAt*> explained;  // written bad by an operator inside
  {
    std::vector<const TensorAt*> finite;
    for (auto& output : outputs) {
      output.content = content_of(output.values);
      (output.content == Content::finite ? finite : bad).push_back(&output);
    }
    const std::lock_guard lock(mutex);
    const std::uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
    for (const TensorAt* output : finite) {
      lineage.note_finite_write(output->values, now, &info.full_name, info.is_filler);
    }
    std::erase_if(bad, [&](const TensorAt* output) {
      const Piece last = lineage.last_write_of(output->values);
      const bool is_explained = last.is_written() && last.clock > frame.start &&
                                !lineage.births_in(output->values).empty();
      if (is_explained) explained.push_back(output);
      return is_explained;
    });
  }
  const bool is_explained_in_part = bad.empty() && !explained.empty() && !info.is_composite;
  if (is_explained_in_part) bad = explained;
  if (bad.empty()) return;

  Content made = Content::finite;
  const auto pass_on = [&](const BirthIds& ids) {
    {
      const std::lock_guard lock(mutex);
      const std::uint64_t now = clock.fetch_add(1, std::memory_order_relaxed) + 1;
      for (const TensorAt* output : bad) {
        lineage.note_bad_write(output->values, now, &info.full_name, ids, output->content);
      }
      if (frame.sequence >= 0) unite(bad_calls[{frame.forward_thread, frame.sequence}], ids);
    }
    bool is_nested = true;  // only operators in between
    for (std::size_t i = 1; Frame* outer = frames.above(i); ++i) {
      is_nested = is_nested && outer->kind == FrameKind::operation;
      if (is_nested) unite(outer->nested, ids);
      if (outer->given != nullptr) {
        const std::lock_guard lock(mutex);
        outer->given->add(made, ids);
      }
      if (outer->kind == FrameKind::node || outer->kind == FrameKind::evaluate) break;
    }
  };

  // Rule b: the inputs.
  Inputs inputs;
  const auto add_input = [&](Content content, const BirthIds& ids) {
    inputs.tensors = std::max(inputs.tensors, content);
    if (content == Content::nan) unite(inputs.with_nan, ids);
    if (content != Content::finite) unite(inputs.with_any, ids);
  };
  const auto is_statistic = [&](const TensorAt* output) {
    for (std::size_t i = 0; frame.has_arguments && i < frame.arguments.size(); ++i) {
      const bool is_its_argument =
          frame.arguments[i].isTensor() && frame.arguments[i].toTensor().is_same(output->values);
      if (is_its_argument && is_only_updated(info, frame.arguments, i)) return true;
    }
    return false;
  };
  const bool are_statistics = std::ranges::all_of(bad, is_statistic);
  if (!are_statistics) {  // those that were bad before stay so, and say nothing of the results
    const std::lock_guard lock(mutex);
    std::erase_if(bad, [&](const TensorAt* output) {
      const auto before = std::ranges::find(
          frame.before_write, output->values.unsafeGetTensorImpl(), &BeforeWrite::tensor);
      const bool was_bad = before != frame.before_write.end() &&
                           before->content != Content::finite && is_statistic(output);
      if (was_bad) {
        lineage.note_bad_write(output->values, clock.load(std::memory_order_relaxed),
                               &info.full_name, before->births, output->content);
      }
      return was_bad;
    });
  }
  for (std::size_t i = 0; frame.has_arguments && i < frame.arguments.size(); ++i) {
    const c10::IValue& argument = frame.arguments[i];
    if (info.scalars_are_values) {
      inputs.literals = std::max(inputs.literals, content_of_scalar(argument));
    }
    if (!is_read(info, frame.arguments, i)) continue;
    if (!are_statistics && is_only_updated(info, frame.arguments, i)) continue;
    for_each_tensor_at(argument, [&](const at::Tensor& tensor, int) {
      const auto before =
          std::find_if(frame.before_write.begin(), frame.before_write.end(),
                       [&](const auto& b) { return b.tensor == tensor.unsafeGetTensorImpl(); });
      if (before != frame.before_write.end()) {
        add_input(before->content, before->births);
        return;
      }
      const at::Tensor values = values_of(tensor);
      const Content content = values.defined() ? content_of(values) : Content::finite;
      if (content == Content::finite) return;
      if (is_wrapped_number(tensor)) {
        inputs.literals = std::max(inputs.literals, content);
      } else {
        add_input(content, origins_of(values, frames, info.full_name));
      }
    });
  }

  const TensorAt* shown = bad.front();
  for (const TensorAt* output : bad) {
    if (output->content > made) shown = output;
    made = std::max(made, output->content);
  }

  // Rule c: a NaN input explains any bad output; an Inf input explains all but NaN.
  const bool is_received = inputs.tensors != Content::finite && inputs.tensors >= made;
  if (is_explained_in_part) {
    const BirthIds own = arithmetic_of(frame, explained);
    // A kernel that first copies one input (addmm's bias) may be bad from the others, too.
    if (!is_received) {
      const bool is_given_finite =
          inputs.tensors == Content::finite && inputs.literals == Content::finite;
      if (!is_given_finite || own.empty()) return;
      see_whole(own.front(), call, frame, frames, *shown);
      return pass_on({own.front()});
    }
    BirthIds all = made == Content::nan ? inputs.with_nan : inputs.with_any;
    for (const TensorAt* output : explained) {
      const std::lock_guard lock(mutex);
      BirthIds inside = lineage.births_in(output->values);
      // A number that changes nothing: a second clamp of NaN by NaN.
      if (made == Content::nan) inside = without_literals(std::move(inside));
      std::erase_if(inside, [&](BirthId id) { return std::ranges::count(own, id) > 0; });
      unite(all, inside);
    }
    return pass_on(all);
  }
  if (is_received) return pass_on(made == Content::nan ? inputs.with_nan : inputs.with_any);
  if (inputs.tensors == Content::finite && !frame.nested.empty())
    return pass_on(BirthIds(frame.nested));
  if (info.is_lift_fresh) inputs.literals = made;

  // The kernel may have read its literal from a one-element tensor argument (_scaled_mm's scales on
  // CPUs without fp8).
  if (inputs.tensors == Content::finite && inputs.literals != Content::finite) {
    const BirthIds ids = origins_of_numbers(frames);
    if (!ids.empty()) return pass_on(ids);
  }

  // A constant that a kernel writes itself is the kernel's result: std of one element fills with
  // NaN, and the backward of ctc_loss begins with full_like(-Inf). In a composite it is a mask.
  const auto is_operation = [](const Frame* each) {
    return each != nullptr && each->kind == FrameKind::operation;
  };
  std::size_t above = 1;
  while (is_operation(frames.above(above)) && has_literal(*frames.above(above))) ++above;
  const Frame* const outer = frames.above(above);
  const bool is_kernels_constant = inputs.tensors == Content::finite &&
                                   inputs.literals != Content::finite && is_operation(outer) &&
                                   !outer->info->is_composite;
  if (is_kernels_constant) {
    const std::lock_guard lock(mutex);
    for (const TensorAt* output : bad) {
      lineage.note_allocation(output->values, clock.load(), &info.full_name, nullptr);
    }
    return;
  }

  TracedBirth traced;
  Birth& birth = traced.birth;
  birth.kind = inputs.tensors != Content::finite    ? BirthKind::nan_from_inf
               : inputs.literals != Content::finite ? BirthKind::literal
               : made == Content::nan               ? BirthKind::nan
                                                    : BirthKind::inf;
  const Location location = located(frames);
  const bool is_literal = birth.kind == BirthKind::literal;
  if (!is_literal) {
    keep_call(traced, call, frame);
    // Copies from before the call show whether an in-place argument was corrupted after its last
    // write.
    if (traced.call) {
      for (auto& before : frame.before_write) {
        if (before.content != Content::finite) continue;
        for (std::size_t i = 0; i < frame.arguments.size(); ++i) {
          if (!frame.arguments[i].isTensor() ||
              frame.arguments[i].toTensor().unsafeGetTensorImpl() != before.tensor ||
              !traced.call->arguments[i].isTensor()) {
            continue;
          }
          const at::Tensor copy = traced.call->arguments[i].toTensor();
          if (!is_plainly_observable(copy) || !is_bad(copy)) continue;
          return pass_on(roots_of(frame.arguments[i].toTensor(), frames, info.full_name));
        }
      }
    }
  }
  if (location.is_hook && is_in_programs_code()) birth.kind = BirthKind::user_hook;
  birth.is_in_hook = location.is_after_gradient;
  locate(birth, frames);
  birth.sighting.op = info.full_name;
  if (is_literal) {  // the user wrote the outermost call: masked_fill, not the fill_ inside
    for (std::size_t i = 1; const Frame* each = frames.above(i); ++i) {
      if (each->kind != FrameKind::operation) break;
      birth.sighting.op = each->info->full_name;
    }
  }
  birth.sighting.role = role_of("output", *shown);
  describe(birth.sighting, shown->values);
  {
    const std::lock_guard lock(mutex);
    const auto* declared = declarations.find(shown->values);
    if (declared != nullptr && declared->as == DeclaredAs::parameter) {
      birth.sighting.parameter = declared->name;
    }
    for (const BirthId id : inputs.with_any) {
      // A mask's literal explains an Inf only if nothing else does.
      const bool is_quiet = births[static_cast<std::size_t>(id)].birth.kind == BirthKind::literal;
      if (!birth.parent || !is_quiet) birth.parent = id;
      if (!is_quiet) break;
    }
  }
  birth.is_custom_operator = info.is_custom;
  if (!is_literal) {
    birth.extent = extent_of(shown->values, birth.sighting.stats.nonfinite());
    if (frame.has_arguments) {
      describe_operands(birth, frame, traced.call ? traced.call->arguments : frame.arguments,
                        traced.call ? std::vector<BeforeWrite>() : frame.before_write,
                        shown->values.sizes().vec());
    }
  }
  birth.inside = around(location, frames);
  const auto function = location.node_frame != nullptr && !birth.forward_op.empty()
                            ? birth_of_function(*location.node_frame, birth.forward_op)
                            : std::nullopt;
  {
    const std::lock_guard lock(mutex);
    if (births.size() >= kMostBirths) {
      ++births_not_kept;
      traced.call.reset();
    }
  }
  const BirthId id = add_birth(std::move(traced));
  {
    const std::lock_guard lock(mutex);
    if (function) functions.emplace(id, *function);
    if (info.is_arithmetic) arithmetic.emplace(id, frame.start);
  }
  if (location.evaluate_frame != nullptr) location.evaluate_frame->hooks.push_back(id);
  pass_on({id});
}

}  // namespace nanlocator::inline operators_room
