#include "operators/lineage.hpp"

#include <algorithm>
#include <utility>

namespace nanlocator::inline operators_room {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

Tag part_of(const Tag& tag, const ByteRange& range) {
  return {.range = range, .births = tag.births};
}

Touch part_of(const Touch& touch, const ByteRange& range) {
  return {.range = range, .by = touch.by};
}

/// Drops the bytes in `range`, which is overwritten. A view with gaps drops none.
template <class Piece>
void drop_overwritten(std::vector<Piece>& pieces, const ByteRange& range) {
  if (!range.is_dense) return;
  std::vector<Piece> kept;
  for (Piece& piece : pieces) {
    const auto& [begin, end, is_dense] = piece.range;
    if (!piece.range.overlaps(range)) {
      kept.push_back(std::move(piece));
      continue;
    }
    if (begin < range.begin) kept.push_back(part_of(piece, {begin, range.begin, is_dense}));
    if (range.end < end) kept.push_back(part_of(piece, {range.end, end, is_dense}));
  }
  pieces = std::move(kept);
}

void note_write(StorageRecord& record, const RangeWrite& write) {
  std::erase_if(record.writes,
                [&](const RangeWrite& before) { return write.range.contains(before.range); });
  record.writes.push_back(write);
  drop_overwritten(record.touches, write.range);
  std::erase_if(record.touches, [&](const Touch& touch) {  // two views with the same gaps
    return !touch.range.is_dense && write.range.contains(touch.range);
  });
}

}  // namespace

bool has_bytes(const at::Tensor& tensor) noexcept {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.numel() > 0;
}

void unite(BirthIds& ids, const BirthIds& more) {
  for (const BirthId id : more) {
    const auto at = std::lower_bound(ids.begin(), ids.end(), id);
    if (at == ids.end() || *at != id) ids.insert(at, id);
  }
}

void Lineage::clear() {
  records_.clear();
  sweep_at_ = 4096;
}

StorageRecord& Lineage::record_of(const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  if (const auto found = records_.find(storage); found != records_.end()) return found->second;
  if (records_.size() >= sweep_at_) forget_the_dead();
  return records_.emplace(storage, StorageRecord(tensor.storage().getWeakStorageImpl()))
      .first->second;
}

void Lineage::forget_the_dead() {
  std::erase_if(records_, [](const auto& entry) { return entry.second.owner.expired(); });
  sweep_at_ = std::max<std::size_t>(4096, 2 * records_.size());
}

StorageRecord* Lineage::find(const at::Tensor& tensor) {
  const auto found = records_.find(storage_of(tensor));
  return found == records_.end() ? nullptr : &found->second;
}

BirthIds Lineage::births_in(const at::Tensor& tensor) {
  BirthIds births;
  const StorageRecord* record = find(tensor);
  if (record == nullptr || record->tags.empty()) return births;
  const ByteRange range = range_of(tensor);
  for (const Tag& tag : record->tags) {
    if (tag.range.overlaps(range)) unite(births, tag.births);
  }
  return births;
}

bool Lineage::is_known_to_have_nan(const at::Tensor& tensor) {
  const StorageRecord* record = find(tensor);
  if (record == nullptr || record->tags.empty() || !record->touches.empty()) return false;
  const ByteRange range = range_of(tensor);
  return range.is_dense && std::ranges::any_of(record->tags, [&](const Tag& tag) {
           return tag.content == Content::nan && range.contains(tag.range);
         });
}

RangeWrite Lineage::last_write_of(const at::Tensor& tensor) {
  RangeWrite last;
  const StorageRecord* record = find(tensor);
  if (record == nullptr) return last;
  const ByteRange range = range_of(tensor);
  for (const RangeWrite& write : record->writes) {
    if (write.range.overlaps(range) && write.clock >= last.clock) last = write;
  }
  return last;
}

bool Lineage::was_written_finite(const at::Tensor& tensor) {
  const StorageRecord* record = find(tensor);
  if (record == nullptr || record->state != StorageState::written) return false;
  const ByteRange range = range_of(tensor);
  if (record->finite_range.contains(range)) return true;
  // Writes far apart, as to gradients in one buffer, are in no common range.
  const auto last =
      std::ranges::find_if(record->writes.rbegin(), record->writes.rend(),
                           [&](const RangeWrite& write) { return write.range.overlaps(range); });
  return last != record->writes.rend() && last->is_finite && last->range.is_dense &&
         last->range.contains(range);
}

std::shared_ptr<const Place> Lineage::last_touch_of(const at::Tensor& tensor) {
  const StorageRecord* record = find(tensor);
  if (record == nullptr) return nullptr;
  const ByteRange range = range_of(tensor);
  const auto last =
      std::ranges::find_if(record->touches.rbegin(), record->touches.rend(),
                           [&](const Touch& touch) { return touch.range.overlaps(range); });
  return last == record->touches.rend() ? nullptr : last->by;
}

