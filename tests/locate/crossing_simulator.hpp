// A pipelined training step in which only one thing is computed: which tokens are NaN on which
// rank, and what of it crosses from rank to rank.
//
// It plants faults, lets them flow through the microbatches of a tp x pp (x chunks) x dp x ep job
// as a transformer's operators do, in a random order that pipeline dependencies allow, and writes
// what an observer of the crossings and of the gradients would have seen. It knows nothing of the
// rules in src/locate: its truth is what it planted.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

struct Layout {
  int tp = 1, pp = 1, dp = 1, ep = 1;
  int chunks = 1;
  int microbatches = 2;
  int layers_per_stage = 2;
  bool has_sequence_parallel = false;
  bool has_experts = false;
  bool has_tied_embeddings = false;

  [[nodiscard]] int world() const { return tp * pp * dp; }
  [[nodiscard]] int stages() const { return pp * chunks; }
  [[nodiscard]] int rank(int tp_rank, int stage, int dp_rank) const {
    return tp_rank + tp * (dp_rank + dp * (stage % pp));
  }
};

enum class Plant {
  operator_forward,   // between the GEMMs of a block, on one tp rank
  operator_backward,  // the same in backward
  transfer_forward,   // what the stage receives from the one before
  transfer_backward,  // what the stage receives from the one after
  sum_forward,        // what one tp rank gets out of the block's reduction
  sum_backward,
  sum_everywhere,  // what every tp rank gets out of it, in forward
  empty_loss,      // 0/0
  gradient,        // one element of a gradient, after backward
  weight,          // before the step
};

constexpr int kEveryMicrobatch = -1;

struct Fault {
  Plant plant = Plant::operator_forward;
  int tp = 0, dp = 0;
  int stage = 0;
  int layer = 0;  // in the stage
  bool is_mlp = false;
  int microbatch = 0;
  bool is_repeated = false;  // in the repeat of the step, too
};

using Tokens = std::uint64_t;

/// One pass over forward and backward.
class Pass {
 public:
  Pass(Layout layout, std::vector<Fault> faults, unsigned seed)
      : layout_(layout), faults_(std::move(faults)) {
    run(seed);
    for (const Fault& fault : faults_) {
      if (fault.plant == Plant::gradient) bad_[rank_of(fault)].insert(gradient_of(fault));
    }
    reduce();
  }

  [[nodiscard]] int rank_of(const Fault& fault) const {
    const int stage = fault.plant == Plant::empty_loss ? layout_.stages() - 1 : fault.stage;
    return layout_.rank(fault.tp, stage, fault.dp);
  }
  [[nodiscard]] std::string module_of(const Fault& fault) const {
    return block_name(fault.stage * layout_.layers_per_stage + fault.layer, fault.is_mlp);
  }
  /// A sharded weight in the middle of a stage: others after it vouch for what flowed past.
  [[nodiscard]] std::string gradient_of(const Fault& fault) const {
    const int layer = fault.stage * layout_.layers_per_stage + layout_.layers_per_stage - 1;
    return block_name(layer, false) + ".linear_proj.weight";
  }
  [[nodiscard]] bool has_bad_loss_or_gradient() const {
    return !losses_.empty() ||
           std::ranges::any_of(bad_, [](const auto& each) { return !each.second.empty(); });
  }
  /// Something bad went to or came from another rank, or into a loss, in forward or backward.
  [[nodiscard]] bool has_crossed(int rank) const {
    const auto found = log_.find(rank);
    const auto is_early = [](const Sighting& each) { return each.phase <= Phase::backward; };
    return losses_.contains(rank) ||
           (found != log_.end() && std::ranges::any_of(found->second, is_early));
  }
  /// Whether the fault did what it was planted for (an expert's may have met no token).
  [[nodiscard]] bool has_struck(const Fault& fault) const {
    return fault.plant == Plant::gradient || fault.plant == Plant::weight ||
           struck_.contains(key_of(fault));
  }
  [[nodiscard]] std::set<std::string> bad_on(int rank) const {
    const auto found = bad_.find(rank);
    return found == bad_.end() ? std::set<std::string>() : found->second;
  }

