// Reports of synthetic incidents, for the page's tests and for viewing. One NaN is born in backward
// on one rank and spreads as in training: through tensor-parallel all-reduces, down the pipeline,
// into the gradients, and to all ranks by their reduction.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "nanlocator/report/run_report.hpp"
#include "nanlocator/verdict/cause_table.hpp"

namespace nanlocator::testing {

struct SampleLayout {
  int tp = 2, pp = 2, dp = 2;
  int layers_per_stage = 2;
  int microbatches = 4;
  [[nodiscard]] int world_size() const { return tp * pp * dp; }
};

class SampleIncident {
 public:
  explicit SampleIncident(SampleLayout layout) : layout_(layout) {
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      Ledger ledger{.run_id = "2026-03-14-gpt-moe-30b", .iteration = 1284};
      ledger.coordinates = at(rank);
      ledger.level = "boundaries";
      ledger.is_backward_order_observed = true;
      add_parameters(ledger);
      ledger.crossings = {
          {.group = "tp", .members = {rank}, .peer = {}, .role = "sent", .count = 9}};
      for (int microbatch = 0; microbatch < layout.microbatches; ++microbatch) {
        ledger.microbatches.push_back(
            {.number = microbatch,
             .chunk = {},
             .tensors = {"tokens: int64 [2, 4096], 0 to 50256, fingerprint 00f3a1c2d4e5f607"}});
      }
      ledgers.push_back(std::move(ledger));
    }
  }

  [[nodiscard]] RankCoordinates at(int rank) const {
    const int tp = rank % layout_.tp, dp = rank / layout_.tp % layout_.dp,
              pp = rank / layout_.tp / layout_.dp;
    return {.rank = rank,
            .world_size = layout_.world_size(),
            .tp = {tp, layout_.tp},
            .pp = {pp, layout_.pp},
            .dp = {dp, layout_.dp},
            .cp = {},
            .ep = {},
            .host = "a" + std::to_string(17 + rank / 8),
            .local_rank = rank % 8,
            .device = "cuda:" + std::to_string(rank % 8) + " GPU-6f2e" +
                      std::to_string(1000 + rank) + "-77aa-4c1d-9e0b-1f2e3d4c5b6a 0000:1b:00.0"};
  }

  /// Plants the birth: in backward of `layer` (of the stage, counted from its top) of `rank`, in
  /// `microbatch`.
  void bear(int rank, int microbatch, int layer) {
    const RankCoordinates born = at(rank);
    for (int pp = born.pp.rank; pp >= 0; --pp) {
      const bool is_birth_stage = pp == born.pp.rank;
      for (int below = is_birth_stage ? layer : 0; below < layout_.layers_per_stage; ++below) {
        const bool is_birth_layer = is_birth_stage && below == layer;
        for (int tp = 0; tp < layout_.tp; ++tp) {
          if (!is_birth_layer || tp == born.tp.rank)
            add_crossing(rank_of(tp, pp, born.dp.rank), microbatch, pp, below, "sent");
        }
        for (int tp = 0; tp < layout_.tp; ++tp) {
          add_crossing(rank_of(tp, pp, born.dp.rank), microbatch, pp, below, "received");
        }
      }
      for (int tp = 0; tp < layout_.tp && pp > 0; ++tp) {
        add_message(rank_of(tp, pp, born.dp.rank), rank_of(tp, pp - 1, born.dp.rank), microbatch);
      }
    }
    for (int pp = born.pp.rank; pp >= 0; --pp) {
      for (int tp = 0; tp < layout_.tp; ++tp) {
        for (int dp = 0; dp < layout_.dp; ++dp) {
          const bool is_replica = dp == born.dp.rank;
          const std::size_t from =
              pp == born.pp.rank ? static_cast<std::size_t>(layer) * 6 + 4 : 0;  // its linear_qkv
          Ledger& ledger = ledgers[static_cast<std::size_t>(rank_of(tp, pp, dp))];
          if (is_replica) add_gradients(ledger, from, Phase::grad_local);
          add_gradients(ledger, from, Phase::grad_reduced);
        }
      }
    }
  }

