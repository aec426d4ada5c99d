#include "recorder/unrepeated_writes.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

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

/// True if a copy that is not finite is no longer what its source holds.
bool is_rewritten(const at::Tensor& data, const at::Tensor& copy) {
  const OwnWork own_work;
  const at::NoGradGuard no_grad;
  if (!at::isFloatingType(copy.scalar_type())) return false;
  const auto values = [&](const at::Tensor& tensor) {  // float8 has no comparisons
    return copy.element_size() > 1 ? tensor.detach() : tensor.detach().to(at::kFloat);
  };
  const at::Tensor was = values(copy), is = values(data);
  if (was.isfinite().all().item<bool>()) return false;
  return !was.eq(is).logical_or(was.isnan().logical_and(is.isnan())).all().item<bool>();
}

}  // namespace

void UnrepeatedWrites::note_copy_of(const at::Tensor& data, const at::Tensor& copy) {
  if (!has_memory(data) || data.is_same(copy)) return;
  copies_.push_back({WeakStorage(data.storage().getWeakStorageImpl()), Region::of(data),
                     WeakTensor(copy.getIntrusivePtr())});
}

void UnrepeatedWrites::note_write_in_order(const at::Tensor& data) {
  if (copies_.empty() || !data.has_storage()) return;
  const auto* const storage = data.storage().unsafeGetStorageImpl();
  std::erase_if(copies_,
                [&](const Copy& each) { return each.storage._unsafe_get_target() == storage; });
}

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

void UnrepeatedWrites::note(
    const OperatorInfo& info, std::span<const c10::IValue> arguments, bool draws,
    std::span<const at::Tensor> written,
    const std::function<std::optional<EarlierWrite>(const at::Tensor&)>& maker_of) {
  if (written.empty()) return;
  std::optional<EarlierWrite> write;
  if (info.collective) {
    write = EarlierWrite{.op = info.full_name,
                         .caller = caller(),
                         .is_received = true,
                         .group = group_of(info, arguments)};
  } else if (!info.moves_values && !info.is_filler && !draws) {
    write = EarlierWrite{info.full_name, caller()};
  }
  std::size_t sources = 0;
  for (std::size_t i = 0; info.moves_values && i < arguments.size(); ++i) {
    if (!is_source(info, i)) continue;
    for_each_tensor_at(arguments[i], [&](const at::Tensor& tensor, int) {
      ++sources;
      if (!write) write = maker_of(tensor);
      if (const EarlierWrite* source = of(tensor); source != nullptr && !write) write = *source;
    });
  }
  // Of cat: which of its sources is bad is not known.
  if (write && sources > 1) write = EarlierWrite{info.full_name, caller()};
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
  for (const auto& each : copies_) {
    const auto storage = each.storage.lock();
    const at::Tensor copy(each.copy.lock());
    const bool is_alive = storage && storage->nbytes() >= each.region.bytes() && copy.defined();
    if (!is_alive || !is_rewritten(each.region.of(c10::Storage(storage)), copy)) continue;
    note_earlier_write(copy, {.op = "", .is_rewritten = true});
  }
}

}  // namespace nanlocator::inline recorder_room