  [[nodiscard]] std::vector<Ledger> ledgers() const {
    std::vector<Ledger> ledgers;
    for (int rank = 0; rank < layout_.world(); ++rank) {
      Ledger ledger;
      ledger.run_id = "simulated";
      ledger.iteration = 7;
      ledger.level = "boundaries";
      ledger.coordinates = coordinates_of(rank);
      ledger.is_backward_order_observed = true;
      ledger.backward_order = order_of(rank);
      for (const auto& [key, count] : counts_) {
        const auto& [of_rank, group, members, peer, role] = key;
        if (of_rank != rank) continue;
        ledger.crossings.push_back(
            {group, members, peer < 0 ? std::nullopt : std::optional(peer), role, count});
      }
      if (const auto found = log_.find(rank); found != log_.end()) ledger.sightings = found->second;
      if (const auto found = losses_.find(rank); found != losses_.end()) {
        ledger.sightings.insert(ledger.sightings.end(), found->second.begin(), found->second.end());
      }
      std::set<std::string> weights;
      for (const Fault& fault : faults_) {
        if (fault.plant == Plant::weight && rank_of(fault) == rank)
          weights.insert(weight_of(fault));
      }
      add_parameters(ledger, Phase::params_before, weights);
      add_parameters(ledger, Phase::grad_local, bad_on(rank));
      add_parameters(ledger, Phase::grad_reduced, reduced_.at(rank));
      add_parameters(ledger, Phase::grad_norm, read_.at(rank));
      ledgers.push_back(std::move(ledger));
    }
    return ledgers;
  }

  /// What a trace of this pass would tell: each operator's birth, and on other ranks receipts.
  [[nodiscard]] std::vector<Birth> births_on(int rank) const {
    std::vector<Birth> births;
    for (const Fault& fault : faults_) {
      if (rank_of(fault) != rank && fault.plant != Plant::empty_loss) continue;
      if (fault.plant == Plant::empty_loss && (coordinates_of(rank).dp.rank != fault.dp ||
                                               coordinates_of(rank).pp.rank != layout_.pp - 1)) {
        continue;
      }
      for (int microbatch = 0; microbatch < layout_.microbatches; ++microbatch) {
        if (!is_in(fault, microbatch) || !has_struck(fault)) continue;
        Birth birth;
        birth.sighting = sighting_of(Phase::forward, microbatch, fault.stage / layout_.pp, 1);
        birth.sighting.module = module_of(fault);
        birth.sighting.op = "aten::log";
        birth.sighting.role = "output[0]";
        birth.replay = ReplayConclusion::deterministic_undefined;
        birth.reached = {std::string(kOtherRanks)};
        switch (fault.plant) {
          case Plant::operator_forward:
            break;
          case Plant::operator_backward:
            birth.sighting.phase = Phase::backward;
            birth.sighting.op = "aten::div.Tensor";
            birth.reached = {block_name(0, false) + ".linear_qkv.weight"};
            break;
          case Plant::empty_loss:
            birth.sighting.phase = Phase::loss;
            birth.sighting.module.clear();
            birth.sighting.op = "aten::div.Tensor";
            birth.values = {{"self", 0.0}, {"other", 0.0}};
            birth.reached = {"loss"};
            break;
          case Plant::weight:
            birth.kind = BirthKind::weight;
            birth.sighting.role = "weight";
            birth.sighting.parameter = weight_of(fault);
            break;
          default:
            continue;  // not seen by operators
        }
        births.push_back(std::move(birth));
      }
    }
    if (births.empty() && has_crossed(rank)) {
      Birth receipt;
      receipt.kind = BirthKind::collective;
      receipt.sighting = sighting_of(Phase::forward, 0, 0, 1);
      receipt.sighting.op = "aten::add.Tensor";
      receipt.reached = {"loss"};
      births.push_back(std::move(receipt));
    }
    return births;
  }