  /// A report with one located origin on `rank`.
  [[nodiscard]] RunReport report(int rank, int microbatch, int layer) {
    bear(rank, microbatch, layer);
    RunReport report;
    report.run_dir = "nanlocator_run/a0";
    report.verdict.run_id = "2026-03-14-gpt-moe-30b";
    report.verdict.iteration = 1284;
    report.verdict.status = VerdictStatus::located;
    report.verdict.origins = {origin(rank, microbatch, layer)};
    report.verdict.rerun = {.done = true, .reproduced = true, .not_restored = {}};
    for (const Ledger& ledger : ledgers) {
      if (!ledger.sightings.empty()) report.verdict.spread.ranks.push_back(ledger.coordinates.rank);
    }
    const Ledger& stage = ledgers[static_cast<std::size_t>(rank)];
    for (const Sighting& seen : stage.sightings) {
      if (seen.phase == Phase::grad_reduced)
        report.verdict.spread.parameters.push_back(seen.parameter);
    }
    report.verdict.spread.first_seen = Phase::backward;
    add_birth(rank, microbatch, layer);
    report.ledgers = ledgers;
    report.histories = {history(rank, layer)};
    report.windows = {{.origin = 0, .windows = {window()}}};
    report.run = RunDescription{
        .run_id = report.verdict.run_id,
        .attempt = 0,
        .started = "2026-03-14T09:26:53Z",
        .nanlocator_version = "0.1.0",
        .torch_version = "2.11.0",
        .integration = "megatron",
        .level = "boundaries",
        .host = "a17",
        .world_size = layout_.world_size(),
        .options = {{"on_bad", "stop"}, {"rerun", "on_bad"}, {"check_params", "false"}},
        .not_covered = {"places inside TransformerEngine's kernels: a re-run names the kernel and "
                        "its arguments"}};
    report.verdict.decision = decide(report.verdict);
    return report;
  }

  [[nodiscard]] Origin origin(int rank, int microbatch, int layer) const {
    const std::string module = module_of(at(rank).pp.rank, layer) + ".self_attention.q_layernorm";
    Origin origin;
    origin.phase = Phase::backward;
    origin.direction = Direction::backward;
    origin.iteration = 1284;
    origin.microbatch = microbatch;
    origin.chunk = 0;
    origin.coordinates = at(rank);
    origin.candidates = {rank};
    origin.data_parallel_replica = at(rank).dp.rank;
    origin.module = module;
    origin.op = "aten::div.Tensor";
    origin.parameter = module_of(at(rank).pp.rank, layer) + ".self_attention.linear_qkv.weight";
    origin.tensor = OriginTensor{.role = "output[0]",
                                 .shape = {64, 128},
                                 .dtype = "bfloat16",
                                 .nan = 3,
                                 .pos_inf = 2,
                                 .neg_inf = 0,
                                 .first_bad = 17 * 128 + 9,
                                 .first_bad_index = {17, 9},
                                 .absmax_finite = 3.21};
    origin.cause = Cause::operator_undefined;
    origin.place_confidence = Confidence::high;
    origin.detail = Detail::derivative_at_pole;
    origin.forward_op = "aten::sqrt";
    origin.code = CodeLine{"model/attention.py", 412, "forward"};
    origin.facts = {{.kind = FactKind::made_from_finite,
                     .phase = Phase::backward,
                     .bad = BadCount{.nan = 3, .pos_inf = 2, .numel = 64 * 128},
                     .module = module,
                     .op = "aten::div.Tensor",
                     .role = "output[0]"},
                    {.kind = FactKind::rerun_identical, .count = 212},
                    {.kind = FactKind::values_at_first_bad, .values = {{"self", 0}, {"other", 0}}},
                    {.kind = FactKind::derivative_of, .op = "aten::sqrt", .node = "SqrtBackward0"}};
    complete(origin);
    origin.bundle = "bundles/step1284-backward-rank" + std::to_string(rank) + "-q_layernorm";
    origin.clean_before = "decoder.final_layernorm.weight";
    return origin;
  }

  std::vector<Ledger> ledgers;

 private:
  [[nodiscard]] int rank_of(int tp, int pp, int dp) const {
    return tp + layout_.tp * (dp + layout_.dp * pp);
  }
  /// Backward visits the layers of a stage from its top; they are numbered from the bottom.
  [[nodiscard]] std::string module_of(int pp, int layer_from_top) const {
    return "decoder.layers." +
           std::to_string((pp + 1) * layout_.layers_per_stage - 1 - layer_from_top);
  }