void Lineage::note_allocation(const at::Tensor& tensor, std::uint64_t clock,
                              const std::string* writer,
                              const std::shared_ptr<const Place>& place) {
  StorageRecord& record = record_of(tensor);
  record.state = StorageState::allocated;
  record.last_write = clock;
  record.finite_range = {};
  record.writer = record.allocator = writer;
  record.place = place;
  record.touches.clear();
  record.tags.clear();
  record.writes.clear();
}

void Lineage::note_growth(const at::Tensor& tensor, const std::string* writer,
                          const std::shared_ptr<const Place>& place) {
  StorageRecord& record = record_of(tensor);
  record.allocator = writer;
  const bool is_own =
      record.state == StorageState::allocated || record.state == StorageState::written;
  if (is_own) record.place = place;
}

void Lineage::note_finite_write(const at::Tensor& tensor, std::uint64_t clock,
                                const std::string* writer, bool is_filler) {
  StorageRecord& record = record_of(tensor);
  const ByteRange range = range_of(tensor);
  if (record.state != StorageState::written) {
    record.state = StorageState::written;
    record.finite_range = {};
  }
  if (range.is_dense) {
    ByteRange& known = record.finite_range;
    if (known.end == known.begin || range.contains(known)) {
      known = range;
    } else if (range.begin <= known.end && known.begin <= range.end) {
      known = {std::min(known.begin, range.begin), std::max(known.end, range.end), true};
    }
    if (!record.tags.empty()) drop_overwritten(record.tags, range);
  }
  note_write(record, {.range = range,
                      .clock = clock,
                      .writer = writer,
                      .is_finite = true,
                      .is_filler = is_filler});
  record.is_filled = is_filler;
  record.last_write = clock;
  record.writer = writer;
}

void Lineage::note_bytes(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                         const std::shared_ptr<const Place>& place) {
  StorageRecord& record = record_of(tensor);
  const ByteRange range = range_of(tensor);
  record.state = StorageState::bytes;
  record.finite_range = {};
  record.place = place;
  if (!record.tags.empty()) drop_overwritten(record.tags, range);
  note_write(record, {.range = range, .clock = clock, .writer = writer});
  record.is_filled = false;
  record.last_write = clock;
  record.writer = writer;
}

void Lineage::forget(const at::Tensor& tensor) {
  records_.erase(storage_of(tensor));
}

void Lineage::note_bad_write(const at::Tensor& tensor, std::uint64_t clock,
                             const std::string* writer, const BirthIds& births, Content content) {
  StorageRecord& record = record_of(tensor);
  const ByteRange range = range_of(tensor);
  if (record.state != StorageState::written) {
    record.state = StorageState::written;
    record.finite_range = {};
  }
  drop_overwritten(record.tags, range);
  record.tags.push_back({.range = range, .births = births, .content = content});
  note_write(record, {.range = range, .clock = clock, .writer = writer});
  record.is_filled = false;
  record.last_write = clock;
  record.writer = writer;
}

void Lineage::note_bad_content(const at::Tensor& tensor, const BirthIds& births) {
  StorageRecord& record = record_of(tensor);
  record.tags.push_back({.range = range_of(tensor), .births = births});
}

void Lineage::note_received(const at::Tensor& tensor, std::uint64_t clock,
                            const std::string* writer, const std::shared_ptr<const Place>& place,
                            const BirthIds& sent) {
  StorageRecord& record = record_of(tensor);
  record.state = StorageState::received;
  record.last_write = clock;
  record.finite_range = {};
  record.writer = writer;
  record.place = place;
  const ByteRange range = range_of(tensor);
  drop_overwritten(record.tags, range);
  if (!sent.empty()) record.tags.push_back({.range = range, .births = sent});
  note_write(record, {.range = range, .clock = clock, .writer = writer, .is_received = true});
}

void Lineage::note_arrival(const c10::StorageImpl* storage, const ByteRange& range,
                           std::uint64_t clock, const std::string* writer) {
  const auto found = records_.find(storage);
  if (found == records_.end() || found->second.state != StorageState::written) return;
  StorageRecord& record = found->second;
  const bool has_births =
      std::ranges::any_of(record.tags, [&](const Tag& tag) { return tag.range.overlaps(range); });
  if (has_births) return;
  note_write(record, {.range = range, .clock = clock, .writer = writer, .is_received = true});
}

void Lineage::note_touch(const at::Tensor& tensor, const std::shared_ptr<const Place>& place) {
  StorageRecord* record = find(tensor);
  if (record == nullptr) return;
  const ByteRange range = range_of(tensor);
  std::erase_if(record->touches, [&](const Touch& before) { return range.contains(before.range); });
  record->touches.push_back({.range = range, .by = place});
}

