#include "operators/lineage.hpp"

#include <algorithm>
#include <utility>

namespace nanlocator::inline operators_room {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

/// What remains of a piece; its NaN may have been elsewhere.
Piece part_of(Piece piece, std::int64_t begin, std::int64_t end) {
  piece.range.begin = begin;
  piece.range.end = end;
  piece.content = Content::finite;
  return piece;
}

/// Those that `range` overlaps, of disjoint pieces by address.
template <class Pieces>
auto overlapped(Pieces& pieces, const ByteRange& range) {
  const auto first = std::ranges::partition_point(
      pieces, [&](const Piece& each) { return each.range.end <= range.begin; });
  const auto end = std::ranges::partition_point(
      first, pieces.end(), [&](const Piece& each) { return each.range.begin < range.end; });
  return std::ranges::subrange(first, end);
}

/// Cuts disjoint pieces by address at both ends of `range`.
void cut_at(std::vector<Piece>& pieces, const ByteRange& range) {
  for (const std::int64_t at : {range.begin, range.end}) {
    const auto piece = std::ranges::partition_point(
        pieces, [&](const Piece& each) { return each.range.end <= at; });
    if (piece == pieces.end() || piece->range.begin >= at) continue;
    Piece rest = part_of(*piece, at, piece->range.end);
    *piece = part_of(std::move(*piece), piece->range.begin, at);
    pieces.insert(std::next(piece), std::move(rest));
  }
}

/// Cuts disjoint pieces by address at both ends of `range` and adds those that are missing in it.
void fill_gaps(std::vector<Piece>& pieces, const ByteRange& range) {
  cut_at(pieces, range);
  std::vector<Piece> missing;
  std::int64_t at = range.begin;
  for (const Piece& piece : overlapped(pieces, range)) {
    if (at < piece.range.begin) missing.push_back({.range = {at, piece.range.begin}});
    at = piece.range.end;
  }
  if (at < range.end) missing.push_back({.range = {at, range.end}});
  if (missing.empty()) return;
  pieces.insert(pieces.end(), missing.begin(), missing.end());
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.range.begin; });
}

/// Drops the bytes in `range` from pieces with gaps.
void drop_overwritten(std::vector<Piece>& strided, const ByteRange& range) {
  std::vector<Piece> kept;
  for (Piece& piece : strided) {
    const auto [begin, end, is_dense] = piece.range;
    if (!piece.range.overlaps(range)) {
      kept.push_back(std::move(piece));
      continue;
    }
    if (begin < range.begin) kept.push_back(part_of(piece, begin, range.begin));
    if (range.end < end) kept.push_back(part_of(std::move(piece), range.end, end));
  }
  strided = std::move(kept);
}

}  // namespace

bool has_bytes(const at::Tensor& tensor) noexcept {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.numel() > 0;
}

void Lineage::clear() {
  records_.clear();
  sweep_at_ = 4096;
}

Lineage::Record& Lineage::record_of(const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  if (const auto found = records_.find(storage); found != records_.end()) return found->second;
  if (records_.size() >= sweep_at_) forget_the_dead();
  return records_.emplace(storage, Record{.owner = tensor.storage().getWeakStorageImpl()})
      .first->second;
}

void Lineage::forget_the_dead() {
  std::erase_if(records_, [](const auto& entry) { return entry.second.owner.expired(); });
  sweep_at_ = std::max<std::size_t>(4096, 2 * records_.size());
}

const Lineage::Record* Lineage::find(const at::Tensor& tensor) const {
  const auto found = records_.find(storage_of(tensor));
  return found == records_.end() ? nullptr : &found->second;
}

// ---- What happens to memory ---------------------------------------------------------------------

/// What was there is overwritten. A view with gaps takes the place of others within its range,
/// except for births, as it may leave their bytes.
void Lineage::put(Record& record, Piece piece) {
  const ByteRange range = piece.range;
  if (range.is_dense) {
    if (!record.strided.empty()) drop_overwritten(record.strided, range);
    cut_at(record.pieces, range);
    const auto overwritten = overlapped(record.pieces, range);
    const auto next = record.pieces.erase(overwritten.begin(), overwritten.end());
    record.pieces.insert(next, std::move(piece));
    return;
  }
  const auto is_inside = [&](const Piece& each) { return range.contains(each.range); };
  std::erase_if(record.strided,
                [&](const Piece& each) { return is_inside(each) && each.births.empty(); });
  for (auto* const pieces : {&record.pieces, &record.strided}) {
    for (Piece& each : *pieces) {
      if (is_inside(each)) each.touch_in_part = {};
    }
  }
  record.strided.push_back(std::move(piece));
}