  void add_parameters(Ledger& ledger) const {
    for (int layer = 0; layer < layout_.layers_per_stage; ++layer) {
      for (const char* name : {"mlp.linear_fc2.weight", "mlp.linear_fc1.weight",
                               "pre_mlp_layernorm.weight", "self_attention.linear_proj.weight",
                               "self_attention.linear_qkv.weight", "input_layernorm.weight"}) {
        ParameterRecord parameter;
        parameter.id = static_cast<std::int64_t>(ledger.backward_order.size());
        parameter.name = module_of(ledger.coordinates.pp.rank, layer) + "." + name;
        parameter.shape = {192, 128};
        ledger.backward_order.push_back(parameter);
      }
    }
    Coverage coverage;
    for (const auto& parameter : ledger.backward_order) coverage.parameters.push_back(parameter.id);
    for (const Phase phase : {Phase::grad_local, Phase::grad_reduced}) {
      coverage.phase = phase;
      ledger.coverage.push_back(coverage);
    }
  }

  static TensorStats stats(std::int64_t seed) {
    TensorStats stats{.numel = 192 * 128, .nan = 1 + seed * 37 % 4099};
    stats.first_bad = seed * 7919 % 20000;
    stats.finite_min = -1;
    stats.finite_max = 1;
    stats.absmin = 0;
    stats.absmax = 1e-3 * static_cast<double>(1 + seed * 31 % 977);
    return stats;
  }

  Sighting& add(Ledger& ledger, Phase phase) const {
    Sighting seen{.iteration = 1284, .phase = phase, .dtype = "bfloat16", .shape = {192, 128}};
    seen.stats =
        stats(ledger.coordinates.rank * 50 + static_cast<std::int64_t>(ledger.sightings.size()));
    ledger.sightings.push_back(seen);
    return ledger.sightings.back();
  }

  void add_crossing(int rank, int microbatch, int pp, int layer, const char* role) {
    Sighting& seen = add(ledgers[static_cast<std::size_t>(rank)], Phase::backward);
    seen.microbatch = microbatch;
    seen.module = module_of(pp, layer) + ".self_attention.linear_qkv";
    seen.op = "all_reduce";
    seen.role = role;
    Crossing crossing{.group = "tp", .members = {}, .peer = {}};
    std::vector<int> members;
    for (int tp = 0; tp < layout_.tp; ++tp) members.push_back(rank_of(tp, pp, at(rank).dp.rank));
    crossing.members = members;
    crossing.sequence = microbatch * 100 + layer;
    seen.crossing = crossing;
  }

  void add_message(int from, int to, int microbatch) {
    for (const int rank : {from, to}) {
      Sighting& seen = add(ledgers[static_cast<std::size_t>(rank)], Phase::backward);
      seen.microbatch = microbatch;
      seen.op = rank == from ? "send" : "recv";
      seen.role = rank == from ? "sent" : "received";
      seen.crossing = Crossing{.group = "pp",
                               .members = {to, from},
                               .peer = rank == from ? to : from,
                               .sequence = microbatch};
    }
  }

  void add_gradients(Ledger& ledger, std::size_t from, Phase phase) const {
    for (std::size_t i = from; i < ledger.backward_order.size(); ++i) {
      Sighting& seen = add(ledger, phase);
      seen.role = "main_grad";
      seen.parameter_id = ledger.backward_order[i].id;
      seen.parameter = ledger.backward_order[i].name;
    }
  }

  static Operand operand(const char* name, double absmax, std::int64_t zeros) {
    Operand operand;
    operand.name = name;
    operand.dtype = "bfloat16";
    operand.shape = {64, 128};
    operand.stats = TensorStats{.numel = 64 * 128, .zeros = zeros, .absmax = absmax};
    operand.at_first_bad = 0.0;
    return operand;
  }

  void add_birth(int rank, int microbatch, int layer) {
    Ledger& ledger = ledgers[static_cast<std::size_t>(rank)];
    Birth birth;
    birth.sighting = {.iteration = 1284, .microbatch = microbatch, .phase = Phase::backward};
    birth.sighting.module = module_of(at(rank).pp.rank, layer) + ".self_attention.q_layernorm";
    birth.sighting.op = "aten::div.Tensor";
    birth.sighting.role = "output[0]";
    birth.sighting.dtype = "bfloat16";
    birth.sighting.shape = {64, 128};
    birth.sighting.stats = {.numel = 64 * 128, .nan = 3, .pos_inf = 2, .first_bad = 17 * 128 + 9};
    birth.node = "SqrtBackward0";
    birth.forward_op = "aten::sqrt";
    birth.operands = {operand("self", 3.2, 0), operand("other", 1.1, 5)};
    birth.stack = {"q_norm.py:41 in forward", "attention.py:312 in forward"};
    birth.reached = {{ReachedKind::parameter, "decoder.layers.0.self_attention.linear_qkv.weight"}};
    birth.replay = ReplayConclusion::deterministic_undefined;
    birth.replay_lines = {"in bfloat16: bad again, the same bits", "in fp64: NaN too"};
    ledger.births.push_back(birth);
  }

