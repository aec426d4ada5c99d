#include "operators/transfers_in_flight.hpp"

#include <algorithm>
#include <utility>

#include "nanlocator/watch/module_scope.hpp"

namespace nanlocator::inline operators_room {

void TransfersInFlight::begin(std::uint64_t number, Started transfer,
                              const std::vector<at::Tensor>& read,
                              const std::vector<at::Tensor>& written) {
  Entry entry{.transfer = std::make_shared<const Started>(std::move(transfer)), .memory = {}};
  const auto add = [&](const std::vector<at::Tensor>& tensors, bool is_written) {
    for (const auto& tensor : tensors) {
      if (!has_bytes(tensor)) continue;  // includes integers: races on indices count
      entry.memory.push_back({tensor.storage().getWeakStorageImpl(), range_of(tensor), is_written});
    }
  };
  add(read, false);
  add(written, true);
  if (!entry.memory.empty()) transfers_.insert_or_assign(number, std::move(entry));
}

void TransfersInFlight::begin_wait(std::uint64_t number) {
  if (const auto found = transfers_.find(number); found != transfers_.end()) {
    found->second.is_awaited = true;
  }
}

void TransfersInFlight::note_operator() {
  for (auto& [number, entry] : transfers_) {
    if (entry.is_awaited || std::exchange(entry.is_overlapped, true)) continue;
    overlapped_.insert(overlapped_.end(), entry.memory.begin(), entry.memory.end());
  }
}

bool TransfersInFlight::has_overlapped(const at::Tensor& tensor) const {
  if (!has_bytes(tensor)) return false;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const ByteRange range = range_of(tensor);
  return std::ranges::any_of(overlapped_, [&](const Memory& memory) {
    return memory.storage._unsafe_get_target() == storage && memory.range.overlaps(range);
  });
}

bool TransfersInFlight::is_any_under_way() const noexcept {
  return std::ranges::any_of(transfers_, [](const auto& each) { return !each.second.is_awaited; });
}

void TransfersInFlight::end(std::uint64_t number, Lineage& lineage, std::uint64_t clock) {
  const auto found = transfers_.find(number);
  if (found == transfers_.end()) return;
  const std::string* op = intern_module_path(found->second.transfer->op);
  for (const Memory& memory : found->second.memory) {
    if (!memory.is_written) continue;
    lineage.note_arrival(memory.storage._unsafe_get_target(), memory.range, clock, op);
  }
  transfers_.erase(found);
}

std::shared_ptr<const TransfersInFlight::Started> TransfersInFlight::in_the_way_of(
    const at::Tensor& tensor, bool is_write) const {
  if (!has_bytes(tensor)) return nullptr;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const ByteRange range = range_of(tensor);
  for (const auto& [number, entry] : transfers_) {
    if (entry.is_awaited) continue;
    for (const Memory& memory : entry.memory) {
      const bool is_same = memory.storage._unsafe_get_target() == storage;
      if (is_same && (is_write || memory.is_written) && memory.range.overlaps(range)) {
        return entry.transfer;
      }
    }
  }
  return nullptr;
}

}  // namespace nanlocator::inline operators_room
