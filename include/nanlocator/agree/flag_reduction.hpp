// One int32, the largest of all ranks': how every rank comes to know that some rank has seen
// something bad.
//
// Over a c10d process group, or over a raw NCCL communicator (nccl_flag_reduction.hpp), for
// programs that have no c10d. Every rank makes the same calls in the same order, one reduction at a
// time. Nothing but `finish` of a flag in host memory waits. Thread: the training thread; `abort`
// from any.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class ProcessGroup;
}

namespace nanlocator::inline agree_room {

class FlagReduction {
 public:
  FlagReduction() = default;
  virtual ~FlagReduction() = default;
  FlagReduction(const FlagReduction&) = delete;  // one sequence of collectives
  FlagReduction& operator=(const FlagReduction&) = delete;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// Takes flags in the memory of devices of this type.
  [[nodiscard]] virtual bool reduces_on(at::DeviceType device) const = 0;

  /// Launches a MAX all-reduce of `flag` (int32 [1]) in place, ordered after the current stream. It
  /// may not be read, written or freed before `finish`. Throws where it cannot be launched.
  virtual void start(const at::Tensor& flag) = 0;
  /// Orders the current stream after the reduction; in host memory it waits, as long as the group
  /// allows. Throws where the reduction has failed.
  virtual void finish() = 0;
  /// Between `finish` and the time when the device has come so far: throws where the connection has
  /// failed since, as then it never does.
  virtual void check() = 0;
  /// Ends what waits in it, where what connects the ranks is nanlocator's own.
  virtual void abort() noexcept = 0;
};

/// `group`'s own time-out bounds `finish`. Throws UsageError where it is null.
[[nodiscard]] std::unique_ptr<FlagReduction> flag_reduction_over(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace nanlocator::inline agree_room
