// The maximum of one int32 over all ranks, by which every rank learns that some rank saw a bad
// value.
//
// Over a c10d process group or, for programs without c10d, a raw NCCL communicator
// (nccl_flag_reduction.hpp). Every rank makes the same calls in the same order, one reduction at a
// time. Only `finish` of a flag in host memory blocks. Thread: the training thread; `abort` from
// any.
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
  /// Whether it reduces flags in the memory of devices of this type.
  [[nodiscard]] virtual bool reduces_on(at::DeviceType device) const = 0;

  /// Launches a MAX all-reduce of `flag` (int32 [1]) in place, ordered after the current stream.
  /// `flag` must not be read, written or freed before `finish`. Throws if the launch fails.
  virtual void start(const at::Tensor& flag) = 0;
  /// Orders the current stream after the reduction; in host memory it waits, up to the group's
  /// timeout. Throws if the reduction has failed.
  virtual void finish() = 0;
  /// Called after `finish`, until the device gets there: throws if the connection has failed since,
  /// because the device then never does.
  virtual void check() = 0;
  /// Ends any wait in the reduction, if nanlocator owns the connection between the ranks.
  virtual void abort() noexcept = 0;
};

/// `group`'s own timeout bounds `finish`. Throws UsageError if `group` is null.
[[nodiscard]] std::unique_ptr<FlagReduction> flag_reduction_over(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace nanlocator::inline agree_room
