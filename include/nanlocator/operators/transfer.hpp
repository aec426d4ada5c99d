// A transfer between ranks (a collective, a send, a receive), from its start until the program
// waits for it.
//
//     nanlocator::Transfer transfer("c10d::allreduce_", {bucket}, {bucket});
//     work = group->allreduce(bucket);
//     ...
//     transfer.begin_wait();
//     work->wait();
//     transfer.end();
//
// The process's trace notes every operator in between that writes memory that the transfer reads,
// or uses memory that it writes: torch.distributed gives no guarantee for either. Does nothing
// without a trace. Any thread.
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

  /// The program starts to wait. Operators that run meanwhile belong to the transfer (gloo's
  /// reduce-scatter copies its result then).
  void begin_wait();
  /// The program has waited. A transfer without a wait lasts until the pass ends. May be called
  /// twice.
  void end();

 private:
  std::uint64_t pass_ = 0;  // of the trace that was notified; 0 if there was none
  std::uint64_t number_ = 0;
};

/// Sets the user's name (a dimension of a device mesh, "dp_shard") and the global ranks of the
/// process group with the c10d name `group` (ProcessGroup::getGroupName). Used for births in its
/// collectives' results. Holds for the process, until the next call for this group.
void name_process_group(const std::string& group, const std::string& name,
                        std::vector<int> members);

}  // namespace nanlocator::inline operators_room
