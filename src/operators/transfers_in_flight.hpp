// Memory in use by transfers between ranks, from their start until the program waits for them. Not
// thread-safe: the trace holds its lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "nanlocator/operators/program_code.hpp"
#include "operators/lineage.hpp"
#include "tensor/observed_tensor.hpp"

namespace nanlocator::inline operators_room {

class TransfersInFlight {
 public:
  struct Started {
    std::string op;
    ProgramCode::Caller caller;
  };

  void begin(std::uint64_t number, Started transfer, const std::vector<at::Tensor>& read,
             const std::vector<at::Tensor>& written);
  /// From now on no operator conflicts with it.
  void begin_wait(std::uint64_t number);
  /// Its result has arrived.
  void end(std::uint64_t number, Lineage& lineage, std::uint64_t clock);
  void clear() {
    transfers_.clear();
    overlapped_.clear();
  }
  /// An operator runs during the current transfers.
  void note_operator();
  /// True if one ran during a transfer that uses this memory, since `clear`.
  [[nodiscard]] bool has_overlapped(const at::Tensor& tensor) const;
  /// True if the program does not wait for one of them yet.
  [[nodiscard]] bool is_any_under_way() const noexcept;

  /// The first transfer that such an access conflicts with: one that writes `tensor`, or, for a
  /// write, one that reads it. Null if there is none.
  [[nodiscard]] std::shared_ptr<const Started> in_the_way_of(const at::Tensor& tensor,
                                                             bool is_write) const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // prevents reuse of its address
    ByteRange range;
    bool is_written = false;  // by the transfer
  };
  struct Entry {
    std::shared_ptr<const Started> transfer;
    std::vector<Memory> memory;
    bool is_awaited = false;
    bool is_overlapped = false;
  };

  std::map<std::uint64_t, Entry> transfers_;  // by number, earliest first
  std::vector<Memory> overlapped_;            // of all overlapped transfers
};

}  // namespace nanlocator::inline operators_room