  [[nodiscard]] std::vector<std::int64_t> bad_ids_on(int rank) const {
    std::vector<std::int64_t> ids;
    for (const ParameterRecord& each : order_of(rank)) {
      if (bad_on(rank).contains(each.name)) ids.push_back(each.id);
    }
    std::ranges::sort(ids);
    return ids;
  }

 private:
  using Grid = std::vector<std::vector<Tokens>>;  // [dp][tp]
  using Key = std::tuple<int, int, int, int, int, bool>;

  static Key key_of(const Fault& fault) {
    return {
        static_cast<int>(fault.plant), fault.tp, fault.dp, fault.stage, fault.layer, fault.is_mlp};
  }
  [[nodiscard]] static bool is_in(const Fault& fault, int microbatch) {
    return fault.microbatch == kEveryMicrobatch || fault.microbatch == microbatch;
  }
  [[nodiscard]] static std::string block_name(int layer, bool is_mlp) {
    return "decoder.layers." + std::to_string(layer) + (is_mlp ? ".mlp" : ".self_attention");
  }
  [[nodiscard]] std::string weight_of(const Fault& fault) const {
    return module_of(fault) + (fault.is_mlp ? ".linear_fc1.weight" : ".linear_qkv.weight");
  }
  [[nodiscard]] Grid grid() const {
    return Grid(static_cast<std::size_t>(layout_.dp), std::vector<Tokens>(layout_.tp));
  }

  // ---- tokens: number dp * tp + shard ----

  [[nodiscard]] Tokens token(int dp, int shard) const {
    return Tokens{1} << (dp * layout_.tp + shard);
  }
  [[nodiscard]] Tokens held_by(int dp, int tp) const {
    if (layout_.has_sequence_parallel) return token(dp, tp);
    Tokens all = 0;
    for (int shard = 0; shard < layout_.tp; ++shard) all |= token(dp, shard);
    return all;
  }
  [[nodiscard]] Tokens of_lane(int dp) const {
    Tokens all = 0;
    for (int shard = 0; shard < layout_.tp; ++shard) all |= token(dp, shard);
    return all;
  }

  // ---- what the observer writes ----

  Sighting sighting_of(Phase phase, int microbatch, int chunk, int nan) const {
    Sighting sighting;
    sighting.iteration = 7;
    sighting.microbatch = microbatch;
    sighting.chunk = chunk;
    sighting.phase = phase;
    sighting.dtype = "float32";
    sighting.shape = {64, 128};
    sighting.stats.numel = 8192;
    sighting.stats.nan = nan;
    sighting.stats.first_bad = 3;
    sighting.stats.absmax = 0.5;
    return sighting;
  }

  struct Where {
    Phase phase = Phase::forward;
    int microbatch = 0;
    int stage = 0;
    std::string module;
  };

  void write(int rank, const Where& where, const std::string& op, std::string_view role,
             const Crossing& crossing, Tokens bad) {
    if (bad == 0) return;
    Sighting sighting =
        sighting_of(where.phase, where.microbatch, where.stage / layout_.pp, std::popcount(bad));
    if (where.phase == Phase::grad_reduced) {
      sighting.microbatch.reset();
      sighting.chunk.reset();
    }
    sighting.module = where.module;
    sighting.op = op;
    sighting.role = role;
    sighting.crossing = crossing;
    log_[rank].push_back(std::move(sighting));
  }

  /// `values` by member: what it puts in; changed to what it gets out.
  template <typename Result>
  void collective(const std::string& group, const std::vector<int>& members, const std::string& op,
                  const Where& where, std::map<int, Tokens>& values, Result result) {
    if (members.size() < 2) {
      for (auto& [rank, tokens] : values) tokens = result(rank, values);
      return;
    }
    const Crossing crossing{group, members, std::nullopt, sequences_[{group, members}]++};
    for (const int rank : members) {
      ++counts_[{rank, group, members, -1, std::string(kSent)}];
      write(rank, where, op, kSent, crossing, values[rank]);
    }
    const std::map<int, Tokens> put_in = values;
    for (const int rank : members) {
      values[rank] = result(rank, put_in);
      write(rank, where, op, kReceived, crossing, values[rank]);
    }
  }