  [[nodiscard]] History history(int rank, int layer) const {
    constexpr int kSteps = 48;
    History history{.run_id = "2026-03-14-gpt-moe-30b", .attempt = 0, .coordinates = at(rank)};
    history.phase = "grad_local";
    for (int step = 0; step < kSteps; ++step) history.iterations.push_back(1237 + step);
    const auto& order = ledgers[static_cast<std::size_t>(rank)].backward_order;
    for (std::size_t i = 0; i < order.size(); ++i) {
      ParameterHistory curve{.id = order[i].id, .name = order[i].name};
      for (int step = 0; step < kSteps; ++step) {
        const bool is_bad = step == kSteps - 1 && i >= static_cast<std::size_t>(layer) * 6 + 4;
        const bool is_unseen = step == 20;
        const double climb = i == 2 ? std::exp(0.25 * std::max(0, step - 24)) : 1;
        const double wave = 1 + 0.3 * std::sin(step * 0.7 + static_cast<double>(i));
        const float absmax = static_cast<float>(2e-3 * wave * climb);
        constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();
        curve.absmax.push_back(is_unseen ? kUnseen : absmax);
        curve.norm.push_back(is_unseen ? kUnseen : 20 * absmax);
        curve.nonfinite.push_back(is_bad ? 17 : 0);
      }
      history.parameters.push_back(curve);
    }
    return history;
  }

  static TensorWindow window() {
    TensorWindow window{.name = "output[0]", .dtype = "bfloat16", .shape = {64, 128}, .fixed = {}};
    window.first_row = 8;
    window.first_column = 0;
    window.rows = 16;
    window.columns = 32;
    window.first_bad = {17, 9};
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 32; ++column) {
        double value = std::sin(row * 1.3 + column * 0.37) * std::exp((row - column) * 0.11);
        if (row == 9 && (column == 9 || column == 10)) value = std::nan("");
        if (row == 10 && column == 9) value = std::nan("");
        if (row == 9 && column == 12) value = std::numeric_limits<double>::infinity();
        if (row == 12 && column == 20) value = -std::numeric_limits<double>::infinity();
        window.values.push_back(value);
      }
    }
    return window;
  }

  SampleLayout layout_;
};

inline RunReport located_report() {
  return SampleIncident({}).report(5, 2, 0);
}

inline RunReport clean_report() {
  RunReport report;
  report.verdict.run_id = "2026-03-14-gpt-moe-30b";
  report.verdict.iteration = 7;
  report.verdict.decision = decide(report.verdict);
  return report;
}

/// Ranks 5 and 7 did not answer and ledger 2 is cut off; the evidence leaves two ranks.
inline RunReport partial_report() {
  RunReport report = located_report();
  report.verdict.status = VerdictStatus::partial;
  report.verdict.silent_ranks = {5, 7};
  Origin& origin = report.verdict.origins.front();
  origin.coordinates.reset();
  origin.candidates = {4, 5};
  origin.place_confidence = Confidence::low;
  origin.cause = Cause::unknown;
  origin.op.clear();
  origin.module.clear();
  origin.tensor.reset();
  origin.bundle.clear();
  std::erase_if(report.ledgers, [](const Ledger& it) {
    return it.coordinates.rank == 5 || it.coordinates.rank == 7;
  });
  for (Ledger& ledger : report.ledgers) {
    if (ledger.coordinates.rank == 2) {
      ledger.is_complete = false;
      ledger.sightings.clear();
      ledger.notes = {"line 41 is cut off"};
      std::erase(report.verdict.spread.ranks, 2);
    }
  }
  std::erase(report.verdict.spread.ranks, 5);
  std::erase(report.verdict.spread.ranks, 7);
  report.windows.clear();
  report.histories.clear();
  report.notes = {"ledger_tp0pp0dp1.jsonl: cut off in line 41"};
  report.verdict.decision = decide(report.verdict);
  return report;
}

