// Simulates a transformer's training step by computing only which tokens are NaN.
//
// It plants one fault and propagates it through forward and backward of a tp x pp x cp x dp x ep
// job as a transformer's operators would (a GEMM makes a token's row bad, attention mixes tokens
// causally, all-reduces, reduce-scatters and sends carry masks). Then it writes what each rank's
// scan would have seen. It does not use the rules in src/locate: the truth is what it planted.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "incident/simulated_job.hpp"
#include "locate/simulated_transformer.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::simulator {

/// The place of a step's only fault.
enum class Point {
  none,
  forward_hidden,     // the layer's input
  forward_region,     // between the column- and the row-parallel GEMM, on one tp rank
  loss_gradient,      // the logits' gradient on one tp rank
  residual_gradient,  // the block's input in backward
  row_gradient,       // the row-parallel layer's own copy of it
  region_gradient,    // between row- and column-parallel GEMM
  partial_gradient,  // the column-parallel layer's part of the input gradient, before its reduction
  norm_gradient,     // the output of the block's norm in backward
  sent_gradient,     // the gradient that a stage sends
};
enum class Block { attention, mlp };

struct Fault {
  Point point = Point::none;
  int lane = 0;  // dp * cp size + cp
  int tp = 0;
  int layer = 0;
  Block block = Block::mlp;
  int token = 0;        // index into the lane's tokens
  int source_lane = 0;  // the lane whose token an expert spoils
};

class TrainingStep {
 public:
  TrainingStep(Layout layout, Fault fault) : layout_(layout), fault_(fault) {
    tokens_per_lane_ = 8;
    forward();
    backward();
  }

  [[nodiscard]] const Layout& layout() const { return layout_; }
  /// The rank with the fault; empty without a fault.
  [[nodiscard]] std::optional<int> guilty_rank() const {
    if (fault_.point == Point::none) return std::nullopt;
    int stage = fault_.layer / layout_.layers_per_stage;
    if (fault_.point == Point::loss_gradient) stage = layout_.stages() - 1;
    return layout_.rank_at(fault_.lane, fault_.tp, stage);
  }
  [[nodiscard]] bool has_bad_gradients() const { return !first_bad_.empty(); }
  /// The parameter whose gradient became bad first.
  [[nodiscard]] const std::string& first_bad() const { return first_bad_; }
  [[nodiscard]] const BadParameters& bad_on(int rank) const { return found_or_empty(bad_, rank); }
  /// Overwrites a gradient element after backward.
  void spoil(int rank, const std::string& name) {
    // An element of some lane's shard, chosen independently of the spoiled rank.
    const std::int64_t element =
        layout_.has_distributed_optimizer
            ? shard_of_lane(static_cast<int>(name.size()) % layout_.lanes()).begin
            : 5;
    add_bad(bad_[rank], name, element);
  }
  /// The rank's parameters, in the order in which backward finished them.
  [[nodiscard]] const std::vector<ParameterRecord>& order_on(int rank) { return order_[rank]; }

  /// The scans of every rank: local, reduced, and as the optimizer reads the gradients.
  [[nodiscard]] std::vector<Ledger> ledgers() const {
    std::vector<Ledger> ledgers;
    const BadByRank reduced = reduce();
    const BadByRank read = reduce_further(reduced);
    for (const auto& [rank, order] : order_) {
      Ledger ledger = make_ledger(layout_, rank);
      ledger.backward_order = layout_.is_order_observed ? order : reverse_registration(order);
      if (layout_.has_distributed_optimizer) {
        const RankCoordinates& at = ledger.coordinates;
        for (ParameterRecord& each : ledger.backward_order) {
          each.shard = shard_of_lane(at.dp.rank * layout_.cp + at.cp.rank);
        }
      }
      add_phase(ledger, Phase::grad_local, bad_on(rank));
      add_phase(ledger, Phase::grad_reduced, reduced.at(rank));
      add_phase(ledger, Phase::grad_norm, read.at(rank));
      ledgers.push_back(std::move(ledger));
    }
    return ledgers;
  }

 private:
  [[nodiscard]] Grid grid() const { return Grid(layout_.lanes(), std::vector<Tokens>(layout_.tp)); }

  // ---- tokens ----

  /// Global token numbers: each dp rank has a sequence of cp * 8 tokens, distributed in zigzag.
  [[nodiscard]] int token(int lane, int index) const {
    const int cp = lane % layout_.cp, half = tokens_per_lane_ / 2;
    const int piece = index < half ? cp : 2 * layout_.cp - 1 - cp;
    return piece * half + index % half;
  }
  [[nodiscard]] Tokens of_lane(int lane) const {
    Tokens tokens = 0;
    for (int i = 0; i < tokens_per_lane_; ++i) tokens |= token_number(token(lane, i));
    return tokens;
  }
  [[nodiscard]] Tokens of_shard(int lane, int tp) const {
    Tokens tokens = 0;
    const int each = tokens_per_lane_ / layout_.tp;
    for (int i = tp * each; i < (tp + 1) * each; ++i) tokens |= token_number(token(lane, i));
    return tokens;
  }

