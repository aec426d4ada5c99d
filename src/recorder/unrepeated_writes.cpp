#include "recorder/unrepeated_writes.hpp"

#include <optional>
#include <utility>

#include "operators/call_values.hpp"
#include "operators/process_groups.hpp"
#include "tensor/own_work.hpp"

namespace nanlocator::inline recorder_room {
namespace {

/// All of its memory.
at::Tensor bytes_of(const c10::Storage& storage) {
  const OwnWork own_work;
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  return at::empty({0}, options)
      .set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

}  // namespace

void UnrepeatedWrites::forget_the_dead() {
  std::erase_if(writes_, [](const auto& entry) { return entry.second.storage.expired(); });
}

void UnrepeatedWrites::note(const at::Tensor& tensor, EarlierWrite write) {
  if (!tensor.defined() || !has_memory(tensor)) return;
  const auto& storage = tensor.storage();
  const auto [entry, _] = writes_.try_emplace(
      storage.unsafeGetStorageImpl(), Write{WeakStorage(storage.getWeakStorageImpl()), {}, step_});
  entry->second.last = std::move(write);
}

void UnrepeatedWrites::note(const OperatorInfo& info, std::span<const c10::IValue> arguments,
                            bool draws, std::span<const at::Tensor> written) {
  if (written.empty()) return;
  std::optional<EarlierWrite> write;
  if (info.collective) {
    write = EarlierWrite{info.full_name, caller(), true, group_of(info, arguments)};
  } else if (!info.moves_values && !info.is_filler && !draws) {
    write = EarlierWrite{info.full_name, caller()};
  }
  for (std::size_t i = 0; !write && info.moves_values && i < arguments.size(); ++i) {
    if (info.arguments[i] != ArgumentUse::read) continue;
    for_each_tensor_at(arguments[i], [&](const at::Tensor& tensor, int) {
      if (const EarlierWrite* source = of(tensor); source != nullptr && !write) write = *source;
    });
  }
  for (const at::Tensor& tensor : written) {
    if (write) {
      note(tensor, *write);
    } else if (tensor.has_storage()) {
      writes_.erase(tensor.storage().unsafeGetStorageImpl());
    }
  }
}

const EarlierWrite* UnrepeatedWrites::of(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = writes_.find(tensor.storage().unsafeGetStorageImpl());
  return found == writes_.end() ? nullptr : &found->second.last;
}

bool UnrepeatedWrites::is_older_than_step(const at::Tensor& tensor) const {
  const auto found = writes_.find(tensor.storage().unsafeGetStorageImpl());
  return found != writes_.end() && found->second.step != step_;
}

void UnrepeatedWrites::tell_traces() const {
  for (const auto& [_, each] : writes_) {
    const auto storage = each.storage.lock();
    if (!storage || storage->nbytes() == 0) continue;
    note_earlier_write(bytes_of(c10::Storage(storage)), each.last);
  }
}

}  // namespace nanlocator::inline recorder_room
