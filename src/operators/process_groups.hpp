// The process groups that collectives run in, by the names that the program's framework gave them.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "operators/operator_info.hpp"

namespace nanlocator::inline operators_room {

struct NamedGroup {
  std::string name;
  std::vector<int> members;  // global ranks
};

/// Index of the process group among a collective's arguments; their number if there is none.
[[nodiscard]] std::size_t index_of_group(const OperatorInfo& collective, std::size_t arguments);

/// The group of a collective's call; null if name_process_group has not named it.
[[nodiscard]] std::shared_ptr<const NamedGroup> group_of(const OperatorInfo& collective,
                                                         c10::ArrayRef<c10::IValue> arguments);

}  // namespace nanlocator::inline operators_room
