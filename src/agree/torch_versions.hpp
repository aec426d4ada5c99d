// Where versions of Torch differ for the room `agree`, which may not include tensor's.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace nanlocator::inline agree_room {

/// A second connection to what `store` connects to. Throws where this kind of Store has none.
/// Before 2.7 no Store is cloned; a TCPStore, below any prefixes, is connected to once more.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> clone_of(
    const c10::intrusive_ptr<c10d::Store>& store);

/// Ends what waits in `group`. Throws where its backend cannot: before 2.7 none can.
void abort_group(c10d::ProcessGroup& group);

}  // namespace nanlocator::inline agree_room
