// Memory that transfers between ranks use, from their beginning until the program waits for them.
// Not thread-safe: the trace holds its lock.
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
  /// Nothing gets in its way from now on.
  void begin_wait(std::uint64_t number);
  /// What it has written is there now.
  void end(std::uint64_t number, Lineage& lineage, std::uint64_t clock);
  void clear() {
    transfers_.clear();
    overlapped_.clear();
  }
  /// An operator runs while they are under way.
  void note_operator();
  /// Whether one did while a transfer that uses this memory was under way; since `clear`.
  [[nodiscard]] bool has_overlapped(const at::Tensor& tensor) const;
  /// Whether there is one that nobody waits for.
  [[nodiscard]] bool is_any_under_way() const noexcept;

  /// The first transfer that an operator gets in the way of which writes `tensor`, or only reads
  /// it; null where there is none.
  [[nodiscard]] std::shared_ptr<const Started> in_the_way_of(const at::Tensor& tensor,
                                                             bool is_write) const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // its address gets nobody else
    ByteRange range;
    bool is_written = false;  // by the transfer
  };
  struct Entry {
    std::shared_ptr<const Started> transfer;
    std::vector<Memory> memory;
    bool is_awaited = false;
    bool is_overlapped = false;
  };

  std::map<std::uint64_t, Entry> transfers_;  // by number: the earliest first
  std::vector<Memory> overlapped_;            // of all that were
};

}  // namespace nanlocator::inline operators_room
