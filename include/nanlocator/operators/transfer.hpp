// A transfer between ranks (a collective, a send, a receive) from the moment it begins until the
// program waits for it.
//
//     nanlocator::Transfer transfer("c10d::allreduce_", {bucket}, {bucket});
//     work = group->allreduce(bucket);
//     ...
//     transfer.begin_wait();
//     work->wait();
//     transfer.end();
//
// The trace of the process notes every operator in between that writes what the transfer reads, or
// uses what it writes: torch.distributed promises neither of them anything. Where there is no trace
// it does nothing. Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace nanlocator::inline operators_room {

class Transfer {
 public:
  /// Keeps no tensor alive.
  Transfer(const std::string& op, const std::vector<at::Tensor>& read,
           const std::vector<at::Tensor>& written);

  /// The program waits for it: operators that run meanwhile are the transfer's own (gloo's
  /// reduce-scatter copies its result then).
  void begin_wait();
  /// The program has waited for it. One that it never waits for lasts until the pass ends. May be
  /// called twice.
  void end();

 private:
  std::uint64_t pass_ = 0;  // of the trace that was told; 0: nobody was
  std::uint64_t number_ = 0;
};

/// What these hold was received from other ranks (c10d::recv_) before the pass began that the trace
/// of the process follows: what is bad in them was born there. Keeps no tensor alive.
void note_received(const std::vector<at::Tensor>& tensors);

/// What the user calls the process group whose c10d name (ProcessGroup::getGroupName) is `group`: a
/// dimension of a device mesh, "dp_shard"; and its global ranks. For births in what its collectives
/// give; of the process, until it is named again.
void name_process_group(const std::string& group, const std::string& name,
                        std::vector<int> members);

}  // namespace nanlocator::inline operators_room
