#include "locate/machine_check.hpp"

#include <algorithm>
#include <set>

namespace nanlocator {
namespace {

constexpr const char* kPort = "29400";  // torchrun's own choice

bool may_be_the_machine(Cause cause) {
  return cause == Cause::collective_result || cause == Cause::memory_corruption ||
         cause == Cause::not_reproduced;
}

/// Silent ranks are not listed, so that a host has as many as its last one's number says.
int ranks_per_host(const std::vector<RankCoordinates>& ranks) {
  int last = 0;
  for (const auto& rank : ranks) last = std::max(last, rank.local_rank);
  return last + 1;
}

std::string layout_options(const RankCoordinates& rank) {
  std::string text;
  const auto add = [&](const char* option, int size) {
    if (size > 1) text += std::string(" --") + option + " " + std::to_string(size);
  };
  add("tp", rank.tp.size);
  add("pp", rank.pp.size);
  add("cp", rank.cp.size);
  add("ep", rank.ep.size);
  return text;
}

}  // namespace

std::string machine_check_command(const std::vector<RankCoordinates>& ranks) {
  if (ranks.empty() || ranks.front().world_size < 2) return "";
  const auto& first = *std::ranges::min_element(ranks, {}, &RankCoordinates::rank);
  const int per_host = ranks_per_host(ranks);
  const int hosts = (first.world_size + per_host - 1) / per_host;
  std::string command = "nanlocator netcheck --nproc-per-node " + std::to_string(per_host);
  if (hosts > 1) {
    command += " --nnodes " + std::to_string(hosts) + " --rdzv-backend c10d --rdzv-endpoint " +
               (first.host.empty() ? "HOST" : first.host) + ":" + kPort;
  }
  return command + layout_options(first);
}

void add_machine_check(const Incident& incident, std::vector<Origin>& origins) {
  if (std::ranges::none_of(origins, may_be_the_machine, &Origin::cause)) return;
  std::vector<RankCoordinates> ranks;
  for (const auto& rank : incident.ranks()) ranks.push_back(rank.ledger().coordinates);
  const auto command = machine_check_command(ranks);
  if (command.empty()) return;
  const bool is_on_one_host = command.find(" --nnodes ") == std::string::npos;
  for (auto& origin : origins) {
    if (!may_be_the_machine(origin.cause)) continue;
    origin.action +=
        is_on_one_host ? "; check the machine: " : "; check the machines, on each host: ";
    origin.action += command;
  }
}

}  // namespace nanlocator
