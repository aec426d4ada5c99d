#include "operators/process_groups.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "nanlocator/operators/transfer.hpp"

namespace nanlocator::inline operators_room {
namespace {

struct NamedGroups {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const NamedGroup>> by_name;
};

NamedGroups& named_groups() {
  static auto& groups = *new NamedGroups;  // operators may run while the process ends
  return groups;
}

}  // namespace

void name_process_group(const std::string& group, const std::string& name,
                        std::vector<int> members) {
  auto named = std::make_shared<const NamedGroup>(NamedGroup{name, std::move(members)});
  NamedGroups& groups = named_groups();
  const std::lock_guard lock(groups.mutex);
  groups.by_name[group] = std::move(named);
}

std::size_t index_of_group(const OperatorInfo& collective, std::size_t arguments) {
  const auto& names = collective.argument_names;
  const auto found = std::ranges::find(names, "process_group") - names.begin();
  return std::min(static_cast<std::size_t>(found), arguments);
}

std::shared_ptr<const NamedGroup> group_of(const OperatorInfo& collective,
                                           c10::ArrayRef<c10::IValue> arguments) {
  const std::size_t i = index_of_group(collective, arguments.size());
  if (i >= arguments.size()) return nullptr;
  try {
    const auto name = arguments[i].toCustomClass<c10d::ProcessGroup>()->getGroupName();
    NamedGroups& groups = named_groups();
    const std::lock_guard lock(groups.mutex);
    const auto found = groups.by_name.find(name);
    return found == groups.by_name.end() ? nullptr : found->second;
  } catch (const std::exception&) {  // a group made outside torch.distributed has no name
    return nullptr;
  }
}

}  // namespace nanlocator::inline operators_room