  template <typename Result>
  void over_tp(Grid& grid_now, const std::string& op, const Where& where, Result result) {
    for (int dp = 0; dp < layout_.dp; ++dp) {
      std::vector<int> members;
      std::map<int, Tokens> values;
      for (int tp = 0; tp < layout_.tp; ++tp) {
        members.push_back(layout_.rank(tp, where.stage, dp));
        values[members.back()] = grid_now[dp][tp];
      }
      collective("tp", members, op, where, values, [&](int rank, const std::map<int, Tokens>& in) {
        return result(dp, rank % layout_.tp, any_of(in));
      });
      for (int tp = 0; tp < layout_.tp; ++tp) grid_now[dp][tp] = values[members[tp]];
    }
  }
  static Tokens any_of(const std::map<int, Tokens>& parts) {
    Tokens all = 0;
    for (const auto& [rank, tokens] : parts) all |= tokens;
    return all;
  }

  /// Into the tensor-parallel region: all-gathered where tokens are dealt out.
  void gather(Grid& hidden, const Where& where) {
    if (!layout_.has_sequence_parallel) return;
    over_tp(hidden, "all_gather", where, [](int, int, Tokens all) { return all; });
  }
  /// Out of it: the sum, or each rank's tokens of it.
  void reduce_region(Grid& region, const Where& where, Plant plant, int layer, bool is_mlp) {
    over_tp(region, layout_.has_sequence_parallel ? "reduce_scatter" : "all_reduce", where,
            [&](int dp, int tp, Tokens all) {
              Tokens out = all & held_by(dp, tp);
              for (const Fault& fault : faults_) {
                const bool is_here = fault.plant == plant ? fault.tp == tp
                                                          : fault.plant == Plant::sum_everywhere &&
                                                                plant == Plant::sum_forward;
                if (is_here && layout_.tp > 1 && is_at(fault, where, dp, layer, is_mlp)) {
                  out |= first_of(held_by(dp, tp));
                  struck_.insert(key_of(fault));
                }
              }
              return out;
            });
  }
  [[nodiscard]] static Tokens first_of(Tokens tokens) { return tokens & (~tokens + 1); }

  [[nodiscard]] static bool is_at(const Fault& fault, const Where& where, int dp, int layer,
                                  bool is_mlp) {
    return fault.dp == dp && fault.stage == where.stage && fault.layer == layer &&
           fault.is_mlp == is_mlp && is_in(fault, where.microbatch);
  }

  void strike(Grid& region, Plant plant, const Where& where, int layer, bool is_mlp,
              const Grid* routed = nullptr) {
    for (const Fault& fault : faults_) {
      const bool is_weight = fault.plant == Plant::weight && plant == Plant::operator_forward;
      if (fault.plant != plant && !is_weight) continue;
      if (!is_at(fault, where, fault.dp, layer, is_mlp)) continue;
      const Tokens here = routed != nullptr ? (*routed)[fault.dp][fault.tp] : of_lane(fault.dp);
      if (here == 0) continue;
      region[fault.dp][fault.tp] |= is_weight ? here : first_of(here);
      struck_.insert(key_of(fault));
    }
  }

  // ---- experts: token t of an ep group belongs to lane t mod ep ----

