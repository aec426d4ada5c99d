// Ranks, hosts and people as the block names them.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

[[nodiscard]] bool is_gpu(const RankCoordinates& coordinates);
/// "rank 3 = a17:GPU3"; "rank 3 on a17" without a GPU.
[[nodiscard]] std::string rank_place_of(const RankCoordinates& coordinates);
/// "rank 3 = a17:GPU3 and rank 11 = a18:GPU3", or "ranks 0-3".
[[nodiscard]] std::string ranks_place_of(const Verdict& verdict, const std::vector<int>& ranks);
/// " on rank 3 = a17:GPU3", " on one of 4 ranks: 0-3"; "" if there is only one.
[[nodiscard]] std::string on_ranks(const Verdict& verdict, const Origin& origin);
/// The hosts of these ranks, each once.
[[nodiscard]] std::vector<std::string> hosts_of(const Verdict& verdict,
                                                const std::vector<int>& ranks);
/// Of the decision: "a17 and a18"; on a job of one host its devices: "GPU3 of a17"; else the ranks.
[[nodiscard]] std::string suspects_text(const Verdict& verdict);
/// One rotation each: "model author", "nobody".
[[nodiscard]] std::string person_of(Owner owner);

}  // namespace nanlocator::inline report_room
