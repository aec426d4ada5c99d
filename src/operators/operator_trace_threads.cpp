#include <utility>

#include "operators/operator_trace_impl.hpp"

namespace nanlocator::inline operators_room {
namespace {

/// False for composites, whose operators are followed instead, and for collectives
/// (TransfersInFlight).
bool is_followed(const Frame& frame) {
  return frame.has_arguments && frame.info->uses_memory() && !frame.info->collective;
}

/// Calls `use(tensor, is_write)` for the arguments whose memory is read or written.
template <class Use>
void for_each_used(const Frame& frame, const Use& use) {
  const OperatorInfo& info = *frame.info;
  for (std::size_t i = 0; i < frame.arguments.size(); ++i) {
    const bool is_write = info.arguments[i] != ArgumentUse::read;
    if (!is_write && !is_read(info, frame.arguments, i)) continue;
    for_each_tensor_at(frame.arguments[i], [&](const at::Tensor& tensor, int) {
      if (has_bytes(tensor)) use(tensor, is_write);
    });
  }
}

/// True for an operator inside another one: no other thread has the memory that torch.full fills.
bool is_inside_operator(ThreadFrames& frames) {
  const Frame* around = frames.above(1);
  return around != nullptr && around->kind == FrameKind::operation && around->info != nullptr;
}

std::vector<at::Tensor> used_by(const Frame& frame) {
  std::vector<at::Tensor> used;
  for_each_used(frame, [&](const at::Tensor& tensor, bool) { used.push_back(tensor); });
  return used;
}

}  // namespace

ThreadOrder::Place OperatorTrace::Impl::place_among_threads(const Frame& frame,
                                                            const ThreadFrames& frames) const {
  return {.op = frame.info->full_name,
          .line = caller_now().user,
          .is_steps = threads.is_of_step(frames),
          .module = frame.module == nullptr ? "" : *frame.module,
          .phase = frames.backward_depth > 0 ? Phase::backward : Phase::forward};
}

void OperatorTrace::Impl::start_beside_threads(const Frame& frame, ThreadFrames& frames) {
  if (!is_followed(frame)) return;
  ThreadOrder::Place place = place_among_threads(frame, frames);
  // The program does not order the threads of libraries.
  if (!place.is_steps && options.program_code && place.line.code == nullptr) return;
  if (options.reordered) return turn.await(*options.reordered, place, used_by(frame));
  place.execution = threads.count(place);
  const bool is_inside = is_inside_operator(frames);
  for_each_used(frame, [&](const at::Tensor& tensor, bool is_write) {
    if (is_write && is_inside && !threads.is_known(tensor)) return;
    place.is_write = is_write;
    for (const std::size_t order : threads.add(tensor, place)) describe_thread_order(order, tensor);
  });
}

void OperatorTrace::Impl::finish_beside_threads(const Frame& frame, ThreadFrames& frames) {
  if (!options.reordered || !is_followed(frame)) return;
  turn.give(*options.reordered, place_among_threads(frame, frames), used_by(frame));
}

/// Describes the access as a ledger does, from the step's operator.
void OperatorTrace::Impl::describe_thread_order(std::size_t order, const at::Tensor& tensor) {
  const ThreadOrder seen = threads.orders()[order];
  const auto& own = seen.first.is_steps ? seen.first : seen.second;
  const auto& others = seen.first.is_steps ? seen.second : seen.first;
  UnorderedAccess access{.is_write = own.is_write,
                         .transfer = others.op,
                         .other = Concurrent::thread,
                         .op = own.op,
                         .module = own.module,
                         .phase = own.phase,
                         .microbatch = {},
                         .parameter = {},
                         .transfer_code = {},
                         .code = {}};
  if (options.program_code) {
    access.transfer_code = options.program_code->read(others.line);
    access.code = options.program_code->read(own.line);
  }
  {
    const std::lock_guard lock(mutex);
    access.parameter = parameter_in(tensor);
  }
  threads.set_access(order, std::move(access));
}

}  // namespace nanlocator::inline operators_room