  [[nodiscard]] int owner_of(int number, int dp) const {
    return dp / layout_.ep * layout_.ep + (number * 5 + 1) % layout_.ep;
  }
  /// What a lane's experts work on.
  [[nodiscard]] Grid routed() const {
    Grid out = grid();
    for (int dp = 0; dp < layout_.dp; ++dp) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        for (int shard = 0; shard < layout_.tp; ++shard) {
          if ((held_by(dp, tp) & token(dp, shard)) == 0) continue;
          out[owner_of(dp * layout_.tp + shard, dp)][tp] |= token(dp, shard);
        }
      }
    }
    return out;
  }
  void all_to_all(Grid& values_now, const Where& where, bool is_dispatch) {
    const Grid to = routed();
    for (int first = 0; first < layout_.dp; first += layout_.ep) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        std::vector<int> members;
        std::map<int, Tokens> values;
        for (int dp = first; dp < first + layout_.ep; ++dp) {
          members.push_back(layout_.rank(tp, where.stage, dp));
          values[members.back()] = values_now[dp][tp];
        }
        collective("ep", members, "all_to_all", where, values,
                   [&](int rank, const std::map<int, Tokens>& in) {
                     const int dp = rank / layout_.tp % layout_.dp;
                     return any_of(in) & (is_dispatch ? to[dp][tp] : held_by(dp, tp));
                   });
        for (int dp = first; dp < first + layout_.ep; ++dp) {
          values_now[dp][tp] = values[members[dp - first]];
        }
      }
    }
  }

  // ---- messages ----

  struct Message {
    std::int64_t sequence = 0;
    Tokens tokens = 0;
  };
  void send(const Where& where, int to_stage, const Grid& values) {
    each_rank([&](int dp, int tp) {
      const int from = layout_.rank(tp, where.stage, dp), to = layout_.rank(tp, to_stage, dp);
      const std::vector<int> members = pipeline_of(dp, tp);
      auto& count = counts_[{from, "pp", members, to, std::string(kSent)}];
      const Crossing crossing{"pp", members, to, count++};
      write(from, where, "send", kSent, crossing, values[dp][tp]);
      messages_[{from, to, where.phase, to_stage, where.microbatch}] = {crossing.sequence,
                                                                        values[dp][tp]};
    });
  }
  void receive(const Where& where, int from_stage, Grid& values, Plant plant) {
    each_rank([&](int dp, int tp) {
      const int from = layout_.rank(tp, from_stage, dp), to = layout_.rank(tp, where.stage, dp);
      const std::vector<int> members = pipeline_of(dp, tp);
      Message message = messages_.at({from, to, where.phase, where.stage, where.microbatch});
      for (const Fault& fault : faults_) {
        if (fault.plant != plant || fault.tp != tp || fault.dp != dp ||
            fault.stage != where.stage || !is_in(fault, where.microbatch)) {
          continue;
        }
        message.tokens |= first_of(held_by(dp, tp));
        struck_.insert(key_of(fault));
      }
      ++counts_[{to, "pp", members, from, std::string(kReceived)}];
      write(to, where, "recv", kReceived, {"pp", members, from, message.sequence}, message.tokens);
      values[dp][tp] = message.tokens;
    });
  }
  template <typename Do>
  void each_rank(Do act) {
    for (int dp = 0; dp < layout_.dp; ++dp) {
      for (int tp = 0; tp < layout_.tp; ++tp) act(dp, tp);
    }
  }
  [[nodiscard]] std::vector<int> pipeline_of(int dp, int tp) const {
    std::vector<int> members;
    for (int stage = 0; stage < layout_.pp; ++stage) members.push_back(layout_.rank(tp, stage, dp));
    return members;
  }

  // ---- the pass ----

  struct Saved {
    Grid hidden, input, region;
  };

  /// Any order that the pipeline's dependencies allow; the same on all ranks of a stage.
  void run(unsigned seed) {
    std::mt19937 random(seed);
    const int last = layout_.stages() - 1;
    std::vector<int> forward_done(layout_.stages()), backward_done(layout_.stages());
    for (;;) {
      std::vector<std::pair<bool, int>> ready;  // (is backward, stage)
      for (int stage = 0; stage <= last; ++stage) {
        const int next = forward_done[stage], back = backward_done[stage];
        if (next < layout_.microbatches && (stage == 0 || forward_done[stage - 1] > next)) {
          ready.emplace_back(false, stage);
        }
        if (back < layout_.microbatches &&
            (stage == last ? forward_done[last] : backward_done[stage + 1]) > back) {
          ready.emplace_back(true, stage);
        }
      }
      if (ready.empty()) return;
      const auto [is_backward, stage] = ready[random() % ready.size()];
      if (is_backward) {
        backward(stage, backward_done[stage]++);
      } else {
        forward(stage, forward_done[stage]++);
      }
    }
  }

  static void add(Grid& to, const Grid& from) {
    for (std::size_t dp = 0; dp < to.size(); ++dp) {
      for (std::size_t tp = 0; tp < to[dp].size(); ++tp) to[dp][tp] |= from[dp][tp];
    }
  }

  void forward(int stage, int microbatch) {
    Grid hidden = grid();
    Where where{Phase::forward, microbatch, stage, ""};
    if (stage > 0) receive(where, stage - 1, hidden, Plant::transfer_forward);
    for (int layer = 0; layer < layout_.layers_per_stage; ++layer) {
      for (const bool is_mlp : {false, true}) {
        where.module = block_name(stage * layout_.layers_per_stage + layer, is_mlp);
        Saved& saved = saved_[{stage, microbatch, layer, is_mlp}];
        saved.hidden = hidden;
        const bool is_moe = is_mlp && layout_.has_experts;
        Grid region = hidden;
        if (is_moe) {
          all_to_all(region, where, true);
        } else {
          gather(region, where);
        }
        saved.input = region;
        const Grid experts = routed();
        strike(region, Plant::operator_forward, where, layer, is_mlp, is_moe ? &experts : nullptr);
        saved.region = region;
        if (is_moe) {
          all_to_all(region, where, false);
        } else {
          reduce_region(region, where, Plant::sum_forward, layer, is_mlp);
        }
        add(hidden, region);
      }
    }
    where.module.clear();
    if (stage < layout_.stages() - 1) {
      send(where, stage + 1, hidden);
    } else {
      where.phase = Phase::loss;
      compute_loss(hidden, where);
    }
  }

  void compute_loss(Grid logits, const Where& where) {
    gather(logits, where);
    over_tp(logits, "all_reduce", where, [](int, int, Tokens all) { return all; });
    each_rank([&](int dp, int tp) {
      bool is_bad = logits[dp][tp] != 0, is_empty = false;
      for (const Fault& fault : faults_) {
        if (fault.plant != Plant::empty_loss || fault.dp != dp) continue;
        if (!is_in(fault, where.microbatch)) continue;
        struck_.insert(key_of(fault));
        is_bad = is_empty = true;
      }
      bad_loss_[{where.microbatch, dp, tp}] = is_bad;
      if (!is_bad) return;
      Sighting loss = sighting_of(Phase::loss, where.microbatch, where.stage / layout_.pp, 1);
      loss.shape = {};
      loss.stats.numel = 1;
      loss.stats.first_bad = 0;
      loss.role = "loss";
      loss.valid_labels = is_empty ? 0 : 512;
      losses_[layout_.rank(tp, where.stage, dp)].push_back(std::move(loss));
    });
  }

  void spoil(const Where& where, int dp, int tp, const std::string& name, bool is_bad) {
    if (is_bad) bad_[layout_.rank(tp, where.stage, dp)].insert(name);
  }

  void backward(int stage, int microbatch) {
    Grid gradient = grid();
    Where where{Phase::backward, microbatch, stage, ""};
    if (stage < layout_.stages() - 1) {
      receive(where, stage + 1, gradient, Plant::transfer_backward);
    } else {
      each_rank([&](int dp, int tp) {
        const bool is_bad = bad_loss_.at({microbatch, dp, tp});
        spoil(where, dp, tp, "output_layer.weight", is_bad);
        if (is_bad) gradient[dp][tp] = held_by(dp, tp);
      });
    }
    for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
      for (const bool is_mlp : {true, false}) backward_block(gradient, where, layer, is_mlp);
    }
    where.module.clear();
    if (stage > 0) {
      send(where, stage - 1, gradient);
    } else {
      each_rank([&](int dp, int tp) {
        spoil(where, dp, tp, "embedding.word_embeddings.weight", gradient[dp][tp] != 0);
      });
    }
  }

  void backward_block(Grid& gradient, Where& where, int layer, bool is_mlp) {
    const int number = where.stage * layout_.layers_per_stage + layer;
    where.module = block_name(number, is_mlp);
    const Saved& saved = saved_.at({where.stage, where.microbatch, layer, is_mlp});
    const bool is_moe = is_mlp && layout_.has_experts;
    Grid region = gradient;
    if (is_moe) {
      all_to_all(region, where, true);
    } else {
      gather(region, where);
    }
    const std::string row = is_moe   ? ".experts.linear_fc2"
                            : is_mlp ? ".linear_fc2"
                                     : ".linear_proj";
    const std::string column = is_moe   ? ".experts.linear_fc1"
                               : is_mlp ? ".linear_fc1"
                                        : ".linear_qkv";
    each_rank([&](int dp, int tp) {
      spoil(where, dp, tp, where.module + row + ".weight",
            (region[dp][tp] | saved.region[dp][tp]) != 0);
    });
    add(region, saved.region);
    const Grid experts = routed();
    strike(region, Plant::operator_backward, where, layer, is_mlp, is_moe ? &experts : nullptr);
    each_rank([&](int dp, int tp) {
      spoil(where, dp, tp, where.module + column + ".weight",
            (region[dp][tp] | saved.input[dp][tp]) != 0);
    });
    if (is_moe) {
      all_to_all(region, where, false);
    } else {
      reduce_region(region, where, Plant::sum_backward, layer, is_mlp);
    }
    each_rank([&](int dp, int tp) {
      spoil(where, dp, tp, norm_of(number, is_mlp), (region[dp][tp] | saved.hidden[dp][tp]) != 0);
    });
    add(gradient, region);
    add(gradient, saved.hidden);
  }
  [[nodiscard]] static std::string norm_of(int layer, bool is_mlp) {
    return "decoder.layers." + std::to_string(layer) +
           (is_mlp ? ".pre_mlp_layernorm.weight" : ".input_layernorm.weight");
  }

  // ---- parameters ----

  [[nodiscard]] std::vector<ParameterRecord> order_of(int rank) const {
    std::vector<ParameterRecord> order;
    const int pp = coordinates_of(rank).pp.rank;
    const auto put = [&](int stage, const std::string& name, bool is_duplicate, bool is_touched,
                         bool is_tied) {
      order.push_back({static_cast<std::int64_t>(order.size()),
                       name,
                       {8, 8},
                       !is_touched,
                       is_duplicate,
                       is_tied,
                       stage / layout_.pp});
    };
    for (int stage = layout_.stages() - 1; stage >= 0; --stage) {
      if (stage % layout_.pp != pp) continue;
      const bool is_last = stage == layout_.stages() - 1;
      if (is_last) put(stage, "output_layer.weight", false, true, layout_.has_tied_embeddings);
      for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
        const int number = stage * layout_.layers_per_stage + layer;
        const bool is_moe = layout_.has_experts;
        const std::string experts = is_moe ? ".experts" : "";
        put(stage, block_name(number, true) + experts + ".linear_fc2.weight", false, !is_moe,
            false);
        put(stage, block_name(number, true) + experts + ".linear_fc1.weight", false, !is_moe,
            false);
        put(stage, norm_of(number, true), true, true, false);
        put(stage, block_name(number, false) + ".linear_proj.weight", false, true, false);
        put(stage, block_name(number, false) + ".linear_qkv.weight", false, true, false);
        put(stage, norm_of(number, false), true, true, false);
      }
      if (stage == 0) {
        put(stage, "embedding.word_embeddings.weight", false, false, layout_.has_tied_embeddings);
      }
    }
    return order;
  }

  /// Summed over dp, then the tied embeddings over the pipeline's ends.
  void reduce() {
    for (int rank = 0; rank < layout_.world(); ++rank) {
      const RankCoordinates at = coordinates_of(rank);
      auto& reduced = reduced_[rank];
      for (int dp = 0; dp < layout_.dp; ++dp) {
        reduced.merge(bad_on(layout_.rank(at.tp.rank, at.pp.rank, dp)));
      }
    }
    read_ = reduced_;
    if (!layout_.has_tied_embeddings || layout_.pp == 1) return;
    each_rank([&](int dp, int tp) {
      const int first = layout_.rank(tp, 0, dp), last = layout_.rank(tp, layout_.pp - 1, dp);
      std::map<int, Tokens> values = {
          {first, reduced_[first].contains("embedding.word_embeddings.weight") ? 1 : 0},
          {last, reduced_[last].contains("output_layer.weight") ? 1 : 0}};
      collective("embd", {first, last}, "all_reduce", {Phase::grad_reduced, 0, 0, ""}, values,
                 [](int, const std::map<int, Tokens>& in) { return any_of(in); });
      if (values[first] != 0) {
        read_[first].insert("embedding.word_embeddings.weight");
        read_[last].insert("output_layer.weight");
      }
    });
  }

  static void add_parameters(Ledger& ledger, Phase phase, const std::set<std::string>& bad) {
    Coverage coverage{phase, {}};
    for (const ParameterRecord& parameter : ledger.backward_order) {
      coverage.parameters.push_back(parameter.id);
      if (!bad.contains(parameter.name)) continue;
      Sighting sighting;
      sighting.iteration = 7;
      sighting.phase = phase;
      sighting.role = "main_grad";
      sighting.parameter_id = parameter.id;
      sighting.parameter = parameter.name;
      sighting.dtype = "float32";
      sighting.shape = parameter.shape;
      sighting.stats.numel = 64;
      sighting.stats.nan = 1;
      sighting.stats.first_bad = 5;
      ledger.sightings.push_back(std::move(sighting));
    }
    ledger.coverage.push_back(std::move(coverage));
  }

  [[nodiscard]] RankCoordinates coordinates_of(int rank) const {
    RankCoordinates at;
    at.rank = rank;
    at.world_size = layout_.world();
    at.tp = {rank % layout_.tp, layout_.tp};
    at.dp = {rank / layout_.tp % layout_.dp, layout_.dp};
    at.pp = {rank / (layout_.tp * layout_.dp), layout_.pp};
    at.ep = {at.dp.rank % layout_.ep, layout_.ep};
    at.host = "host" + std::to_string(rank / 8);
    at.device = "cpu";
    return at;
  }

  Layout layout_;
  std::vector<Fault> faults_;
  std::map<std::tuple<int, int, int, bool>, Saved> saved_;  // stage, microbatch, layer, is mlp
  std::map<std::tuple<int, int, int>, bool> bad_loss_;      // microbatch, dp, tp
  std::map<std::tuple<int, int, Phase, int, int>, Message> messages_;
  std::map<std::pair<std::string, std::vector<int>>, std::int64_t> sequences_;
  std::map<std::tuple<int, std::string, std::vector<int>, int, std::string>, std::int64_t> counts_;
  std::map<int, std::vector<Sighting>> log_;
  std::map<int, std::vector<Sighting>> losses_;
  std::map<int, std::set<std::string>> bad_, reduced_, read_;
  std::set<Key> struck_;
};

/// The ledgers of a step that was repeated with its operators traced: only repeated faults are in
/// the second pass.
inline std::vector<Ledger> ledgers_with_repeat(const Layout& layout,
                                               const std::vector<Fault>& faults, unsigned seed) {
  std::vector<Ledger> ledgers = Pass(layout, faults, seed).ledgers();
  std::vector<Fault> repeated = faults;
  std::erase_if(repeated, [](const Fault& fault) { return !fault.is_repeated; });
  const Pass repeat(layout, repeated, seed);
  for (Ledger& ledger : ledgers) {
    const int rank = ledger.coordinates.rank;
    ledger.births = repeat.births_on(rank);
    Rerun rerun;
    rerun.reproduced = repeat.has_bad_loss_or_gradient();
    rerun.bad_parameters = repeat.bad_ids_on(rank);
    rerun.gradients = 4;
    ledger.rerun = std::move(rerun);
  }
  return ledgers;
}

}  // namespace nanlocator::pipeline