  [[nodiscard]] static Tokens any_of(const std::vector<Tokens>& parts) {
    Tokens all = 0;
    for (const Tokens part : parts) all |= part;
    return all;
  }
  /// The input of the tensor-parallel region: all-gathered, or each rank's own copy.
  [[nodiscard]] Grid gather(const Grid& hidden) const {
    Grid out = hidden;
    if (!layout_.has_sequence_parallel) return out;
    for (auto& lane : out) std::ranges::fill(lane, any_of(lane));
    return out;
  }
  /// The output of the region: the sum on every rank, or each rank's tokens of the sum.
  [[nodiscard]] Grid reduce_region(const Grid& partial) const {
    Grid out = partial;
    for (int lane = 0; lane < layout_.lanes(); ++lane) {
      const Tokens sum = any_of(partial[lane]);
      for (int tp = 0; tp < layout_.tp; ++tp) {
        out[lane][tp] = layout_.has_sequence_parallel ? sum & of_shard(lane, tp) : sum;
      }
    }
    return out;
  }
  /// Causal attention over the context-parallel lanes of one dp rank; heads stay on their tp rank.
  [[nodiscard]] Grid attend(const Grid& in, bool is_backward) const {
    Grid out = in;
    for (int first = 0; first < layout_.lanes(); first += layout_.cp) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        Tokens all = 0;
        for (int cp = 0; cp < layout_.cp; ++cp) all |= in[first + cp][tp];
        const Tokens reached = attended_from(all, is_backward);
        for (int cp = 0; cp < layout_.cp; ++cp) {
          out[first + cp][tp] |= reached & of_lane(first + cp);
        }
      }
    }
    return out;
  }

  void strike(Grid& grid_at_point, Point point, int layer, Block block, bool is_of_shard) {
    if (fault_.point != point || fault_.layer != layer || fault_.block != block) return;
    set_bad(grid_at_point, fault_.lane, is_of_shard);
  }
  void set_bad(Grid& at, int lane, bool is_of_shard) {
    int index = fault_.token % tokens_per_lane_;
    if (is_of_shard && layout_.has_sequence_parallel) {
      const int each = tokens_per_lane_ / layout_.tp;
      index = fault_.tp * each + index % each;
    }
    at[lane][fault_.tp] |= token_number(token(lane, index));
  }

  // ---- experts ----

  static constexpr int kExperts = 4;
  [[nodiscard]] int expert_of(int lane, int token_number, int layer) const {
    return (token_number * 7 + lane * 3 + layer) % kExperts;
  }
  [[nodiscard]] int owner_of(int expert, int lane) const {
    return lane / layout_.ep * layout_.ep + expert / (kExperts / layout_.ep);
  }

  // ---- the step ----

  struct Saved {
    Grid hidden, input,
        region;  // of the block: at its norm's input, at its first GEMM, at its second
  };

  void forward() {
    hidden_ = grid();
    for (int layer = 0; layer < layout_.layers(); ++layer) {
      for (const Block block : {Block::attention, Block::mlp}) {
        strike(hidden_, Point::forward_hidden, layer, block, true);
        Saved& saved = saved_[{layer, block}];
        saved.hidden = hidden_;
        saved.input = gather(hidden_);
        Grid region = saved.input;
        strike(region, Point::forward_region, layer, block, false);
        if (block == Block::attention) region = attend(region, false);
        saved.region = region;
        add(hidden_, reduce_region(region));
      }
    }
  }

  void finish(int lane, int tp, int stage, const std::string& name, bool is_bad,
              bool is_duplicate = false, bool may_be_untouched = false, bool is_tied = false) {
    const int rank = layout_.rank_at(lane, tp, stage);
    ParameterRecord parameter;
    parameter.id = static_cast<std::int64_t>(order_[rank].size());
    parameter.name = name;
    parameter.shape = {8, 8};
    parameter.chunk = stage / layout_.pp;
    parameter.is_tp_duplicate = is_duplicate;
    parameter.may_be_untouched = may_be_untouched;
    parameter.is_tied = is_tied;
    order_[rank].push_back(parameter);
    if (!is_bad) return;
    bad_[rank][name] = Extent();
    if (first_bad_.empty()) first_bad_ = name;
  }
  template <typename IsBad>
  void finish_on_all(int stage, const std::string& name, IsBad is_bad, bool is_duplicate) {
    for (int lane = 0; lane < layout_.lanes(); ++lane) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        finish(lane, tp, stage, name, is_bad(lane, tp), is_duplicate);
      }
    }
  }

  void backward() {
    const int last = layout_.stages() - 1;
    const Grid input = gather(hidden_);
    Grid logits = input;
    for (auto& lane : logits)
      std::ranges::fill(lane, any_of(lane));  // the softmax over the vocabulary
    if (fault_.point == Point::loss_gradient) set_bad(logits, fault_.lane, false);
    const Grid logits_gradient = logits;
    const auto is_output_bad = [&](int lane, int tp) {
      return (logits[lane][tp] | input[lane][tp]) != 0;
    };
    if (!layout_.has_one_embedding()) {
      for (int lane = 0; lane < layout_.lanes(); ++lane) {
        for (int tp = 0; tp < layout_.tp; ++tp) {
          finish(lane, tp, last, kOutputLayer, is_output_bad(lane, tp), false, false,
                 layout_.has_tied_embeddings);
        }
      }
    }
    gradient_ = reduce_region(logits);
    finish_on_all(
        last, kFinalNorm + std::string(".weight"),
        [&](int lane, int tp) { return (gradient_[lane][tp] | hidden_[lane][tp]) != 0; }, true);
    add(gradient_, hidden_);

    for (int layer = layout_.layers() - 1; layer >= 0; --layer) {
      backward_block(layer, Block::mlp);
      backward_block(layer, Block::attention);
      const bool ends_stage = layer % layout_.layers_per_stage == 0;
      if (ends_stage && fault_.point == Point::sent_gradient && fault_.layer == layer) {
        set_bad(gradient_, fault_.lane, true);
      }
    }
    const Grid at_embedding = gather(gradient_);
    for (int lane = 0; lane < layout_.lanes(); ++lane) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        bool is_bad = (at_embedding[lane][tp] & with_words_of(tp, layout_.tp)) != 0;
        if (layout_.has_one_embedding()) is_bad |= is_output_bad(lane, tp);
        finish(lane, tp, 0, kWordEmbeddings, is_bad, false, true, layout_.has_tied_embeddings);
      }
    }
  }

  void backward_block(int layer, Block block) {
    const int stage = layer / layout_.layers_per_stage;
    const bool is_mlp = block == Block::mlp;
    const Saved& saved = saved_.at({layer, block});
    const bool has_experts = layout_.has_experts && is_mlp;

    strike(gradient_, Point::residual_gradient, layer, block, true);
    if (layout_.has_biases && !has_experts) {
      const Grid& now = gradient_;
      finish_on_all(
          stage, row_name(layer, is_mlp) + ".bias",
          [&](int lane, int tp) { return now[lane][tp] != 0; }, true);
    }
    Grid region = gather(gradient_);
    strike(region, Point::row_gradient, layer, block, false);
    if (has_experts) {
      backward_experts(region, saved, layer, stage);
    } else {
      finish_on_all(
          stage, row_name(layer, is_mlp) + ".weight",
          [&](int lane, int tp) { return (region[lane][tp] | saved.region[lane][tp]) != 0; },
          false);
      add(region, saved.region);
      strike(region, Point::region_gradient, layer, block, false);
      if (!is_mlp) region = attend(region, true);
      finish_on_all(
          stage, column_name(layer, is_mlp) + ".weight",
          [&](int lane, int tp) { return (region[lane][tp] | saved.input[lane][tp]) != 0; }, false);
    }
    strike(region, Point::partial_gradient, layer, block, false);
    Grid input = reduce_region(region);
    finish_on_all(
        stage, norm_name(layer, is_mlp) + ".weight",
        [&](int lane, int tp) { return (input[lane][tp] | saved.hidden[lane][tp]) != 0; }, true);
    add(input, saved.hidden);
    add(gradient_, input);
    strike(gradient_, Point::norm_gradient, layer, block, true);
  }

  /// Tokens are sent to the lane that owns their expert and back; the expert's weights see them
  /// all.
  void backward_experts(Grid& region, const Saved& saved, int layer, int stage) {
    const std::string block = block_name(layer, true);
    const Grid incoming = region;
    add(region, saved.region);
    bool is_spoiled = false;
    if (fault_.point == Point::region_gradient && fault_.layer == layer &&
        fault_.block == Block::mlp) {
      // The guilty lane spoils a token that was routed to one of its experts.
      for (int i = 0; i < tokens_per_lane_ && !is_spoiled; ++i) {
        const int number = token(fault_.source_lane, i);
        const int expert = expert_of(fault_.source_lane, number, layer);
        if (owner_of(expert, fault_.source_lane) != fault_.lane) continue;
        region[fault_.source_lane][fault_.tp] |= token_number(number);
        is_spoiled = true;
      }
    }
    for (int lane = 0; lane < layout_.lanes(); ++lane) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        for (int expert = 0; expert < kExperts; ++expert) {
          if (owner_of(expert, lane) != lane) continue;
          const std::string name = block + ".experts.local_experts." + std::to_string(expert) + ".";
          finish(lane, tp, stage, name + "linear_fc2.weight",
                 touches(incoming, lane, tp, expert, layer) ||
                     touches(saved.region, lane, tp, expert, layer),
                 false, true);
          finish(lane, tp, stage, name + "linear_fc1.weight",
                 touches(region, lane, tp, expert, layer), false, true);
        }
        finish(lane, tp, stage, block + ".router.weight",
               (incoming[lane][tp] | saved.region[lane][tp]) != 0, true, true);
      }
    }
  }
  [[nodiscard]] bool touches(const Grid& tokens, int owner, int tp, int expert, int layer) const {
    for (int lane = owner / layout_.ep * layout_.ep; lane < (owner / layout_.ep + 1) * layout_.ep;
         ++lane) {
      for (int i = 0; i < tokens_per_lane_; ++i) {
        const int number = token(lane, i);
        const bool is_bad = (tokens[lane][tp] & token_number(number)) != 0;
        if (is_bad && expert_of(lane, number, layer) == expert) return true;
      }
    }
    return false;
  }

  // ---- after backward ----

  [[nodiscard]] ElementRange shard_of_lane(int lane) const {
    return shard_of(8 * 8, lane, layout_.lanes());
  }

  [[nodiscard]] BadByRank reduce() const {
    BadByRank reduced;
    for (const auto& [rank, order] : order_) {
      const RankCoordinates at = layout_.coordinates_of(rank);
      BadParameters& sums = reduced[rank];
      for (const auto& parameter : order) {
        for (int lane = 0; lane < layout_.lanes(); ++lane) {
          const BadParameters& bad = bad_on(layout_.rank_at(lane, at.tp.rank, at.pp.rank));
          const auto found = bad.find(parameter.name);
          if (found != bad.end()) add_bad(sums, parameter.name, found->second);
        }
      }
    }
    return reduced;
  }
  /// Tied embeddings are summed over the pipeline's ends, duplicates over tp (sequence parallel).
  [[nodiscard]] BadByRank reduce_further(const BadByRank& reduced) const {
    BadByRank read = reduced;
    for (const auto& [rank, order] : order_) {
      const RankCoordinates at = layout_.coordinates_of(rank);
      for (const auto& [other, bad] : reduced) {
        const RankCoordinates other_at = layout_.coordinates_of(other);
        if (at.dp.rank != other_at.dp.rank || at.cp.rank != other_at.cp.rank) continue;
        for (const auto& parameter : order) {
          const bool is_same_duplicate = layout_.has_sequence_parallel &&
                                         parameter.is_tp_duplicate &&
                                         at.pp.rank == other_at.pp.rank;
          if (is_same_duplicate) take(read[rank], parameter.name, bad, parameter.name);
          if (!parameter.is_tied || at.tp.rank != other_at.tp.rank) continue;
          for (const char* name : {kOutputLayer, kWordEmbeddings}) {
            take(read[rank], parameter.name, bad, name);
          }
        }
      }
    }
    return read;
  }
  static void take(BadParameters& to, const std::string& name, const BadParameters& from,
                   const std::string& source) {
    if (const auto found = from.find(source); found != from.end()) add_bad(to, name, found->second);
  }

  /// Megatron registers a layer's parts in a different order than forward runs them.
  [[nodiscard]] static std::vector<ParameterRecord> reverse_registration(
      std::vector<ParameterRecord> order) {
    const auto place = [](const std::string& name) {
      int part = 0;
      for (const char* marker : {"input_layernorm", "linear_proj", "linear_qkv",
                                 "pre_mlp_layernorm", "router", "linear_fc1", "linear_fc2"}) {
        if (name.find(marker) != std::string::npos) return part;
        ++part;
      }
      return part;
    };
    const auto layer = [](const std::string& name) {
      const std::string start = "decoder.layers.";
      if (name.starts_with(start)) return std::stoi(name.substr(start.size()));
      return name.starts_with("embedding") ? -1 : name.starts_with("decoder.final") ? 1000 : 1001;
    };
    std::ranges::stable_sort(order, [&](const auto& a, const auto& b) {
      return std::tuple(-a.chunk, -layer(a.name), -place(a.name)) <
             std::tuple(-b.chunk, -layer(b.name), -place(b.name));
    });
    return order;
  }

  Layout layout_;
  Fault fault_;
  int tokens_per_lane_ = 8;
  Grid hidden_, gradient_;
  std::map<std::pair<int, Block>, Saved> saved_;
  std::map<int, std::vector<ParameterRecord>> order_;
  BadByRank bad_;
  std::string first_bad_;
};

}  // namespace nanlocator::simulator