inline RunReport several_origins_report() {
  SampleIncident incident({.tp = 4, .pp = 4, .dp = 4, .layers_per_stage = 2, .microbatches = 8});
  incident.bear(3, 1, 1);
  RunReport report = incident.report(37, 4, 0);
  Origin weight = incident.origin(3, 1, 1);
  weight.cause = Cause::bad_weight;
  weight.phase = Phase::params_before;
  weight.direction = Direction::none;
  weight.microbatch.reset();
  weight.op.clear();
  weight.module.clear();
  weight.bundle.clear();
  complete(weight);
  Origin transfer = incident.origin(18, 6, 0);
  transfer.cause = Cause::pipeline_transfer;
  complete(transfer);
  transfer.coordinates.reset();
  transfer.candidates = {18, 34};
  transfer.place_confidence = Confidence::medium;
  transfer.bundle.clear();
  report.verdict.origins.insert(report.verdict.origins.begin(), weight);
  report.verdict.origins.push_back(transfer);
  report.windows.front().origin = 1;
  report.verdict.decision = decide(report.verdict);
  return report;
}

/// Every text is an attack on the page, its JSON, a reader's eyes or a shell.
inline RunReport hostile_report() {
  const std::string attack = "</script><script>document.title='owned'</script>";
  const std::string image = "<img src=x onerror=\"document.title='owned'\">";
  RunReport report = located_report();
  report.run_dir = "run'; touch owned; '";
  report.verdict.run_id = attack;
  report.verdict.notes = {image,
                          "]]>--><!-- {{data}} {{script}} \xe2\x80\xa8 \xe2\x80\xae evil \xff\xfe"};
  Origin& origin = report.verdict.origins.front();
  origin.module = attack;
  origin.op = image;
  origin.parameter = attack;
  origin.facts.push_back({.kind = FactKind::stated, .text = attack + std::string(3000, 'x')});
  origin.facts.push_back({.kind = FactKind::stated_action, .text = image});
  origin.action = Action::stated;
  origin.bundle = "bundles/$(touch owned)`touch owned`";
  origin.coordinates->host = image;
  for (Ledger& ledger : report.ledgers) {
    ledger.coordinates.host = image;
    ledger.notes = {attack};
    for (Sighting& seen : ledger.sightings) {
      seen.module = attack;
      seen.role = seen.crossing ? seen.role : image;
      if (!seen.parameter.empty()) seen.parameter = attack + seen.parameter;
    }
    for (ParameterRecord& parameter : ledger.backward_order) {
      parameter.name = attack + parameter.name;
    }
    for (Birth& birth : ledger.births) {
      Operand operand;
      operand.name = attack;
      operand.dtype = image;
      operand.at_first_bad = std::nan("");
      birth.operands = {operand};
      birth.stack = {image};
    }
  }
  for (History& history : report.histories) {
    for (ParameterHistory& parameter : history.parameters) parameter.name = attack + parameter.name;
  }
  report.windows.front().windows.front().name = attack;
  report.run->options = {{image, attack}};
  report.run->not_covered = {attack};
  report.verdict.decision = decide(report.verdict);
  return report;
}

/// About 50 sightings on each rank.
inline RunReport large_report(int tp, int pp, int dp) {
  SampleIncident incident({.tp = tp, .pp = pp, .dp = dp, .layers_per_stage = 4, .microbatches = 8});
  const int rank = tp * dp * (pp - 1) + tp * (dp / 2) + 1;
  RunReport report = incident.report(rank, 3, 0);
  std::size_t most = 0;
  for (const Ledger& ledger : report.ledgers) most = std::max(most, ledger.sightings.size());
  // Fault and reduction left fewer sightings on some ranks: fill up to the same number.
  for (Ledger& ledger : report.ledgers) {
    for (std::size_t i = 0; ledger.sightings.size() < 50; ++i) {
      Sighting seen = ledger.sightings.empty() ? Sighting{} : ledger.sightings[i % most];
      seen.iteration = 1284;
      seen.phase = Phase::grad_norm;
      seen.parameter = ledger.backward_order[i % ledger.backward_order.size()].name;
      seen.role = "main_grad";
      seen.crossing.reset();
      seen.microbatch.reset();
      seen.stats.numel = 1 << 20;
      seen.stats.nan = static_cast<std::int64_t>(1 + i * 131 +
                                                 static_cast<std::size_t>(ledger.coordinates.rank));
      seen.stats.first_bad = static_cast<std::int64_t>(
          (i * 7919 + static_cast<std::size_t>(ledger.coordinates.rank) * 104729) % (1 << 20));
      seen.stats.absmax = 1e-4 * static_cast<double>(1 + seen.stats.first_bad);
      ledger.sightings.push_back(seen);
    }
  }
  report.verdict.decision = decide(report.verdict);
  return report;
}

}  // namespace nanlocator::testing
