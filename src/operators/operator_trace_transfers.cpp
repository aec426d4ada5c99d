#include <algorithm>
#include <utility>

#include "operators/operator_trace_impl.hpp"

namespace nanlocator::inline operators_room {
namespace {

/// A race is one line of the program; its consequences would fill the ledger.
constexpr std::size_t kMostUnordered = 16;

bool is_same_place(const UnorderedAccess& a, const UnorderedAccess& b) {
  return a.is_write == b.is_write && a.transfer == b.transfer && a.op == b.op &&
         a.module == b.module && a.phase == b.phase && a.code == b.code;
}

}  // namespace

/// Composites are skipped; the operators inside them are not.
void OperatorTrace::Impl::note_unordered_accesses(const Frame& frame, ThreadFrames& frames) {
  const OperatorInfo& info = *frame.info;
  if (!info.uses_memory() || collective_around(frames) != nullptr) return;
  has_overlap = true;
  struct Conflict {
    at::Tensor tensor;
    bool is_write = false;
    std::shared_ptr<const TransfersInFlight::Started> transfer;
  } first;
  {
    const std::lock_guard lock(mutex);
    transfers.note_operator();
    for (std::size_t i = 0; i < frame.arguments.size() && first.transfer == nullptr; ++i) {
      const bool is_write = info.arguments[i] != ArgumentUse::read;
      if (!is_write && !is_read(info, frame.arguments, i)) continue;
      for_each_tensor_at(frame.arguments[i], [&](const at::Tensor& tensor, int) {
        if (first.transfer != nullptr) return;
        first = {tensor, is_write, transfers.in_the_way_of(tensor, is_write)};
      });
    }
  }
  if (first.transfer == nullptr) return;
  Birth here;  // only for its place
  locate(here, frames);
  UnorderedAccess access{.is_write = first.is_write,
                         .transfer = first.transfer->op,
                         .op = info.full_name,
                         .module = here.sighting.module,
                         .phase = here.sighting.phase,
                         .microbatch = here.sighting.microbatch,
                         .parameter = {},
                         .transfer_code = {},
                         .code = here.code};
  if (options.program_code) {
    access.transfer_code = options.program_code->read(first.transfer->caller.user);
  }
  add_unordered(std::move(access), first.tensor);
}

void OperatorTrace::Impl::add_unordered(UnorderedAccess access, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  const auto known = std::ranges::find_if(
      unordered, [&](const UnorderedAccess& each) { return is_same_place(each, access); });
  if (known != unordered.end()) {
    ++known->count;
    return;
  }
  if (unordered.size() == kMostUnordered) return;
  access.parameter = parameter_in(tensor);
  unordered.push_back(std::move(access));
}

std::string OperatorTrace::Impl::parameter_in(const at::Tensor& tensor) const {
  if (const auto gradients = declarations.gradients_in(tensor); !gradients.empty()) {
    return gradients.front().name;
  }
  const auto* declared = declarations.find(tensor);
  return declared == nullptr ? "" : declared->name;
}

}  // namespace nanlocator::inline operators_room
