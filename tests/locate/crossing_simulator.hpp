// A pipelined training step in which only one thing is computed: which tokens are NaN on which
// rank, and what of it crosses from rank to rank.
//
// It plants faults, lets them flow through the microbatches of a tp x pp (x chunks) x dp x ep job
// as a transformer's operators do, in a random order that pipeline dependencies allow, and writes
// what an observer of the crossings and of the gradients would have seen. It knows nothing of the
// rules in src/locate: its truth is what it planted. tests/locate/recorded holds it to what
// Megatron-Core's own steps left in their ledgers.
//
// Until the data-parallel reduction a replica computes alone, so that only replicas with a fault
// are simulated, and one more: what the others looked at, and found finite, is a copy of its.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/simulated_job.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::pipeline {

using simulator::add_bad;
using simulator::BadParameters;
using simulator::Extent;
using simulator::Layout;

enum class Plant {
  operator_forward,   // between the GEMMs of a block, on one tp rank
  operator_backward,  // the same in backward
  transfer_forward,   // what the stage receives from the one before
  transfer_backward,  // what the stage receives from the one after
  sum_forward,        // what one tp rank gets out of the block's reduction
  sum_backward,
  sum_everywhere,      // what every tp rank gets out of it, in forward
  empty_loss,          // 0/0
  gradient,            // one element of a gradient, after backward
  weight,              // before the step
  reduced,             // one rank's result of the data-parallel reduction
  reduced_everywhere,  // every member's result
  norm_gradient,       // one element where the optimizer reads it
  update,              // one element of a parameter that the optimizer has updated
  norm_value,          // the sum of squares of finite gradients, the largest of which is here
};

constexpr int kEveryMicrobatch = -1;

/// What a trace of the fault's operator would write.
struct TracedBirth {
  BirthKind kind = BirthKind::nan;
  ReplayConclusion replay = ReplayConclusion::deterministic_undefined;
  bool is_of_recomputation = false;   // a forward that runs again in backward
  bool is_of_auxiliary_loss = false;  // a forward on which gradients depend, and no output
};

struct Fault {
  Plant plant = Plant::operator_forward;
  int tp = 0, dp = 0;
  int stage = 0;
  int layer = 0;  // in the stage
  bool is_mlp = false;
  int microbatch = 0;
  bool is_repeated = false;          // in the repeat of the step, too
  int token = 0;                     // which of the tokens that are there
  bool is_overflow = false;          // of a sum: Inf, beside numbers close to the dtype's largest
  bool is_on_every_replica = false;  // of a weight: a checkpoint's, or an all-gather's
  bool is_climb = false;  // of the norm: the largest gradient climbed over the steps before
  TracedBirth birth;
};

using Tokens = std::uint64_t;

/// One pass over forward and backward, and the step to its end.
class Pass {
 public:
  Pass(Layout layout, std::vector<Fault> faults, unsigned seed)
      : layout_(layout), faults_(std::move(faults)) {
    if (layout_.tp * layout_.ep > 64) throw std::invalid_argument("a replica has 64 tokens");
    lay_out_parameters();
    std::set<int> replicas = {0};
    for (const Fault& fault : faults_) {
      if (fault.plant > Plant::weight || fault.plant == Plant::gradient) continue;
      for (int dp = 0; dp < layout_.dp; ++dp) {
        if (is_of_lane(fault, dp)) replicas.insert(dp / layout_.ep);
      }
    }
    for (const int replica : replicas) {
      first_dp_ = replica * layout_.ep;
      saved_.clear();
      run(seed);
    }
    for (const Fault& fault : faults_) {
      if (fault.plant == Plant::gradient) {
        add_bad(bad_[rank_of(fault)], gradient_of(fault), element_of(fault));
      }
    }
    reduce();
  }

  [[nodiscard]] int rank_of(const Fault& fault) const {
    const int stage = fault.plant == Plant::empty_loss ? layout_.stages() - 1 : fault.stage;
    return layout_.rank(fault.tp, stage, fault.dp);
  }
  /// The module that hands on what the fault spoiled.
  [[nodiscard]] std::string module_of(const Fault& fault) const {
    return block_name(layer_of(fault), fault.is_mlp);
  }
  /// A sharded weight in the middle of a stage: others after it vouch for what flowed past.
  [[nodiscard]] std::string gradient_of(const Fault& fault) const {
    const int layer = fault.stage * layout_.layers_per_stage + layout_.layers_per_stage - 1;
    return block_name(layer, false) + ".linear_proj.weight";
  }
  [[nodiscard]] std::string weight_of(const Fault& fault) const {
    return module_of(fault) + (fault.is_mlp ? ".linear_fc1.weight" : ".linear_qkv.weight");
  }
  /// The element that is spoiled; with a distributed optimizer one that this rank owns.
  [[nodiscard]] std::int64_t element_of(const Fault& fault) const {
    return layout_.has_distributed_optimizer ? shard_of(fault.dp).begin : 5;
  }
  [[nodiscard]] bool has_bad_loss_or_gradient() const {
    const auto is_any_bad = [](const auto& each) { return !each.second.empty(); };
    return !losses_.empty() || std::ranges::any_of(bad_, is_any_bad) ||
           std::ranges::any_of(reduced_, is_any_bad);
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
    return fault.plant == Plant::gradient || fault.plant >= Plant::weight ||
           struck_.contains(key_of(fault));
  }
  [[nodiscard]] const BadParameters& bad_on(int rank) const { return found_in(bad_, rank); }

  [[nodiscard]] std::vector<Ledger> ledgers() const {
    std::vector<Ledger> ledgers;
    ledgers.reserve(static_cast<std::size_t>(layout_.world()));
    for (int rank = 0; rank < layout_.world(); ++rank) ledgers.push_back(ledger_of(rank));
    return ledgers;
  }

