// Differences between versions of Torch for the room `agree`, which may not include tensor's.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace nanlocator::inline agree_room {

/// A second connection to `store`'s server. Throws if this kind of Store cannot be cloned. Before
/// 2.7 no Store can; a TCPStore, below any prefixes, is connected to once more.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> clone_of(
    const c10::intrusive_ptr<c10d::Store>& store);

/// Ends any wait in `group`. Throws if its backend cannot: before 2.7 none can.
void abort_group(c10d::ProcessGroup& group);

}  // namespace nanlocator::inline agree_room