void Lineage::note_allocation(const at::Tensor& tensor, std::uint64_t clock,
                              const std::string* writer,
                              const std::shared_ptr<const Place>& place) {
  Record& record = record_of(tensor);
  record.pieces.clear();
  record.strided.clear();
  note_growth(tensor, 0, clock, writer, place);
}

void Lineage::note_growth(const at::Tensor& tensor, std::int64_t bytes_before, std::uint64_t clock,
                          const std::string* writer, const std::shared_ptr<const Place>& place) {
  Record& record = record_of(tensor);
  record.allocator = writer;
  record.allocated_at = place;
  const ByteRange added{bytes_before, static_cast<std::int64_t>(tensor.storage().nbytes())};
  put(record, {added, MemoryState::allocated, clock, writer, place});
}

void Lineage::note_finite_write(const at::Tensor& tensor, std::uint64_t clock,
                                const std::string* writer, bool is_filler) {
  Record& record = record_of(tensor);
  put(record, {.range = range_of(tensor),
               .state = MemoryState::finite,
               .clock = clock,
               .writer = writer,
               .place = record.allocated_at,
               .is_filler = is_filler});
}

void Lineage::note_bytes(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                         const std::shared_ptr<const Place>& place) {
  put(record_of(tensor), {range_of(tensor), MemoryState::bytes, clock, writer, place});
}

void Lineage::note_bad_write(const at::Tensor& tensor, std::uint64_t clock,
                             const std::string* writer, const BirthIds& births, Content content) {
  Record& record = record_of(tensor);
  put(record, {.range = range_of(tensor),
               .state = MemoryState::written,
               .clock = clock,
               .writer = writer,
               .place = record.allocated_at,
               .births = births,
               .content = content});
}

void Lineage::note_bad_content(const at::Tensor& tensor, const BirthIds& births) {
  Record& record = record_of(tensor);
  const ByteRange range = range_of(tensor);
  if (!range.is_dense) {
    record.strided.push_back({.range = range, .births = births});
    return;
  }
  fill_gaps(record.pieces, range);
  for (Piece& piece : overlapped(record.pieces, range)) unite(piece.births, births);
}

void Lineage::note_received(const at::Tensor& tensor, std::uint64_t clock,
                            const std::string* writer, const std::shared_ptr<const Place>& place,
                            const BirthIds& sent) {
  put(record_of(tensor), {.range = range_of(tensor),
                          .state = MemoryState::received,
                          .clock = clock,
                          .writer = writer,
                          .place = place,
                          .births = sent});
}

void Lineage::note_arrival(const c10::StorageImpl* storage, const ByteRange& range,
                           std::uint64_t clock, const std::string* writer) {
  const auto found = records_.find(storage);
  if (found == records_.end()) return;
  Record& record = found->second;
  const Known known = known_of(record, range);
  if (!known.is_written() || !known.births.empty()) return;
  put(record, {range, MemoryState::received, clock, writer, record.allocated_at});
}

void Lineage::note_touch(const at::Tensor& tensor, const std::shared_ptr<const Place>& place) {
  const auto found = records_.find(storage_of(tensor));
  if (found == records_.end()) return;
  Record& record = found->second;
  const ByteRange range = range_of(tensor);
  const Touch touch{place, ++touches_};
  const auto touched = [&](Piece& piece) {
    (range.is_dense ? piece.touch : piece.touch_in_part) = touch;
  };
  fill_gaps(record.pieces, range);
  std::ranges::for_each(overlapped(record.pieces, range), touched);
  for (Piece& piece : record.strided) {
    if (piece.range.overlaps(range)) touched(piece);
  }
}

void Lineage::note_earlier(const at::Tensor& tensor, const std::string* writer,
                           const std::shared_ptr<const Place>& place) {
  put(record_of(tensor),
      {.range = range_of(tensor), .state = MemoryState::earlier, .writer = writer, .place = place});
}

void Lineage::note_foreign(const at::Tensor& tensor, const std::shared_ptr<const Place>& place) {
  if (state_of(tensor) != MemoryState::unknown) return;
  put(record_of(tensor),
      {.range = range_of(tensor), .state = MemoryState::foreign, .place = place});
}

void Lineage::forget(const at::Tensor& tensor) {
  records_.erase(storage_of(tensor));
}

// ---- What is known of it ------------------------------------------------------------------------

bool Lineage::knows(const at::Tensor& tensor) const {
  return find(tensor) != nullptr;
}

