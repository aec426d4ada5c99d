#include "replay/storage_ranges.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <map>
#include <set>

#include "replay/values.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline replay_room {
namespace {

at::Tensor over_storage(const c10::Storage& storage, at::Device device, at::ScalarType dtype,
                        std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto tensor = at::empty({0}, at::TensorOptions().device(device).dtype(dtype));
  tensor.set_(storage, offset, sizes, strides);
  return tensor;
}

}  // namespace

ByteRange reach_of(const at::Tensor& tensor) {
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  return {tensor.storage_offset() * item, end_in_storage(tensor)};
}

StorageRanges storage_ranges(const std::vector<at::Tensor>& tensors) {
  std::map<const void*, std::vector<std::size_t>> by_storage;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    by_storage[tensors[i].storage().unsafeGetStorageImpl()].push_back(i);
  }
  StorageRanges result;
  for (auto& [_, members] : by_storage) {
    // A range begins at a multiple of every member's element size (powers of two), so that each
    // member has a whole offset in it.
    std::int64_t alignment = 1;
    for (const auto i : members) {
      alignment = std::max(alignment, static_cast<std::int64_t>(tensors[i].element_size()));
    }
    const auto aligned_reach = [&](std::size_t i) {
      auto reach = reach_of(tensors[i]);
      reach.begin -= reach.begin % alignment;
      return reach;
    };
    std::stable_sort(members.begin(), members.end(), [&](std::size_t a, std::size_t b) {
      return aligned_reach(a).begin < aligned_reach(b).begin;
    });
    bool is_first = true;
    for (const auto i : members) {
      const auto reach = aligned_reach(i);
      if (!is_first && reach.begin < result.ranges.back().bytes.end) {
        auto& open = result.ranges.back();
        open.bytes.end = std::max(open.bytes.end, reach.end);
        open.tensors.push_back(i);
      } else {
        result.ranges.push_back({tensors[i].storage(), tensors[i].device(), reach, {i}});
      }
      is_first = false;
    }
  }
  for (auto& range : result.ranges) std::sort(range.tensors.begin(), range.tensors.end());
  std::sort(result.ranges.begin(), result.ranges.end(),
            [](const StorageRange& a, const StorageRange& b) {
              return a.tensors.front() < b.tensors.front();
            });
  result.range_of.resize(tensors.size());
  for (std::size_t r = 0; r < result.ranges.size(); ++r) {
    for (const auto i : result.ranges[r].tensors) result.range_of[i] = r;
  }
  return result;
}

at::Tensor bytes_of(const StorageRange& range) {
  const OwnWork guard;
  return over_storage(range.storage, range.device, at::kByte, range.bytes.begin,
                      {range.bytes.end - range.bytes.begin}, {1});
}

at::Tensor view_like(const at::Tensor& like, const at::Tensor& bytes, const ByteRange& range) {
  const OwnWork guard;
  const auto item = static_cast<std::int64_t>(like.element_size());
  const auto offset = like.numel() == 0 ? 0 : (like.storage_offset() * item - range.begin) / item;
  auto view = over_storage(bytes.storage(), bytes.device(), like.scalar_type(), offset,
                           like.sizes(), like.strides());
  if (like.is_conj()) view._set_conj(true);
  if (like.is_neg()) view._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (like.requires_grad()) view.set_requires_grad(true);
  return view;
}

std::uint64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> plain;
  for (const auto& tensor : tensors) {
    if (has_plain_memory(tensor)) plain.push_back(tensor);
  }
  std::uint64_t bytes = 0;
  for (const auto& range : storage_ranges(plain).ranges) {
    bytes += static_cast<std::uint64_t>(range.bytes.end - range.bytes.begin);
  }
  return bytes;
}

namespace {

/// `place(range)`: the device of a range's copy. `made(range, copy)` is called for each.
template <class Place, class Made>
std::vector<at::Tensor> copied(const std::vector<at::Tensor>& tensors, const Place& place,
                               const Made& made) {
  const OwnWork guard;
  std::vector<std::size_t> positions;
  std::vector<at::Tensor> copyable;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!has_plain_memory(tensors[i]) || !is_backed(tensors[i])) continue;
    positions.push_back(i);
    copyable.push_back(tensors[i]);
  }
  auto copies = tensors;
  for (const auto& range : storage_ranges(copyable).ranges) {
    const auto bytes = bytes_of(range);
    const auto copy = at::empty_like(bytes, bytes.options().device(place(range)));
    copy.copy_(bytes);
    made(range, copy);
    for (const auto i : range.tensors) {
      copies[positions[i]] = view_like(copyable[i], copy, range.bytes);
    }
  }
  return copies;
}

}  // namespace

std::vector<at::Tensor> copy_together(const std::vector<at::Tensor>& tensors, CameFrom* came_from) {
  return copied(
      tensors,
      [&](const StorageRange& range) { return came_from ? at::Device(at::kCPU) : range.device; },
      [&](const StorageRange& range, const at::Tensor& copy) {
        if (came_from == nullptr || range.device.is_cpu()) return;
        came_from->insert_or_assign(copy.storage().unsafeGetStorageImpl(), range.device);
      });
}

std::vector<at::Tensor> bring_back(const std::vector<at::Tensor>& tensors,
                                   const CameFrom& came_from) {
  return copied(
      tensors,
      [&](const StorageRange& range) {
        const auto found = came_from.find(range.storage.unsafeGetStorageImpl());
        return found == came_from.end() ? range.device : found->second;
      },
      [](const StorageRange&, const at::Tensor&) {});
}

std::vector<at::Tensor> sharing_with(const std::vector<c10::IValue>& values,
                                     const std::vector<std::size_t>& positions) {
  std::set<const void*> storages;
  for (const auto i : positions) {
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (has_plain_memory(tensor)) storages.insert(tensor.storage().unsafeGetStorageImpl());
    });
  }
  std::vector<at::Tensor> sharing;
  for (const auto& tensor : tensors_of(values)) {
    if (has_plain_memory(tensor) && storages.contains(tensor.storage().unsafeGetStorageImpl())) {
      sharing.push_back(tensor);
    }
  }
  return sharing;
}

void copy_written(std::vector<c10::IValue>& values, const std::vector<std::size_t>& positions,
                  CameFrom* came_from) {
  const auto originals = sharing_with(values, positions);
  if (originals.empty()) return;
  std::set<const void*> storages;
  for (const auto& original : originals) storages.insert(original.storage().unsafeGetStorageImpl());
  const auto copies = copy_together(originals, came_from);
  std::size_t next = 0;
  for (auto& value : values) {
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      const bool is_shared =
          has_plain_memory(tensor) && storages.contains(tensor.storage().unsafeGetStorageImpl());
      return is_shared ? copies[next++] : tensor;
    });
  }
}

}  // namespace nanlocator::inline replay_room