void Lineage::note_earlier(const at::Tensor& tensor, const std::string* writer,
                           const std::shared_ptr<const Place>& place) {
  StorageRecord& record = record_of(tensor);
  record.state = StorageState::earlier;
  record.writer = writer;
  record.place = place;
}

void Lineage::note_foreign(const at::Tensor& tensor, const std::shared_ptr<const Place>& place) {
  if (find(tensor) != nullptr) return;
  StorageRecord& record = record_of(tensor);
  record.state = StorageState::foreign;
  record.place = place;
}

void Declarations::declare(const at::Tensor& tensor, DeclaredAs as, std::string name) {
  Declared declared{.tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                        tensor.getIntrusivePtr()),
                    .storage = tensor.storage().getWeakStorageImpl(),
                    .range = range_of(tensor),
                    .as = as,
                    .name = std::move(name),
                    .module = {}};
  if (as == DeclaredAs::parameter || as == DeclaredAs::buffer) {
    const auto dot = declared.name.rfind('.');
    if (dot != std::string::npos) declared.module = declared.name.substr(0, dot);
  }
  declared_.push_back(std::move(declared));
  index(declared_.size() - 1);
}

void Declarations::note_writer(const at::Tensor& parameter,
                               const std::shared_ptr<const Place>& writer) {
  for (Declared& each : declared_) {
    const bool is_it = each.as == DeclaredAs::parameter &&
                       each.tensor._unsafe_get_target() == parameter.unsafeGetTensorImpl();
    if (is_it) each.writer = writer;
  }
}

void Declarations::index(std::size_t position) {
  const at::Tensor tensor = tensor_of(declared_[position]);
  const at::Tensor values = tensor.defined() ? values_of(tensor) : at::Tensor();
  if (!values.defined()) return;
  declared_[position].storage = values.storage().getWeakStorageImpl();
  declared_[position].range = range_of(values);
  by_storage_.emplace(storage_of(values), position);
}

void Declarations::refresh() {
  by_storage_.clear();
  for (std::size_t i = 0; i < declared_.size(); ++i) index(i);
}

template <typename Use>
void Declarations::for_each_sharing(const at::Tensor& tensor, const Use& use) const {
  if (by_storage_.empty()) return;
  const auto [begin, end] = by_storage_.equal_range(storage_of(tensor));
  if (begin == end) return;
  const ByteRange range = range_of(tensor);
  for (auto at = begin; at != end; ++at) {
    const Declared& declared = declared_[at->second];
    if (declared.range.overlaps(range)) use(declared);
  }
}

const Declarations::Declared* Declarations::find(const at::Tensor& tensor) const {
  const Declared* first = nullptr;  // tied weights have several names
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as == DeclaredAs::gradient) return;
    if (first == nullptr || &declared < first) first = &declared;
  });
  return first;
}

std::vector<const Declarations::Declared*> Declarations::find_all(const at::Tensor& tensor) const {
  std::vector<const Declared*> all;
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::gradient) all.push_back(&declared);
  });
  std::ranges::sort(all);  // pointers into one vector
  return all;
}

std::vector<NamedTensor> Declarations::gradients_in(const at::Tensor& tensor) const {
  std::vector<NamedTensor> gradients;
  for_each_sharing(tensor, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::gradient) return;
    at::Tensor gradient = tensor_of(declared);
    if (gradient.defined()) gradients.push_back({declared.name, std::move(gradient)});
  });
  return gradients;
}

bool Declarations::has_gradient_in(const at::Tensor& tensor) const {
  const ByteRange range = range_of(tensor);
  return std::ranges::any_of(declared_, [&](const Declared& declared) {
    if (declared.as != DeclaredAs::parameter && declared.as != DeclaredAs::gradient) return false;
    const at::Tensor each = tensor_of(declared);
    if (!each.defined()) return false;
    const at::Tensor gradient = declared.as == DeclaredAs::gradient ? each
                                : each.is_leaf()                    ? each.grad()
                                                                    : at::Tensor();
    const at::Tensor values = gradient.defined() ? values_of(gradient) : at::Tensor();
    return values.defined() && values.is_alias_of(tensor) && range_of(values).overlaps(range);
  });
}

std::vector<NamedTensor> Declarations::parameters_of(const std::string& module,
                                                     std::size_t most) const {
  std::vector<NamedTensor> parameters;
  for (const Declared& declared : declared_) {
    if (declared.as != DeclaredAs::parameter || declared.module != module) continue;
    const at::Tensor tensor = tensor_of(declared);
    if (tensor.defined() && parameters.size() < most) parameters.push_back({declared.name, tensor});
  }
  return parameters;
}

at::Tensor Declarations::tensor_of(const Declared& declared) {
  if (declared.tensor.expired()) return {};
  auto strong = declared.tensor.lock();
  if (!strong) return {};
  return at::Tensor(std::move(strong));
}

}  // namespace nanlocator::inline operators_room