bool Lineage::has_been_used(const at::Tensor& tensor) const {
  const Record* const record = find(tensor);
  const auto is_used = [](const Piece& piece) { return piece.clock != 0; };
  return record != nullptr && (std::ranges::any_of(record->pieces, is_used) ||
                               std::ranges::any_of(record->strided, is_used));
}

Known Lineage::known_of(const at::Tensor& tensor) const {
  const Record* const record = find(tensor);
  return record == nullptr ? Known() : known_of(*record, range_of(tensor));
}

Known Lineage::known_of(const Record& record, const ByteRange& range) {
  const Piece nothing;
  const Piece* last = nullptr;       // of those that were written by operators
  const Piece* unscanned = nullptr;  // the last of those that nobody scanned
  Known known;
  Touch touch;
  bool is_finite = true;
  const auto note = [&](const Piece& piece) {
    unite(known.births, piece.births);
    for (const Touch& each : {piece.touch, piece.touch_in_part}) {
      if (each.number > touch.number) touch = each;
    }
    is_finite = is_finite && piece.state == MemoryState::finite && piece.births.empty();
  };
  const auto look_at = [&](const Piece& piece) {
    note(piece);
    const Piece*& latest = piece.is_written() ? last : unscanned;
    // An allocation and what a collective writes to it may have the same clock.
    const bool is_later = latest == nullptr || piece.clock > latest->clock ||
                          (piece.clock == latest->clock && piece.state >= latest->state);
    if (is_later) latest = &piece;
  };
  std::int64_t known_to = range.begin;
  for (const Piece& piece : overlapped(record.pieces, range)) {
    look_at(piece);
    if (piece.range.begin <= known_to) known_to = piece.range.end;
  }
  if (known_to < range.end) look_at(nothing);
  bool is_written_between_gaps = false;
  for (const Piece& piece : record.strided) {
    if (!piece.range.overlaps(range)) continue;
    if (piece.state == MemoryState::unknown) {  // only its births are known
      note(piece);
      continue;
    }
    is_written_between_gaps = piece.is_written();
    look_at(piece);
  }
  const Piece* most = unscanned != nullptr ? unscanned : last;
  if (most == nullptr) most = &nothing;
  known.state = most->state;
  const bool was_there_before = known.state == MemoryState::unknown ||
                                known.state == MemoryState::foreign ||
                                known.state == MemoryState::earlier;
  if (is_written_between_gaps && !was_there_before) {
    most = last;
    known.state = MemoryState::written;
  }
  if (is_finite) {
    known.state = MemoryState::finite;
  } else if (known.is_written()) {
    known.state = MemoryState::written;
  }
  known.clock = most->clock;
  known.writer = most->writer;
  known.place = most->place;
  known.touched_by = std::move(touch.by);
  known.is_written_in_part = last != nullptr && !known.is_written();
  return known;
}

MemoryState Lineage::state_of(const at::Tensor& tensor) const {
  return known_of(tensor).state;
}

const std::string* Lineage::allocator_of(const at::Tensor& tensor) const {
  const Record* const record = find(tensor);
  return record == nullptr ? nullptr : record->allocator;
}

template <typename Use>
void Lineage::for_each_piece_of(const at::Tensor& tensor, const Use& use) const {
  const Record* const record = find(tensor);
  if (record == nullptr) return;
  const ByteRange range = range_of(tensor);
  std::ranges::for_each(overlapped(record->pieces, range), use);
  for (const Piece& piece : record->strided) {
    if (piece.range.overlaps(range)) use(piece);
  }
}

BirthIds Lineage::births_in(const at::Tensor& tensor) const {
  BirthIds births;
  for_each_piece_of(tensor, [&](const Piece& piece) { unite(births, piece.births); });
  return births;
}

bool Lineage::is_known_to_have_nan(const at::Tensor& tensor) const {
  const ByteRange range = range_of(tensor);
  if (!range.is_dense) return false;
  bool has_nan = false;
  for_each_piece_of(tensor, [&](const Piece& piece) {
    has_nan = has_nan ||
              (piece.content == Content::nan && !piece.is_touched() && range.contains(piece.range));
  });
  return has_nan;
}

Piece Lineage::last_write_of(const at::Tensor& tensor) const {
  const Piece* last = nullptr;
  for_each_piece_of(tensor, [&](const Piece& piece) {
    const bool is_write = piece.is_written() || piece.state == MemoryState::received ||
                          piece.state == MemoryState::bytes;
    if (is_write && (last == nullptr || piece.clock >= last->clock)) last = &piece;
  });
  return last == nullptr ? Piece() : *last;
}

}  // namespace nanlocator::inline operators_room
