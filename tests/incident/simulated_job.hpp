// A job with simulated training: its layout, its ranks' coordinates, and its ledgers. Both
// simulators use it, so that a layout means the same in both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "nanlocator/record/ledger.hpp"

namespace nanlocator::simulator {

/// Megatron's numbering of ranks: tp fastest, then cp, dp, pp. A lane is one (dp, cp) rank; a stage
/// is one (chunk, pp), in the order of forward.
struct Layout {
  int tp = 1, pp = 1, dp = 1, cp = 1, ep = 1;
  int chunks = 1;
  int microbatches = 2;
  int layers_per_stage = 2;
  bool has_sequence_parallel = false;
  bool has_tied_embeddings = false;
  bool has_experts = false;
  bool has_biases = false;
  bool has_distributed_optimizer = false;
  bool is_order_observed = true;
  bool has_fused_attention = false;  // which leaves masked tokens out
  /// Every word of the data is in the first tp rank's part of the vocabulary.
  bool has_words_on_first_rank_only = false;

  [[nodiscard]] int world() const { return tp * pp * dp * cp; }
  [[nodiscard]] int lanes() const { return dp * cp; }
  [[nodiscard]] int stages() const { return pp * chunks; }
  [[nodiscard]] int layers() const { return stages() * layers_per_stage; }
  /// True if input and output embedding are one parameter, not two synchronised copies.
  [[nodiscard]] bool has_one_embedding() const { return has_tied_embeddings && pp == 1; }
  [[nodiscard]] int rank(int tp_rank, int stage, int dp_rank, int cp_rank = 0) const {
    return tp_rank + tp * (cp_rank + cp * (dp_rank + dp * (stage % pp)));
  }
  [[nodiscard]] int rank_at(int lane, int tp_rank, int stage) const {
    return rank(tp_rank, stage, lane / cp, lane % cp);
  }
  [[nodiscard]] RankCoordinates coordinates_of(int rank_number) const {
    RankCoordinates at;
    at.rank = rank_number;
    at.world_size = world();
    at.tp = {rank_number % tp, tp};
    at.cp = {rank_number / tp % cp, cp};
    at.dp = {rank_number / (tp * cp) % dp, dp};
    at.pp = {rank_number / (tp * cp * dp), pp};
    at.ep = {(at.dp.rank * cp + at.cp.rank) % ep, ep};
    at.host = "host" + std::to_string(rank_number / 8);
    at.local_rank = rank_number % 8;
    at.device = "cpu";
    return at;
  }
  /// The ranks that exchange data with `lane` before the data-parallel collective, ascending.
  [[nodiscard]] std::vector<int> replica_of(int lane) const {
    std::vector<int> ranks;
    const int lanes_together = std::max(ep, cp);
    const int first = lane / lanes_together * lanes_together;
    for (int other = first; other < first + lanes_together; ++other) {
      for (int pp_rank = 0; pp_rank < pp; ++pp_rank) {
        for (int tp_rank = 0; tp_rank < tp; ++tp_rank) {
          ranks.push_back(rank_at(other, tp_rank, pp_rank));
        }
      }
    }
    std::ranges::sort(ranks);
    return ranks;
  }
  [[nodiscard]] std::string describe() const {
    const auto text = [](const char* name, int value) {
      return name + std::to_string(value) + " ";
    };
    return text("tp", tp) + text("pp", pp) + text("dp", dp) + text("cp", cp) + text("ep", ep) +
           text("chunks ", chunks) + text("microbatches ", microbatches) +
           text("layers ", layers_per_stage) + text("sp ", has_sequence_parallel) +
           text("tied ", has_tied_embeddings) + text("moe ", has_experts) +
           text("biases ", has_biases) + text("sharded ", has_distributed_optimizer) +
           text("observed ", is_order_observed);
  }
};

/// A small layout with any of the features.
inline Layout random_layout(std::mt19937& random) {
  const auto choose = [&](int count) { return static_cast<int>(random() % count); };
  Layout layout{.tp = 1 << choose(3), .pp = 1 + choose(3), .dp = 1 << choose(3)};
  layout.cp = 1 << (choose(3) == 0 ? 1 : 0);
  layout.chunks = layout.pp > 1 ? 1 + choose(2) : 1;
  layout.microbatches = 1 + choose(3);
  layout.layers_per_stage = 1 + choose(3);
  layout.has_sequence_parallel = layout.tp > 1 && choose(2) == 0;
  layout.has_tied_embeddings = choose(2) == 0;
  layout.has_biases = choose(2) == 0;
  layout.has_distributed_optimizer = choose(2) == 0;
  layout.is_order_observed = choose(3) != 0;
  layout.has_fused_attention = choose(2) == 0;
  layout.has_experts = choose(3) == 0;
  layout.ep = layout.has_experts && layout.lanes() % 2 == 0 && choose(2) == 0 ? 2 : 1;
  return layout;
}

/// The bad part of a parameter: one element, or all of it if empty.
using Extent = std::optional<std::int64_t>;
using BadParameters = std::map<std::string, Extent>;

inline void add_bad(BadParameters& bad, const std::string& name, Extent extent) {
  const auto [entry, is_new] = bad.try_emplace(name, extent);
  if (!is_new && entry->second != extent) entry->second.reset();
}

using BadByRank = std::map<int, BadParameters>;

/// The rank's value in `by_rank`, or an empty one.
template <typename Value>
[[nodiscard]] const Value& found_or_empty(const std::map<int, Value>& by_rank, int rank) {
  static const Value kNone{};
  const auto found = by_rank.find(rank);
  return found == by_rank.end() ? kNone : found->second;
}

/// The shard of a parameter that a distributed optimizer gives to rank `number` of `ranks`.
[[nodiscard]] inline ElementRange shard_of(std::int64_t numel, int number, int ranks) {
  return {number * numel / ranks, (number + 1) * numel / ranks};
}

inline Ledger make_ledger(const Layout& layout, int rank) {
  Ledger ledger;
  ledger.run_id = "simulated";
  ledger.iteration = 7;
  ledger.coordinates = layout.coordinates_of(rank);
  ledger.is_backward_order_observed = layout.is_order_observed;
  return ledger;
}

inline std::int64_t numel_of(const ParameterRecord& parameter) {
  std::int64_t numel = 1;
  for (const std::int64_t size : parameter.shape) numel *= size;
  return numel;
}

/// Adds the phase's coverage, and a sighting for each parameter that is bad in the part that this
/// rank scans: after the reduction, with a distributed optimizer, only its own shard.
inline void add_phase(Ledger& ledger, Phase phase, const BadParameters& bad) {
  Coverage coverage{phase, {}};
  for (const ParameterRecord& parameter : ledger.backward_order) {
    coverage.parameters.push_back(parameter.id);
    const auto found = bad.find(parameter.name);
    if (found == bad.end()) continue;
    const bool is_sharded = phase == Phase::grad_reduced || phase == Phase::grad_norm;
    ElementRange seen{0, numel_of(parameter)};
    if (is_sharded && parameter.shard) seen = *parameter.shard;
    const Extent element = found->second;
    if (element && (*element < seen.begin || *element >= seen.end)) continue;
    Sighting sighting;
    sighting.iteration = ledger.iteration;
    sighting.phase = phase;
    sighting.role =
        phase == Phase::params_before || phase == Phase::params_after ? "weight" : "main_grad";
    sighting.parameter_id = parameter.id;
    sighting.parameter = parameter.name;
    sighting.dtype = "float32";
    sighting.shape = parameter.shape;
    sighting.chunk = parameter.chunk;
    sighting.stats.numel = seen.end - seen.begin;
    sighting.stats.nan = element ? 1 : sighting.stats.numel;
    sighting.stats.first_bad = element.value_or(seen.begin);
    sighting.stats.absmax = 0.5;
    ledger.sightings.push_back(std::move(sighting));
  }
  std::ranges::sort(coverage.parameters);
  ledger.coverage.push_back(std::move(coverage));
}

}  // namespace nanlocator::simulator