  [[nodiscard]] Ledger ledger_of(int rank) const {
    Ledger ledger = simulator::make_ledger(layout_, rank);
    const RankCoordinates& at = ledger.coordinates;
    ledger.level = "boundaries";
    ledger.backward_order = order_[static_cast<std::size_t>(at.pp.rank)];
    if (layout_.has_distributed_optimizer) {
      for (ParameterRecord& each : ledger.backward_order) each.shard = shard_of(at.dp.rank);
    }
    add_crossings(ledger);
    if (const auto found = log_.find(rank); found != log_.end()) ledger.sightings = found->second;
    if (const auto found = losses_.find(rank); found != losses_.end()) {
      ledger.sightings.insert(ledger.sightings.end(), found->second.begin(), found->second.end());
    }
    BadParameters weights, updated;
    for (const Fault& fault : faults_) {
      const bool is_here = is_of_lane(fault, at.dp.rank) && fault.tp == at.tp.rank &&
                           fault.stage % layout_.pp == at.pp.rank;
      if (fault.plant == Plant::weight && is_here) {
        add_bad(weights, weight_of(fault), element_of(fault));
      }
      // The owner's update reaches the others by the all-gather of parameters.
      const bool is_gathered = layout_.has_distributed_optimizer && fault.tp == at.tp.rank &&
                               fault.stage % layout_.pp == at.pp.rank;
      if (fault.plant == Plant::update && (is_here || is_gathered)) {
        add_bad(updated, gradient_of(fault), element_of(fault));
      }
      if (fault.plant == Plant::norm_value) {
        ledger.gradient_norm = std::numeric_limits<double>::infinity();
        ledger.absmax = is_here ? 1e25 : 1.0;
        ledger.absmax_parameter = is_here ? gradient_of(fault) : ledger.backward_order[0].name;
        ledger.history = history_of(is_here && fault.is_climb, *ledger.absmax);
      }
    }
    simulator::add_phase(ledger, Phase::params_before, weights);
    simulator::add_phase(ledger, Phase::grad_local, bad_on(rank));
    simulator::add_phase(ledger, Phase::grad_reduced, found_in(reduced_, rank));
    mark_overflow(ledger);
    simulator::add_phase(ledger, Phase::grad_norm, found_in(read_, rank));
    if (is_planted(Plant::update)) simulator::add_phase(ledger, Phase::params_after, updated);
    return ledger;
  }

