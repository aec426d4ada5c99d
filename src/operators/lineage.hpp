// What is known of the bytes in memory: who wrote them last, and from which births their bad
// values are.
//
// A storage is identified by its StorageImpl and a weak pointer, which prevents reuse of the
// address but keeps no tensor memory alive. Its record is an interval map: pieces of memory with
// one state each. Not thread-safe: the trace holds its lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nanlocator/scan/content.hpp"
#include "operators/place.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

/// True for a strided tensor with elements of any dtype, which an operator can read or write.
[[nodiscard]] bool has_bytes(const at::Tensor& tensor) noexcept;

enum class MemoryState : std::uint8_t {
  unknown,    // nothing in this pass has written it
  foreign,    // appeared as a gradient that no operator has written
  earlier,    // written by an operator that this pass does not repeat
  allocated,  // by an operator; no operator has written it
  bytes,      // written by an operator on integers; as floating-point values it is unknown
  received,   // by a collective; not scanned yet
  finite,     // written by operators, finite at their time
  written,    // by operators, but not known to be finite: bad, or written in part
};

/// A frame off the dispatcher had access to memory.
struct Touch {
  std::shared_ptr<const Place> by{};  // null: none
  std::uint64_t number = 0;           // ascending
};

/// What is known of some bytes of a storage.
struct Piece {
  ByteRange range;
  MemoryState state = MemoryState::unknown;
  std::uint64_t clock = 0;               // the trace's, of the write or allocation
  const std::string* writer = nullptr;   // the operator; interned
  std::shared_ptr<const Place> place{};  // where it was allocated, received, or first seen
  bool is_filler = false;                // a constant
  BirthIds births{};
  Content content = Content::finite;  // lower bound of the bad values; finite: unknown
  Touch touch{};                      // the last one since the write
  Touch touch_in_part{};              // the same, by a view with gaps

  [[nodiscard]] bool is_touched() const noexcept { return touch.by || touch_in_part.by; }

  [[nodiscard]] bool is_written() const noexcept {
    return state == MemoryState::finite || state == MemoryState::written;
  }
};

/// What is known of all bytes that a tensor reaches.
struct Known {
  MemoryState state = MemoryState::unknown;
  /// Of the piece that says most: among those that nobody scanned the latest, else the last write.
  std::uint64_t clock = 0;
  const std::string* writer = nullptr;
  std::shared_ptr<const Place> place{};
  std::shared_ptr<const Place> touched_by{};  // the last frame that had access since a write
  BirthIds births{};
  bool is_written_in_part = false;  // by operators, where the state is that of other bytes

  [[nodiscard]] bool is_written() const noexcept {
    return state == MemoryState::finite || state == MemoryState::written;
  }
  /// Allocated, and no operator has written any of it.
  [[nodiscard]] bool is_unwritten() const noexcept {
    return state == MemoryState::allocated && !is_written_in_part && births.empty();
  }
};

class Lineage {
 public:
  void clear();

  void note_allocation(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                       const std::shared_ptr<const Place>& place);
  /// A storage has grown beyond `bytes_before`; the added part is unwritten.
  void note_growth(const at::Tensor& tensor, std::int64_t bytes_before, std::uint64_t clock,
                   const std::string* writer, const std::shared_ptr<const Place>& place);
  void note_finite_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                         bool is_filler);
  /// A write of integers, which may be viewed as floating-point values (a payload in float8).
  void note_bytes(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                  const std::shared_ptr<const Place>& place);
  void note_bad_write(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                      const BirthIds& births, Content content);
  /// Marks the present content as bad without a write: a root that was found on reading.
  void note_bad_content(const at::Tensor& tensor, const BirthIds& births);
  /// `sent`: births in this rank's input to the collective, assigned to a bad result.
  void note_received(const at::Tensor& tensor, std::uint64_t clock, const std::string* writer,
                     const std::shared_ptr<const Place>& place, const BirthIds& sent);
  /// Attributes to the collective `writer` the last writes here, which its own operators made
  /// (gloo's reduce-scatter copies its result during the wait).
  void note_arrival(const c10::StorageImpl* storage, const ByteRange& range, std::uint64_t clock,
                    const std::string* writer);
  /// A frame without schema has access to the tensor. Ignored if the storage is unknown.
  void note_touch(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);
  void note_earlier(const at::Tensor& tensor, const std::string* writer,
                    const std::shared_ptr<const Place>& place);
  /// A gradient that no operator has written. Ignored if anything is known of its bytes.
  void note_foreign(const at::Tensor& tensor, const std::shared_ptr<const Place>& place);
  /// What this memory holds is from elsewhere.
  void forget(const at::Tensor& tensor);

  /// True if anything is known of the storage.
  [[nodiscard]] bool knows(const at::Tensor& tensor) const;
  /// True if anything has allocated or written memory of the storage in this pass.
  [[nodiscard]] bool has_been_used(const at::Tensor& tensor) const;
  [[nodiscard]] Known known_of(const at::Tensor& tensor) const;
  [[nodiscard]] MemoryState state_of(const at::Tensor& tensor) const;
  /// The operator that allocated the storage in this pass; null if none.
  [[nodiscard]] const std::string* allocator_of(const at::Tensor& tensor) const;
  /// Births of the bytes that `tensor` reaches.
  [[nodiscard]] BirthIds births_in(const at::Tensor& tensor) const;
  /// True if an operator's last write there has a NaN, anywhere in it.
  [[nodiscard]] bool is_known_to_have_nan(const at::Tensor& tensor) const;
  /// The last write of any of the bytes that `tensor` reaches; its clock is 0 if there is none.
  [[nodiscard]] Piece last_write_of(const at::Tensor& tensor) const;

  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  struct Record {
    c10::weak_intrusive_ptr<c10::StorageImpl> owner;
    const std::string* allocator = nullptr;       // in this pass; interned
    std::shared_ptr<const Place> allocated_at{};  // null inside an operator
    std::vector<Piece> pieces{};                  // of views without gaps; disjoint, by address
    std::vector<Piece> strided{};                 // of views with gaps, latest last
  };

  Record& record_of(const at::Tensor& tensor);
  [[nodiscard]] const Record* find(const at::Tensor& tensor) const;
  template <typename Use>
  void for_each_piece_of(const at::Tensor& tensor, const Use& use) const;
  [[nodiscard]] static Known known_of(const Record& record, const ByteRange& range);
  static void put(Record& record, Piece piece);
  void forget_the_dead();

  std::unordered_map<const c10::StorageImpl*, Record> records_;
  std::size_t sweep_at_ = 4096;
  std::uint64_t touches_ = 0;
};

}  // namespace nanlocator::inline operators_room
