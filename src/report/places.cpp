#include "report/places.hpp"

#include <set>

#include "files/printable.hpp"
#include "nanlocator/report/narrative.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

/// "GPU3" of "cuda:3 GPU-6f2e... 0000:1b:00.0".
std::string gpu_of(const RankCoordinates& coordinates) {
  const std::string& device = coordinates.device;
  return "GPU" + device.substr(5, device.find(' ') - 5);
}

bool is_one_host(const Verdict& verdict) {
  return verdict.layout && verdict.layout->first_rank.world_size <= verdict.layout->ranks_per_host;
}

}  // namespace

bool is_gpu(const RankCoordinates& coordinates) {
  return coordinates.device.starts_with("cuda:");
}

std::string rank_place_of(const RankCoordinates& coordinates) {
  const std::string rank = "rank " + std::to_string(coordinates.rank);
  if (coordinates.host.empty()) return rank;
  if (!is_gpu(coordinates)) return rank + " on " + coordinates.host;
  return rank + " = " + coordinates.host + ":" + gpu_of(coordinates);
}

std::string ranks_place_of(const Verdict& verdict, const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 2;
  if (ranks.size() > kMost) return "ranks " + short_list(ranks);
  std::vector<std::string> places;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    places.push_back(known == nullptr ? "rank " + std::to_string(rank) : rank_place_of(*known));
  }
  return joined(places);
}

std::string on_ranks(const Verdict& verdict, const Origin& origin) {
  const bool is_alone = verdict.layout && verdict.layout->first_rank.world_size == 1;
  if (origin.candidates.empty() || is_alone) return "";
  const bool is_one_of = origin.candidates.size() > 1 && !origin.is_on_every_candidate;
  if (!is_one_of) return " on " + ranks_place_of(verdict, origin.candidates);
  return " on one rank of " + short_list(origin.candidates) + " (which one is not known)";
}

std::vector<std::string> hosts_of(const Verdict& verdict, const std::vector<int>& ranks) {
  std::set<std::string> hosts;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known != nullptr && !known->host.empty()) hosts.insert(known->host);
  }
  return {hosts.begin(), hosts.end()};
}

std::string suspects_text(const Verdict& verdict) {
  const std::vector<int>& ranks = verdict.decision.ranks;
  const auto hosts = hosts_of(verdict, ranks);
  if (hosts.empty()) return ranks_text(ranks);
  if (!is_one_host(verdict) || hosts.size() > 1) return joined(hosts);
  std::set<std::string> devices;
  for (const int rank : ranks) {
    const RankCoordinates* const known = find_mentioned(verdict, rank);
    if (known != nullptr && is_gpu(*known)) devices.insert(gpu_of(*known));
  }
  if (devices.empty()) return joined(hosts);
  return joined({devices.begin(), devices.end()}) + " of " + hosts.front();
}

std::string person_of(Owner owner) {
  switch (owner) {
    case Owner::model_author:
      return "model author";
    case Owner::data:
      return "data owner";
    case Owner::cluster_operator:
      return "cluster on-call";
    case Owner::framework:
      return "framework team";
    case Owner::vendor:
      return "kernel author";
    case Owner::unknown:
      return "model author";
    case Owner::nobody:
      return "nobody";
  }
  return "nobody";
}

}  // namespace nanlocator::inline report_room