  /// What a trace of this pass would tell: each operator's birth, and on other ranks receipts.
  [[nodiscard]] std::vector<Birth> births_on(int rank) const {
    std::vector<Birth> births;
    for (const Fault& fault : faults_) {
      if (!is_traced_on(fault, rank)) continue;
      for (int microbatch = 0; microbatch < layout_.microbatches; ++microbatch) {
        if (is_in(fault, microbatch) && has_struck(fault)) {
          births.push_back(birth_of(fault, microbatch));
        }
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
    for (const ParameterRecord& each : order_[layout_.coordinates_of(rank).pp.rank]) {
      if (bad_on(rank).contains(each.name)) ids.push_back(each.id);
    }
    std::ranges::sort(ids);
    return ids;
  }

 private:
  using Grid = std::vector<std::vector<Tokens>>;  // [lane of the replica][tp]
  using Key = std::tuple<int, int, int, int, int, bool>;

  static Key key_of(const Fault& fault) {
    return {
        static_cast<int>(fault.plant), fault.tp, fault.dp, fault.stage, fault.layer, fault.is_mlp};
  }
  [[nodiscard]] static bool is_in(const Fault& fault, int microbatch) {
    return fault.microbatch == kEveryMicrobatch || fault.microbatch == microbatch;
  }
  [[nodiscard]] static bool is_of_lane(const Fault& fault, int dp) {
    return fault.dp == dp || fault.is_on_every_replica;
  }
  [[nodiscard]] int layer_of(const Fault& fault) const {
    return fault.stage * layout_.layers_per_stage + fault.layer;
  }
  [[nodiscard]] static std::string block_name(int layer, bool is_mlp) {
    return "decoder.layers." + std::to_string(layer) + (is_mlp ? ".mlp" : ".self_attention");
  }
  [[nodiscard]] static const BadParameters& found_in(const std::map<int, BadParameters>& all,
                                                     int rank) {
    static const BadParameters kNone;
    const auto found = all.find(rank);
    return found == all.end() ? kNone : found->second;
  }

  // ---- tokens: number lane * tp + shard, in their order in the sequence ----

  [[nodiscard]] int lanes() const { return layout_.ep; }
  [[nodiscard]] Grid grid() const {
    return Grid(static_cast<std::size_t>(lanes()), std::vector<Tokens>(layout_.tp));
  }
  [[nodiscard]] Tokens token(int lane, int shard) const {
    return Tokens{1} << (lane * layout_.tp + shard);
  }
  [[nodiscard]] Tokens of_lane(int lane) const {
    Tokens all = 0;
    for (int shard = 0; shard < layout_.tp; ++shard) all |= token(lane, shard);
    return all;
  }
  [[nodiscard]] Tokens held_by(int lane, int tp) const {
    return layout_.has_sequence_parallel ? token(lane, tp) : of_lane(lane);
  }
  [[nodiscard]] static Tokens nth_of(Tokens tokens, int n) {
    for (n %= std::popcount(tokens); n > 0; --n) tokens &= tokens - 1;
    return tokens & (~tokens + 1);
  }
  /// Words of the vocabulary part that a tp rank holds.
  [[nodiscard]] Tokens with_words_of(int tp) const {
    if (layout_.has_words_on_first_rank_only) return tp == 0 ? ~Tokens{0} : 0;
    Tokens words = 0;
    for (int number = 0; number < 64; ++number) {
      if ((number * 5 + 1) % layout_.tp == tp) words |= Tokens{1} << number;
    }
    return words;
  }
  template <typename Do>
  void each_cell(Do act) const {
    for (int lane = 0; lane < lanes(); ++lane) {
      for (int tp = 0; tp < layout_.tp; ++tp) act(lane, tp);
    }
  }
  static void add(Grid& to, const Grid& from) {
    for (std::size_t lane = 0; lane < to.size(); ++lane) {
      for (std::size_t tp = 0; tp < to[lane].size(); ++tp) to[lane][tp] |= from[lane][tp];
    }
  }
  /// Causal attention within each lane's sequence: forward to later tokens, backward to earlier;
  /// or, where masked scores are multiplied by zero and not left out, to all.
  void attend(Grid& region, bool is_backward) const {
    each_cell([&](int lane, int tp) {
      Tokens& tokens = region[lane][tp];
      if (tokens == 0) return;
      if (!layout_.has_fused_attention) {
        tokens = of_lane(lane);
        return;
      }
      const Tokens after = ~Tokens{0} << std::countr_zero(tokens);
      const Tokens before = ~Tokens{0} >> std::countl_zero(tokens);
      tokens = of_lane(lane) & (is_backward ? before : after);
    });
  }
  [[nodiscard]] int rank_at(int lane, int tp, int stage) const {
    return layout_.rank(tp, stage, first_dp_ + lane);
  }

  // ---- what the observer writes ----

  static Sighting sighting_of(Phase phase, int microbatch, int chunk, int nan) {
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

  Sighting* write(int rank, const Where& where, const std::string& op, std::string_view role,
                  const Crossing& crossing, Tokens bad) {
    if (bad == 0) return nullptr;
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
    return &log_[rank].emplace_back(std::move(sighting));
  }

  /// `values` by member: what it puts in; changed to what it gets out, `result(member, all)`.
  template <typename Result>
  void collective(const std::string& group, const std::vector<int>& members, const std::string& op,
                  const Where& where, std::vector<Tokens>& values, Result result) {
    Tokens all = 0;
    for (const Tokens each : values) all |= each;
    if (members.size() < 2) {
      for (std::size_t i = 0; i < members.size(); ++i) values[i] = result(i, all);
      return;
    }
    const Crossing crossing{group, members, std::nullopt, next_sequence(group, members, where)};
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (where.phase <= Phase::backward) {
        ++counts_[members[i]][{group, members, -1, std::string(kSent)}];
      }
      write(members[i], where, op, kSent, crossing, values[i]);
    }
    for (std::size_t i = 0; i < members.size(); ++i) {
      is_overflow_ = false;
      values[i] = result(i, all);
      Sighting* received = write(members[i], where, op, kReceived, crossing, values[i]);
      if (received == nullptr || !is_overflow_) continue;
      received->stats.pos_inf = std::exchange(received->stats.nan, 0);
      received->stats.absmax = 3e38;
    }
  }

  [[nodiscard]] std::vector<int> tensor_parallel_group(int lane, int stage) const {
    std::vector<int> members;
    for (int tp = 0; tp < layout_.tp; ++tp) members.push_back(rank_at(lane, tp, stage));
    return members;
  }

  /// `result(lane, tp, all)`: what a rank gets out of what all put in.
  template <typename Result>
  void over_tp(Grid& now, const std::string& op, const Where& where, Result result) {
    for (int lane = 0; lane < lanes(); ++lane) {
      collective(
          "tp", tensor_parallel_group(lane, where.stage), op, where, now[lane],
          [&](std::size_t tp, Tokens all) { return result(lane, static_cast<int>(tp), all); });
    }
  }
  void all_gather(Grid& now, const Where& where) {
    over_tp(now, "c10d::_allgather_base_", where, [](int, int, Tokens all) { return all; });
  }

  // ---- faults ----

  [[nodiscard]] bool is_at(const Fault& fault, const Where& where, int lane, int layer,
                           bool is_mlp) const {
    return is_of_lane(fault, first_dp_ + lane) && fault.stage == where.stage &&
           fault.layer == layer && fault.is_mlp == is_mlp && is_in(fault, where.microbatch);
  }

  void strike(Grid& region, Plant plant, const Where& where, int layer, bool is_mlp,
              const Grid* routed = nullptr) {
    for (const Fault& fault : faults_) {
      const bool is_weight = fault.plant == Plant::weight && plant == Plant::operator_forward;
      if (fault.plant != plant && !is_weight) continue;
      for (int lane = 0; lane < lanes(); ++lane) {
        if (!is_at(fault, where, lane, layer, is_mlp)) continue;
        const Tokens here = routed != nullptr ? (*routed)[lane][fault.tp] : of_lane(lane);
        if (here == 0) continue;
        region[lane][fault.tp] |= is_weight ? here : nth_of(here, fault.token);
        struck_.insert(key_of(fault));
      }
    }
  }

  // ---- tensor parallelism ----

  /// Into a column-parallel layer: all-gathered where tokens are dealt out.
  void enter_column(Grid& hidden, const Where& where) {
    if (layout_.has_sequence_parallel) all_gather(hidden, where);
  }
  /// Out of a row-parallel layer: the sum, or each rank's tokens of it.
  void leave_row(Grid& region, const Where& where, std::optional<Plant> plant, int layer = 0,
                 bool is_mlp = false) {
    over_tp(region,
            layout_.has_sequence_parallel ? "c10d::_reduce_scatter_base_" : "c10d::allreduce_",
            where, [&](int lane, int tp, Tokens all) {
              Tokens out = all & held_by(lane, tp);
              for (const Fault& fault : faults_) {
                const bool is_everywhere =
                    fault.plant == Plant::sum_everywhere && plant == Plant::sum_forward;
                const bool is_here = is_everywhere || (fault.plant == plant && fault.tp == tp);
                if (is_here && layout_.tp > 1 && is_at(fault, where, lane, layer, is_mlp)) {
                  out |= nth_of(held_by(lane, tp), fault.token);
                  is_overflow_ = fault.is_overflow;
                  struck_.insert(key_of(fault));
                }
              }
              return out;
            });
  }
  /// A column-parallel layer's backward: with sequence parallelism its input is gathered again for
  /// the weight's gradient; then the parts of the input's gradient are summed.
  void leave_column_backward(Grid& region, Grid input, const Where& where,
                             std::optional<Plant> plant, int layer = 0, bool is_mlp = false) {
    if (layout_.has_sequence_parallel) all_gather(input, where);
    leave_row(region, where, plant, layer, is_mlp);
  }

  // ---- experts: token t of an ep group belongs to lane t mod ep ----

  [[nodiscard]] int owner_of(int number) const { return (number * 5 + 1) % layout_.ep; }
  /// What a lane's experts work on.
  [[nodiscard]] Grid routed() const {
    Grid out = grid();
    each_cell([&](int lane, int tp) {
      for (int shard = 0; shard < layout_.tp; ++shard) {
        if ((held_by(lane, tp) & token(lane, shard)) == 0) continue;
        out[owner_of(lane * layout_.tp + shard)][tp] |= token(lane, shard);
      }
    });
    return out;
  }
  void all_to_all(Grid& now, const Where& where, bool is_dispatch) {
    const Grid to = routed();
    for (int tp = 0; tp < layout_.tp; ++tp) {
      std::vector<int> members;
      std::vector<Tokens> values;
      for (int lane = 0; lane < lanes(); ++lane) {
        members.push_back(rank_at(lane, tp, where.stage));
        values.push_back(now[lane][tp]);
      }
      collective("ep", members, "c10d::alltoall_base_", where, values,
                 [&](std::size_t lane, Tokens all) {
                   const int number = static_cast<int>(lane);
                   return all & (is_dispatch ? to[lane][tp] : held_by(number, tp));
                 });
      for (int lane = 0; lane < lanes(); ++lane) now[lane][tp] = values[lane];
    }
  }
  /// Tokens, and the weights that the router gives them; their gradients on the way back.
  void dispatch(Grid& now, const Where& where) {
    Grid weights = now;
    all_to_all(now, where, true);
    all_to_all(weights, where, true);
  }

  // ---- messages ----

  struct Message {
    std::int64_t sequence = 0;
    Tokens tokens = 0;
  };
  void send(const Where& where, int to_stage, const Grid& values) {
    each_cell([&](int lane, int tp) {
      const int from = rank_at(lane, tp, where.stage), to = rank_at(lane, tp, to_stage);
      const std::vector<int> members = pipeline_of(lane, tp);
      auto& count = counts_[from][{"pp", members, to, std::string(kSent)}];
      const Crossing crossing{"pp", members, to, count++};
      write(from, where, "c10d::send", kSent, crossing, values[lane][tp]);
      messages_[{from, to, where.phase, to_stage, where.microbatch}] = {crossing.sequence,
                                                                        values[lane][tp]};
    });
  }
  void receive(const Where& where, int from_stage, Grid& values, Plant plant) {
    each_cell([&](int lane, int tp) {
      const int from = rank_at(lane, tp, from_stage), to = rank_at(lane, tp, where.stage);
      const std::vector<int> members = pipeline_of(lane, tp);
      Message message = messages_.at({from, to, where.phase, where.stage, where.microbatch});
      for (const Fault& fault : faults_) {
        if (fault.plant != plant || fault.tp != tp || fault.dp != first_dp_ + lane ||
            fault.stage != where.stage || !is_in(fault, where.microbatch)) {
          continue;
        }
        message.tokens |= nth_of(held_by(lane, tp), fault.token);
        struck_.insert(key_of(fault));
      }
      ++counts_[to][{"pp", members, from, std::string(kReceived)}];
      write(to, where, "c10d::recv_", kReceived, {"pp", members, from, message.sequence},
            message.tokens);
      values[lane][tp] = message.tokens;
    });
  }
  [[nodiscard]] std::vector<int> pipeline_of(int lane, int tp) const {
    std::vector<int> members;
    for (int stage = 0; stage < layout_.pp; ++stage) members.push_back(rank_at(lane, tp, stage));
    return members;
  }

  // ---- the pass ----

  struct Saved {
    Grid hidden, input, region;  // of a block: before its norm, at its first GEMM, at its second
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

  [[nodiscard]] static std::string row_of(bool is_mlp) {
    return is_mlp ? ".linear_fc2" : ".linear_proj";
  }
  [[nodiscard]] static std::string column_of(bool is_mlp) {
    return is_mlp ? ".linear_fc1" : ".linear_qkv";
  }

  void forward(int stage, int microbatch) {
    Grid hidden = grid();
    Where where{Phase::forward, microbatch, stage, ""};
    if (stage > 0) {
      receive(where, stage - 1, hidden, Plant::transfer_forward);
    } else {
      over_tp(hidden, "c10d::allreduce_", where, [](int, int, Tokens all) { return all; });
    }
    for (int layer = 0; layer < layout_.layers_per_stage; ++layer) {
      for (const bool is_mlp : {false, true}) forward_block(hidden, where, layer, is_mlp);
    }
    where.module.clear();
    if (stage < layout_.stages() - 1) {
      send(where, stage + 1, hidden);
    } else {
      compute_loss(hidden, where);
    }
  }

  void forward_block(Grid& hidden, Where& where, int layer, bool is_mlp) {
    const std::string block = block_name(where.stage * layout_.layers_per_stage + layer, is_mlp);
    Saved& saved = saved_[{where.stage, where.microbatch, layer, is_mlp}];
    saved.hidden = hidden;
    Grid region = hidden;
    if (is_mlp && layout_.has_experts) {
      where.module = block;
      dispatch(region, where);
      saved.input = region;
      const Grid experts = routed();
      strike(region, Plant::operator_forward, where, layer, is_mlp, &experts);
      saved.region = region;
      all_to_all(region, where, false);
    } else {
      where.module = block + column_of(is_mlp);
      enter_column(region, where);
      saved.input = region;
      if (!is_mlp) attend(region, false);
      strike(region, Plant::operator_forward, where, layer, is_mlp);
      saved.region = region;
      where.module = block + row_of(is_mlp);
      leave_row(region, where, Plant::sum_forward, layer, is_mlp);
    }
    add(hidden, region);
  }

  /// The vocabulary is dealt out over tp: the largest logit, the label's own, and the sum are
  /// reduced (cross_entropy.py). The label's own logit is known to one tp rank.
  void compute_loss(const Grid& hidden, Where where) {
    final_hidden_[where.microbatch] = hidden;
    Grid logits = hidden;
    where.module = "output_layer";
    enter_column(logits, where);
    where.module.clear();
    const auto sum = [](int, int, Tokens all) { return all; };
    Grid largest = logits, own = logits, exponentials = logits;
    over_tp(largest, "c10d::allreduce_", where, sum);
    each_cell([&](int lane, int tp) { own[lane][tp] &= with_words_of(tp); });
    over_tp(own, "c10d::allreduce_", where, sum);
    over_tp(exponentials, "c10d::allreduce_", where, sum);
    each_cell([&](int lane, int tp) {
      Tokens bad = largest[lane][tp];
      bool is_empty = false;
      for (const Fault& fault : faults_) {
        if (fault.plant != Plant::empty_loss || fault.dp != first_dp_ + lane) continue;
        if (!is_in(fault, where.microbatch)) continue;
        struck_.insert(key_of(fault));
        bad = of_lane(lane);
        is_empty = true;
      }
      bad_logits_[{where.microbatch, lane, tp}] = bad;
      if (bad == 0) return;
      Sighting loss = sighting_of(Phase::loss, where.microbatch, where.stage / layout_.pp, 1);
      loss.shape = {};
      loss.stats.numel = 1;
      loss.stats.first_bad = 0;
      loss.role = "loss";
      loss.valid_labels = is_empty ? 0 : 512;
      losses_[rank_at(lane, tp, where.stage)].push_back(std::move(loss));
    });
  }

  void spoil(const Where& where, int lane, int tp, const std::string& name, bool is_bad) {
    if (is_bad) bad_[rank_at(lane, tp, where.stage)][name] = Extent();
  }

  void backward(int stage, int microbatch) {
    Grid gradient = grid();
    Where where{Phase::backward, microbatch, stage, ""};
    if (stage < layout_.stages() - 1) {
      receive(where, stage + 1, gradient, Plant::transfer_backward);
    } else {
      gradient = backward_of_loss(where);
    }
    for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
      for (const bool is_mlp : {true, false}) backward_block(gradient, where, layer, is_mlp);
    }
    where.module.clear();
    if (stage > 0) {
      send(where, stage - 1, gradient);
      return;
    }
    if (layout_.has_sequence_parallel) all_gather(gradient, where);
    each_cell([&](int lane, int tp) {
      spoil(where, lane, tp, "embedding.position_embeddings.weight", gradient[lane][tp] != 0);
      spoil(where, lane, tp, kWordEmbeddings, (gradient[lane][tp] & with_words_of(tp)) != 0);
    });
  }

  Grid backward_of_loss(Where where) {
    Grid gradient = grid();
    const Grid& hidden = final_hidden_.at(where.microbatch);
    where.module = "output_layer";
    each_cell([&](int lane, int tp) {
      gradient[lane][tp] = bad_logits_.at({where.microbatch, lane, tp});
      const std::string name = has_one_embedding() ? kWordEmbeddings : "output_layer.weight";
      spoil(where, lane, tp, name, (gradient[lane][tp] | hidden[lane][tp]) != 0);
    });
    leave_column_backward(gradient, hidden, where, std::nullopt);
    each_cell([&](int lane, int tp) {
      spoil_norm(where, lane, tp, "decoder.final_layernorm", gradient[lane][tp], hidden[lane][tp]);
    });
    add(gradient, hidden);
    return gradient;
  }

  void spoil_norm(const Where& where, int lane, int tp, const std::string& norm, Tokens gradient,
                  Tokens hidden) {
    spoil(where, lane, tp, norm + ".weight", (gradient | hidden) != 0);
    if (layout_.has_biases) spoil(where, lane, tp, norm + ".bias", gradient != 0);
  }
  void spoil_linear(const Where& where, const std::string& linear, const Grid& gradient,
                    const Grid& input, const Grid& bias_gradient) {
    each_cell([&](int lane, int tp) {
      spoil(where, lane, tp, linear + ".weight", (gradient[lane][tp] | input[lane][tp]) != 0);
      if (layout_.has_biases) {
        spoil(where, lane, tp, linear + ".bias", bias_gradient[lane][tp] != 0);
      }
    });
  }

  void backward_block(Grid& gradient, Where& where, int layer, bool is_mlp) {
    const int number = where.stage * layout_.layers_per_stage + layer;
    const std::string block = block_name(number, is_mlp);
    const Saved& saved = saved_.at({where.stage, where.microbatch, layer, is_mlp});
    Grid region = gradient;
    if (is_mlp && layout_.has_experts) {
      backward_experts(region, saved, where, layer, block);
    } else {
      where.module = block + row_of(is_mlp);
      enter_column(region, where);
      spoil_linear(where, where.module, region, saved.region, gradient);
      add(region, saved.region);
      strike(region, Plant::operator_backward, where, layer, is_mlp);
      if (!is_mlp) attend(region, true);
      where.module = block + column_of(is_mlp);
      spoil_linear(where, where.module, region, saved.input, region);
      leave_column_backward(region, saved.hidden, where, Plant::sum_backward, layer, is_mlp);
    }
    each_cell([&](int lane, int tp) {
      spoil_norm(where, lane, tp, norm_of(number, is_mlp), region[lane][tp],
                 saved.hidden[lane][tp]);
    });
    add(gradient, region);
    add(gradient, saved.hidden);
  }

  void backward_experts(Grid& region, const Saved& saved, Where& where, int layer,
                        const std::string& block) {
    where.module = block;
    Grid combined = region;
    all_to_all(region, where, true);
    each_cell([&](int lane, int tp) {
      const Tokens bad = region[lane][tp] | saved.region[lane][tp];
      spoil(where, lane, tp, block + ".experts.linear_fc2.weight", bad != 0);
    });
    add(region, saved.region);
    const Grid experts = routed();
    strike(region, Plant::operator_backward, where, layer, true, &experts);
    each_cell([&](int lane, int tp) {
      const Tokens bad = region[lane][tp] | saved.input[lane][tp];
      spoil(where, lane, tp, block + ".experts.linear_fc1.weight", bad != 0);
    });
    Grid weights = region;
    all_to_all(weights, where, false);
    all_to_all(region, where, false);
    add(combined, weights);
    each_cell([&](int lane, int tp) {
      spoil(where, lane, tp, block + ".router.weight",
            (combined[lane][tp] | saved.hidden[lane][tp]) != 0);
    });
  }

  [[nodiscard]] static std::string norm_of(int layer, bool is_mlp) {
    return "decoder.layers." + std::to_string(layer) +
           (is_mlp ? ".pre_mlp_layernorm" : ".input_layernorm");
  }

  // ---- parameters ----

  static constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";
  static constexpr std::int64_t kElements = 64 * 64;

  [[nodiscard]] bool has_one_embedding() const {
    return layout_.has_tied_embeddings && layout_.pp == 1;
  }
  [[nodiscard]] ElementRange shard_of(int dp) const {
    return {dp * kElements / layout_.dp, (dp + 1) * kElements / layout_.dp};
  }

  void lay_out_parameters() {
    order_.resize(static_cast<std::size_t>(layout_.pp));
    for (int stage = layout_.stages() - 1; stage >= 0; --stage) {
      const auto put = [&](const std::string& name, bool is_duplicate,
                           bool may_be_untouched = false, bool is_tied = false) {
        auto& order = order_[static_cast<std::size_t>(stage % layout_.pp)];
        ParameterRecord parameter;
        parameter.id = static_cast<std::int64_t>(order.size());
        parameter.name = name;
        parameter.shape = {64, 64};
        parameter.may_be_untouched = may_be_untouched;
        parameter.is_tp_duplicate = is_duplicate && layout_.tp > 1;
        parameter.is_tied = is_tied;
        parameter.chunk = stage / layout_.pp;
        order.push_back(std::move(parameter));
      };
      const auto put_with_bias = [&](const std::string& name, bool is_duplicate,
                                     bool is_bias_duplicate) {
        if (layout_.has_biases) put(name + ".bias", is_bias_duplicate);
        put(name + ".weight", is_duplicate);
      };
      if (stage == layout_.stages() - 1) {
        if (!has_one_embedding()) {
          put("output_layer.weight", false, false, layout_.has_tied_embeddings);
        }
        put_with_bias("decoder.final_layernorm", true, true);
      }
      for (int layer = layout_.layers_per_stage - 1; layer >= 0; --layer) {
        const int number = stage * layout_.layers_per_stage + layer;
        for (const bool is_mlp : {true, false}) {
          const std::string block = block_name(number, is_mlp);
          if (is_mlp && layout_.has_experts) {
            put(block + ".experts.linear_fc2.weight", false, true);
            put(block + ".experts.linear_fc1.weight", false, true);
            put(block + ".router.weight", true, true);
          } else {
            put_with_bias(block + row_of(is_mlp), false, true);
            put_with_bias(block + column_of(is_mlp), false, false);
          }
          put_with_bias(norm_of(number, is_mlp), true, true);
        }
      }
      if (stage == 0) {
        put("embedding.position_embeddings.weight", true);
        put(kWordEmbeddings, false, true, layout_.has_tied_embeddings);
      }
    }
  }

  // ---- after backward ----

  /// Collectives of a reduction count on from those of the pass, which every replica has alike.
  std::int64_t next_sequence(const std::string& group, const std::vector<int>& members,
                             const Where& where) {
    if (where.phase <= Phase::backward) return sequences_[{group, members}]++;
    std::vector<int> of_first = members;
    for (int& rank : of_first) rank -= offset_of(rank);
    const auto in_pass = sequences_.find({group, of_first});
    return (in_pass == sequences_.end() ? 0 : in_pass->second) +
           late_sequences_[{group, members}]++;
  }
  /// How far a rank's number is from that of its counterpart in the first replica.
  [[nodiscard]] int offset_of(int rank) const {
    return layout_.coordinates_of(rank).dp.rank / layout_.ep * layout_.ep * layout_.tp;
  }

  /// Summed over dp; then, with sequence parallelism, what is duplicated over tp, and tied
  /// embeddings over the pipeline's ends (finalize_model_grads.py).
  void reduce() {
    std::map<std::pair<int, int>, BadParameters> sums;  // by (tp, pp)
    for (const auto& [rank, bad] : bad_) {
      const RankCoordinates at = layout_.coordinates_of(rank);
      for (const auto& [name, extent] : bad) add_bad(sums[{at.tp.rank, at.pp.rank}], name, extent);
    }
    for (const Fault& fault : faults_) {
      if (fault.plant != Plant::reduced_everywhere) continue;
      add_bad(sums[{fault.tp, fault.stage % layout_.pp}], gradient_of(fault), element_of(fault));
    }
    for (int rank = 0; rank < layout_.world(); ++rank) {
      const RankCoordinates at = layout_.coordinates_of(rank);
      const auto sum = sums.find({at.tp.rank, at.pp.rank});
      if (sum != sums.end()) reduced_[rank] = sum->second;
    }
    for (const Fault& fault : faults_) {
      if (fault.plant == Plant::reduced) {
        add_bad(reduced_[rank_of(fault)], gradient_of(fault), element_of(fault));
      }
    }
    read_ = reduced_;
    for (int dp = 0; dp < layout_.dp; ++dp) {
      if (layout_.has_sequence_parallel) reduce_duplicates(dp);
      if (layout_.has_tied_embeddings && layout_.pp > 1) reduce_tied(dp);
    }
    for (const Fault& fault : faults_) {
      if (fault.plant == Plant::norm_gradient) {
        add_bad(read_[rank_of(fault)], gradient_of(fault), element_of(fault));
      }
    }
  }

  /// `name_on(member)`: what each member puts in; all get what any of them had.
  template <typename NameOn>
  Tokens reduce_over(const std::string& group, const std::vector<int>& members, NameOn name_on) {
    std::vector<Tokens> values;
    for (const int rank : members) values.push_back(is_seen(rank, name_on(rank)) ? 1 : 0);
    collective(group, members, "c10d::allreduce_", {Phase::grad_reduced, 0, 0, ""}, values,
               [](std::size_t, Tokens all) { return all; });
    return values.front();
  }
  [[nodiscard]] bool is_seen(int rank, const std::string& name) const {
    const BadParameters& bad = found_in(reduced_, rank);
    const auto found = bad.find(name);
    return found != bad.end();
  }

  void reduce_duplicates(int dp) {
    for (int pp = 0; pp < layout_.pp; ++pp) {
      std::vector<int> members;
      for (int tp = 0; tp < layout_.tp; ++tp) members.push_back(layout_.rank(tp, pp, dp));
      BadParameters all;
      std::vector<Tokens> values;
      for (const int rank : members) {
        Tokens has_bad = 0;
        for (const auto& [name, extent] : found_in(reduced_, rank)) {
          if (!is_reduced_duplicate(pp, name)) continue;
          add_bad(all, name, extent);
          has_bad = 1;
        }
        values.push_back(has_bad);
      }
      collective("tp", members, "c10d::allreduce_", {Phase::grad_reduced, 0, 0, ""}, values,
                 [](std::size_t, Tokens any) { return any; });
      for (const int rank : members) {
        for (const auto& [name, extent] : all) add_bad(read_[rank], name, extent);
      }
    }
  }
  [[nodiscard]] bool is_reduced_duplicate(int pp, const std::string& name) const {
    const auto& order = order_[static_cast<std::size_t>(pp)];
    const auto found = std::ranges::find(order, name, &ParameterRecord::name);
    return found != order.end() && found->is_tp_duplicate && !name.starts_with("embedding.");
  }

  void reduce_tied(int dp) {
    for (int tp = 0; tp < layout_.tp; ++tp) {
      const int first = layout_.rank(tp, 0, dp), last = layout_.rank(tp, layout_.pp - 1, dp);
      const Tokens bad = reduce_over("embd", {first, last}, [&](int rank) -> std::string {
        return rank == first ? kWordEmbeddings : "output_layer.weight";
      });
      if (bad == 0) continue;
      add_bad(read_[first], kWordEmbeddings, Extent());
      add_bad(read_[last], "output_layer.weight", Extent());
    }
  }

  // ---- ledgers ----

  [[nodiscard]] bool is_planted(Plant plant) const {
    return std::ranges::any_of(faults_, [&](const Fault& each) { return each.plant == plant; });
  }

  /// The largest gradient of six steps: climbing to `last`, or there at once.
  [[nodiscard]] static HistorySummary history_of(bool is_climb, double last) {
    HistorySummary history;
    for (int step = 2; step <= 7; ++step) {
      history.iterations.push_back(step);
      const double climbed = std::pow(last, (step - 1) / 6.0);
      const double value = is_climb || step == 7 ? climbed : 1.0;
      history.absmax.push_back(static_cast<float>(value));
      history.norm.push_back(static_cast<float>(2 * value));
    }
    return history;
  }

  void mark_overflow(Ledger& ledger) const {
    const RankCoordinates& at = ledger.coordinates;
    for (const Fault& fault : faults_) {
      const bool is_here = fault.tp == at.tp.rank && fault.stage % layout_.pp == at.pp.rank;
      if (fault.plant != Plant::reduced_everywhere || !fault.is_overflow || !is_here) continue;
      for (Sighting& sighting : ledger.sightings) {
        if (sighting.phase != Phase::grad_reduced || sighting.parameter != gradient_of(fault) ||
            sighting.stats.nan == 0) {
          continue;
        }
        sighting.stats.pos_inf = std::exchange(sighting.stats.nan, 0);
        sighting.stats.absmax = 3e38;
      }
    }
  }

  /// Of a replica that was not simulated: what its counterpart in the first one looked at.
  void add_crossings(Ledger& ledger) const {
    const int rank = ledger.coordinates.rank;
    int offset = 0;
    auto counted = counts_.find(rank);
    if (counted == counts_.end()) {
      offset = offset_of(rank);
      counted = counts_.find(rank - offset);
    }
    std::map<std::pair<std::string, std::vector<int>>, std::size_t> of_group;
    if (counted != counts_.end()) {
      for (const auto& [key, count] : counted->second) {
        auto [group, members, peer, role] = key;
        for (int& member : members) member += offset;
        if (peer < 0) of_group[{group, members}] = ledger.crossings.size();
        ledger.crossings.push_back(
            {group, members, peer < 0 ? std::nullopt : std::optional(peer + offset), role, count});
      }
    }
    for (const auto& late : late_groups_of(ledger.coordinates)) {
      const auto known = of_group.find(late);
      if (known != of_group.end()) {
        ++ledger.crossings[known->second].count;
      } else {
        ledger.crossings.push_back({late.first, late.second, std::nullopt, std::string(kSent), 1});
      }
    }
  }
  /// The groups that reduce gradients further, on this rank: once each.
  [[nodiscard]] std::vector<std::pair<std::string, std::vector<int>>> late_groups_of(
      const RankCoordinates& at) const {
    std::vector<std::pair<std::string, std::vector<int>>> groups;
    if (layout_.has_sequence_parallel && layout_.tp > 1) {
      std::vector<int> members;
      for (int tp = 0; tp < layout_.tp; ++tp) {
        members.push_back(layout_.rank(tp, at.pp.rank, at.dp.rank));
      }
      groups.emplace_back("tp", members);
    }
    const bool is_end = at.pp.rank == 0 || at.pp.rank == layout_.pp - 1;
    if (layout_.has_tied_embeddings && layout_.pp > 1 && is_end) {
      groups.emplace_back("embd",
                          std::vector{layout_.rank(at.tp.rank, 0, at.dp.rank),
                                      layout_.rank(at.tp.rank, layout_.pp - 1, at.dp.rank)});
    }
    return groups;
  }

  // ---- births ----

  [[nodiscard]] bool is_traced_on(const Fault& fault, int rank) const {
    const RankCoordinates at = layout_.coordinates_of(rank);
    switch (fault.plant) {
      case Plant::operator_forward:
      case Plant::operator_backward:
      case Plant::gradient:
        return rank_of(fault) == rank;
      case Plant::weight:
        return is_of_lane(fault, at.dp.rank) && fault.tp == at.tp.rank &&
               fault.stage % layout_.pp == at.pp.rank;
      case Plant::empty_loss:
        return at.dp.rank == fault.dp && at.pp.rank == layout_.pp - 1;
      default:
        return false;  // not seen by operators
    }
  }

  [[nodiscard]] Birth birth_of(const Fault& fault, int microbatch) const {
    Birth birth;
    birth.kind = fault.birth.kind;
    birth.replay = fault.birth.replay;
    birth.sighting = sighting_of(Phase::forward, microbatch, fault.stage / layout_.pp, 1);
    birth.sighting.module = module_of(fault);
    birth.sighting.op = "aten::log";
    birth.sighting.role = "output[0]";
    birth.reached = {std::string(kOtherRanks)};
    switch (fault.plant) {
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
      case Plant::gradient:
        birth.kind = BirthKind::memory;
        birth.sighting.phase = Phase::backward;
        birth.sighting.microbatch.reset();
        birth.sighting.module.clear();
        birth.sighting.op.clear();
        birth.sighting.role = "grad";
        birth.sighting.parameter = gradient_of(fault);
        birth.reached = {gradient_of(fault)};
        break;
      case Plant::weight:
        birth.kind = BirthKind::weight;
        birth.sighting.role = "weight";
        birth.sighting.parameter = weight_of(fault);
        break;
      default:
        break;
    }
    if (fault.birth.is_of_recomputation || fault.birth.is_of_auxiliary_loss) {
      birth.sighting.phase = Phase::forward;
    }
    if (fault.birth.is_of_recomputation) birth.node = "CheckpointFunctionBackward";
    return birth;
  }

  Layout layout_;
  std::vector<Fault> faults_;
  int first_dp_ = 0;  // of the replica that is being simulated
  bool is_overflow_ = false;
  std::map<std::tuple<int, int, int, bool>, Saved> saved_;  // stage, microbatch, layer, is mlp
  std::map<int, Grid> final_hidden_;                        // by microbatch
  std::map<std::tuple<int, int, int>, Tokens> bad_logits_;  // microbatch, lane, tp
  std::map<std::tuple<int, int, Phase, int, int>, Message> messages_;
  std::map<std::pair<std::string, std::vector<int>>, std::int64_t> sequences_, late_sequences_;
  using CountKey = std::tuple<std::string, std::vector<int>, int, std::string>;
  std::map<int, std::map<CountKey, std::int64_t>> counts_;  // by rank
  std::map<int, std::vector<Sighting>> log_;
  std::map<int, std::vector<Sighting>> losses_;
  std::map<int, BadParameters> bad_, reduced_, read_;
  std::vector<std::vector<ParameterRecord>> order_;  // by pipeline rank
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
