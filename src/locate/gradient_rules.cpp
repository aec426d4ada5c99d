#include "locate/gradient_rules.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "locate/backward_flow.hpp"
#include "locate/lanes.hpp"
#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// More isolated bad parameters on one rank than this are not the corruption of a single element.
/// They may be a flow through a model whose structure the rules misread, so the confidence drops.
constexpr std::size_t kFewIsolated = 4;

class GradientRules {
 public:
  explicit GradientRules(Findings& findings) : findings_(findings) {}

  void judge_local() {
    int replicas_bad_from_the_start = 0;
    for (const auto& [replica, places] : findings_.replicas()) {
      const bool is_bad = std::ranges::any_of(places, [](const Place* place) {
        return place->evidence != nullptr && !place->evidence->bad(Phase::grad_local).empty();
      });
      if (!is_bad || findings_.has_bad_weights(replica)) continue;
      std::vector<Lane> lanes = make_lanes(findings_.incident(), places, Phase::grad_local);
      const auto flow = judge_flow(lanes, places, Phase::grad_local);
      if (flow && flow->may_come_from_forward) ++replicas_bad_from_the_start;
      for (Lane& lane : lanes) judge_isolated(lane, places, Phase::grad_local);
    }
    if (findings_.replicas().size() > 1 &&
        replicas_bad_from_the_start == std::ssize(findings_.replicas())) {
      findings_.add_fact({.kind = FactKind::all_replicas_bad});
    }
  }

  /// `keys` are bad in `phase`, and not every rank reported the phase before: looks for a flow
  /// through backward in the state common to all ranks.
  void judge_merged(const std::set<ParameterKey>& keys, Phase phase) {
    if (keys.empty()) return;
    Places places;
    for (const Place& place : findings_.incident().places()) places.push_back(&place);
    std::vector<Lane> lanes;
    lanes.push_back(make_merged_lane(findings_.incident(), places, phase,
                                     [&](const RankEvidence& rank, const BadParameter& bad) {
                                       return keys.contains(key_of(rank, bad));
                                     }));
    const std::size_t first_new = findings_.found().size();
    const auto flow = judge_flow(lanes, places, phase);
    judge_isolated(lanes.front(), places, phase);

    std::set<int> blind(findings_.incident().unplaced().begin(),
                        findings_.incident().unplaced().end());
    for (const Place& place : findings_.incident().places()) {
      if (findings_.is_blind(place, Phase::grad_local)) blind.insert(place.rank);
    }
    for (std::size_t i = first_new; i < findings_.found().size(); ++i) {
      Origin& origin = findings_.found()[i].origin;
      origin.facts.push_back(
          {.kind = FactKind::unseen_before, .ranks = sorted(blind), .phase = phase});
      if (flow && flow->bad_steps > 1 && findings_.found()[i].found_in == FoundIn::flow) {
        keep_unseen_replicas(origin);
        if (flow->may_come_from_forward) keep_replicas_with_bad_loss(origin);
      }
    }
  }

 private:
  /// The nearest clean witnesses on the same rank, in backward order.
  static void set_neighbours(Origin& origin, const Stage& stage, const Cell& cell,
                             std::size_t step) {
    for (std::size_t i = step; i-- > 0;) {
      if (!is_clean_witness(stage, cell.steps[i])) continue;
      origin.clean_before = cell.steps[i].parameter->name;
      break;
    }
    for (std::size_t i = step + 1; i < cell.steps.size(); ++i) {
      if (!is_clean_witness(stage, cell.steps[i])) continue;
      origin.clean_after = cell.steps[i].parameter->name;
      break;
    }
  }

  bool is_cell_explained(const Cell& cell) const {
    return std::ranges::any_of(cell.ranks,
                               [&](int rank) { return findings_.is_explained_by_crossings(rank); });
  }

  /// Adds gradients' evidence to a fault in backward that was seen in a crossing: the first bad
  /// parameter and the clean one before it.
  void hand_to_boundary_origin(const Stage& stage, const Cell& cell, std::size_t step) {
    for (FoundOrigin& found : findings_.found()) {
      Origin& origin = found.origin;
      if (origin.phase != Phase::backward || !found.first_bad_gradient.empty()) continue;
      const bool is_of_cell = std::ranges::any_of(cell.ranks, [&](int rank) {
        return std::ranges::binary_search(origin.candidates, rank);
      });
      if (!is_of_cell) continue;
      found.first_bad_gradient = cell.steps[step].parameter->name;
      set_neighbours(origin, stage, cell, step);
      Fact fact{.kind = FactKind::first_bad_gradient, .parameter = found.first_bad_gradient};
      if (!origin.clean_before.empty()) fact.names = {origin.clean_before};
      origin.facts.push_back(std::move(fact));
    }
  }

  /// Finds one flow for all lanes, because a NaN may have crossed between them (context-parallel
  /// attention, expert dispatch). Marks other lanes' experts as explained.
  std::optional<Flow> judge_flow(std::vector<Lane>& lanes, const Places& places, Phase phase) {
    std::vector<std::optional<Flow>> flows;
    for (Lane& lane : lanes) flows.push_back(find_flow(lane));
    const Lane* first_lane = nullptr;
    const Flow* first = nullptr;
    const auto stage_index = [](const Lane& lane, const Flow& flow) {
      return lane.stages[flow.start.stage].index;
    };
    bool may_come_from_forward = false;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      if (!flows[i]) continue;
      may_come_from_forward |= flows[i]->may_come_from_forward;
      if (first == nullptr || std::pair(-stage_index(lanes[i], *flows[i]), flows[i]->start.step) <
                                  std::pair(-stage_index(*first_lane, *first), first->start.step)) {
        first = &*flows[i];
        first_lane = &lanes[i];
      }
    }
    if (first == nullptr) return std::nullopt;

    Flow flow = *first;
    flow.may_come_from_forward = may_come_from_forward;
    if (lanes.size() > 1) {
      std::set<int> stages(flow.candidate_stages.begin(), flow.candidate_stages.end());
      for (std::size_t i = 0; i < lanes.size(); ++i) {
        if (flows[i] && stage_index(lanes[i], *flows[i]) == stage_index(*first_lane, flow)) {
          stages.insert(flows[i]->candidate_stages.begin(), flows[i]->candidate_stages.end());
        }
      }
      std::set<int> ranks;
      for (const Place* place : places) {
        if (may_come_from_forward || stages.contains(place->pp)) ranks.insert(place->rank);
      }
      flow.candidates = sorted(ranks);
      flow.is_one_tp_rank = false;
      explain_crossings(lanes, *first_lane, flow);
    }
    add_flow_origin(*first_lane, flow, places, phase, lanes.size());
    return flow;
  }

  /// With expert parallelism, a lane's token gradients pass through other lanes' experts: those are
  /// bad although their own lane's dense parameters are clean.
  static void explain_crossings(std::vector<Lane>& lanes, const Lane& first, const Flow& flow) {
    const Stage& start_stage = first.stages[flow.start.stage];
    const std::string_view start_layer =
        layer_of(start_stage.cells[flow.start.cell].steps[flow.start.step].parameter->name);
    for (Lane& lane : lanes) {
      for (Stage& stage : lane.stages) {
        if (stage.index > start_stage.index) continue;
        for (Cell& cell : stage.cells) {
          bool is_reached = stage.index < start_stage.index;
          const bool has_layer = std::ranges::any_of(cell.steps, [&](const Step& step) {
            return layer_of(step.parameter->name) == start_layer;
          });
          for (Step& step : cell.steps) {
            is_reached |= !has_layer || layer_of(step.parameter->name) == start_layer;
            step.is_in_flow |= is_reached && step.parameter->may_be_untouched;
          }
        }
      }
    }
  }

  /// True if one of the ranks scanned the step's losses and no rank saw a bad one.
  static bool has_finite_loss(const Places& places) {
    bool has_scanned = false;
    for (const Place* place : places) {
      if (place->evidence == nullptr) continue;
      has_scanned = has_scanned || place->evidence->scanned(Phase::loss);
      const auto& sightings = place->evidence->ledger().sightings;
      if (std::ranges::find(sightings, Phase::loss, &Sighting::phase) != sightings.end()) {
        return false;
      }
    }
    return has_scanned;
  }

  void add_flow_origin(const Lane& lane, const Flow& flow, const Places& places, Phase phase,
                       std::size_t lane_count) {
    const Stage& stage = lane.stages[flow.start.stage];
    const Cell& cell = stage.cells[flow.start.cell];
    const Step& start = cell.steps[flow.start.step];
    if (is_cell_explained(cell)) {
      if (!flow.may_come_from_forward) hand_to_boundary_origin(stage, cell, flow.start.step);
      return;
    }
    const bool is_anyone_missing = findings_.is_anyone_blind(places, phase);
    std::set<int> candidates(flow.candidates.begin(), flow.candidates.end());
    const bool has_come_from_nobody =
        phase == Phase::grad_local && findings_.have_only_finite_crossings(places);
    if (has_come_from_nobody) {
      std::erase_if(candidates,
                    [&](int rank) { return findings_.incident().find(rank)->bad(phase).empty(); });
    }
    if (!flow.is_one_tp_rank) {
      candidates.insert(findings_.incident().unplaced().begin(),
                        findings_.incident().unplaced().end());
    }
    const bool is_one_rank = candidates.size() == 1;
    const bool is_sure = is_one_rank && !is_anyone_missing && phase == Phase::grad_local &&
                         (lane.is_order_observed || lane.stages.size() == 1);
    Origin origin = findings_.make_origin(phase, Cause::unknown,
                                          is_sure                      ? Confidence::high
                                          : phase == Phase::grad_local ? Confidence::medium
                                                                       : Confidence::low,
                                          sorted(candidates));
    const std::string& name = start.parameter->name;
    const std::int64_t count = flow.bad_steps;
    Facts& facts = origin.facts;
    if (flow.may_come_from_forward) {
      // An operation that changes all gradients after backward hides which was bad first, unless
      // only one is bad.
      const bool is_loss_finite = has_finite_loss(places);
      if (is_one_rank && (!is_loss_finite || count == 1)) {
        set_parameter(origin, name, *start.sighting);
      }
      facts.push_back({.kind = is_loss_finite ? FactKind::all_gradients_bad_loss_finite
                                              : FactKind::all_gradients_bad,
                       .count = count,
                       .parameter = name});
      if (phase == Phase::grad_local) facts.push_back({.kind = FactKind::before_collective});
    } else {
      set_parameter(origin, name, *start.sighting);
      set_neighbours(origin, stage, cell, flow.start.step);
      // A stretch confined to one tensor-parallel rank did not travel with activations' gradients.
      const bool has_travelled = flow.reached_other_tp_ranks || stage.cells.size() == 1;
      if (has_travelled) origin.direction = Direction::backward;
      Fact seen{.kind = FactKind::gradients_bad_to_the_end, .count = count, .parameter = name};
      if (!origin.clean_before.empty()) seen.names = {origin.clean_before};
      facts.push_back(std::move(seen));
      if (!has_travelled) {
        facts.push_back({.kind = FactKind::stayed_on_rank});
      } else if (flow.is_one_tp_rank) {
        facts.push_back({.kind = FactKind::sharded_first_here});
      } else if (!is_one_rank && stage.cells.size() > 1) {
        facts.push_back({.kind = FactKind::no_rank_earlier});
      }
      if (has_come_from_nobody) {
        facts.push_back({.kind = FactKind::nothing_received});
      } else if (flow.is_at_stage_boundary && flow.candidate_stages.size() > 1) {
        facts.push_back({.kind = FactKind::at_stage_boundary});
      }
      if (lane_count > 1) facts.push_back({.kind = FactKind::exchanged_within_layer});
    }
    if (!lane.is_order_observed) {
      facts.push_back({.kind = FactKind::order_not_observed});
    }
    if (is_anyone_missing) findings_.add_missing_evidence(origin, places, phase);
    facts.push_back({.kind = FactKind::missing_activations});
    findings_.add_origin(std::move(origin), FoundIn::flow);
  }

  // ---- isolated bad gradients ----

  struct Isolated {
    StepPlace place;
    std::set<int> ranks;         // candidates
    bool is_everywhere = false;  // a duplicate that is bad on all tensor-parallel ranks
    bool may_have_arrived = false;
    bool is_vouched_by_embeddings = false;
  };

  void judge_isolated(const Lane& lane, const Places& places, Phase phase) {
    std::map<int, std::size_t> per_rank;
    const std::size_t first_new = findings_.found().size();
    for (std::size_t s = 0; s < lane.stages.size(); ++s) {
      const Stage& stage = lane.stages[s];
      std::set<std::string_view> done;  // duplicates that are bad on all ranks: one origin each
      for (std::size_t c = 0; c < stage.cells.size(); ++c) {
        for (std::size_t i = 0; i < stage.cells[c].steps.size(); ++i) {
          const Step& step = stage.cells[c].steps[i];
          if (step.status != Status::bad || step.is_in_flow) continue;
          if (done.contains(step.parameter->name)) continue;
          if (is_cell_explained(stage.cells[c])) continue;
          if (++per_rank[stage.cells[c].ranks.front()] > Findings::kMostIsolatedPerRank) continue;
          if (findings_.is_full(phase)) continue;
          const Isolated isolated = describe_isolated(lane, {s, c, i}, places, phase);
          if (isolated.is_everywhere) done.insert(step.parameter->name);
          add_isolated_origin(lane, isolated, places, phase);
        }
      }
    }
    for (std::size_t i = first_new; i < findings_.found().size(); ++i) {
      Origin& origin = findings_.found()[i].origin;
      const auto count = per_rank[origin.candidates.front()];
      if (count <= kFewIsolated) continue;
      origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
      origin.facts.push_back(
          {.kind = FactKind::many_isolated, .count = static_cast<std::int64_t>(count)});
    }
    for (const auto& [rank, count] : per_rank) {
      if (count > Findings::kMostIsolatedPerRank) findings_.note_more_isolated(rank);
    }
    const bool has_flow = std::ranges::any_of(lane.stages, [](const Stage& stage) {
      return std::ranges::any_of(stage.cells, [](const Cell& cell) {
        return std::ranges::any_of(cell.steps, &Step::is_in_flow);
      });
    });
    judge_unplaced(lane, places, phase, has_flow);
  }

  Isolated describe_isolated(const Lane& lane, StepPlace at, const Places& places,
                             Phase phase) const {
    const Stage& stage = lane.stages[at.stage];
    const Cell& cell = stage.cells[at.cell];
    const Step& step = cell.steps[at.step];
    Isolated isolated{.place = at, .ranks = {cell.ranks.begin(), cell.ranks.end()}};
    if (stage.cells.size() == 1) return isolated;

    std::set<int> all, bad_or_blind;
    bool is_bad_on_all = true;
    for (const Cell& other : stage.cells) {
      all.insert(other.ranks.begin(), other.ranks.end());
      const auto found = std::ranges::find_if(other.steps, [&](const Step& each) {
        return each.parameter->name == step.parameter->name;
      });
      const Status status = found == other.steps.end() ? Status::unknown : found->status;
      is_bad_on_all &= status != Status::clean;
      if (status != Status::clean) bad_or_blind.insert(other.ranks.begin(), other.ranks.end());
    }
    const bool is_duplicate = step.parameter->is_tp_duplicate;
    if (is_duplicate && is_bad_on_all) {
      isolated.is_everywhere = true;
      isolated.ranks = bad_or_blind;
    } else if (is_embedding(*step.parameter) &&
               (is_duplicate ? bad_or_blind == isolated.ranks
                             : has_clean_duplicate_embedding(cell))) {
      isolated.is_vouched_by_embeddings = true;
    } else if ((is_duplicate || step.parameter->may_be_untouched) &&
               !has_clean_witness_after(lane, at) &&
               (phase != Phase::grad_local || !findings_.have_only_finite_crossings(places))) {
      // No later gradient of backward shows that activations' gradients were clean: with sequence
      // parallelism, another rank's partial sum could have put the bad value here.
      isolated.ranks = all;
      isolated.may_have_arrived = true;
    }
    return isolated;
  }

  // Embeddings are added before their sum is scattered over the sequence, and backward gathers it
  // first (language_model_embedding.py). A bad value from the layers is therefore in the position
  // embeddings' gradient on every tensor-parallel rank; if one of those copies is clean, it came
  // from elsewhere.
  static bool is_embedding(const ParameterRecord& parameter) {
    return parameter.name.starts_with("embedding.");
  }

  static bool has_clean_duplicate_embedding(const Cell& cell) {
    return std::ranges::any_of(cell.steps, [](const Step& step) {
      return is_embedding(*step.parameter) && step.parameter->is_tp_duplicate &&
             !step.parameter->may_be_untouched && step.status == Status::clean;
    });
  }

  static bool has_clean_witness_after(const Lane& lane, StepPlace at) {
    const int tp = lane.stages[at.stage].cells[at.cell].tp;
    const auto& own = lane.stages[at.stage].cells[at.cell].steps;
    const std::string_view layer = layer_of(own[at.step].parameter->name);
    for (std::size_t i = at.step + 1; i < own.size(); ++i) {
      // If the order was not observed, only other layers are known to come after.
      const bool is_after = lane.is_order_observed || layer_of(own[i].parameter->name) != layer;
      if (is_after && is_clean_witness(lane.stages[at.stage], own[i])) return true;
    }
    for (std::size_t s = at.stage + 1; s < lane.stages.size(); ++s) {
      for (const Cell& cell : lane.stages[s].cells) {
        if (cell.tp != tp) continue;
        for (const Step& step : cell.steps) {
          if (is_clean_witness(lane.stages[s], step)) return true;
        }
      }
    }
    return false;
  }

  void add_isolated_origin(const Lane& lane, const Isolated& isolated, const Places& places,
                           Phase phase) {
    const Stage& stage = lane.stages[isolated.place.stage];
    const Cell& cell = stage.cells[isolated.place.cell];
    const Step& step = cell.steps[isolated.place.step];
    const bool is_local = phase == Phase::grad_local;
    const bool is_anyone_missing = findings_.is_anyone_blind(places, phase);
    Origin origin =
        findings_.make_origin(phase, Cause::unknown,
                              !is_local                                        ? Confidence::low
                              : is_anyone_missing || isolated.may_have_arrived ? Confidence::medium
                                                                               : Confidence::high,
                              sorted(isolated.ranks));
    set_parameter(origin, step.parameter->name, *step.sighting);
    set_neighbours(origin, stage, cell, isolated.place.step);
    Facts& facts = origin.facts;
    facts.push_back({.kind = FactKind::gradient_bad,
                     .ranks = sorted(isolated.ranks),
                     .phase = phase,
                     .bad = bad_count(step.sighting->stats),
                     .parameter = step.parameter->name});
    if (is_local) add_other_replicas(origin, *step.parameter, lane, stage, cell);
    if (!origin.clean_after.empty()) {
      Fact clean{.kind = FactKind::neighbours_clean, .parameter = origin.clean_after};
      if (!origin.clean_before.empty()) clean.names = {origin.clean_before};
      facts.push_back(std::move(clean));
    }
    if (isolated.is_everywhere) {
      facts.push_back({.kind = FactKind::same_on_tensor_parallel_copies});
    } else if (isolated.is_vouched_by_embeddings) {
      facts.push_back({.kind = FactKind::embedding_copy_clean});
    } else if (isolated.may_have_arrived) {
      facts.push_back({.kind = FactKind::may_have_arrived});
    } else if (step.parameter->is_tp_duplicate && cell.tp > 0) {
      facts.push_back({.kind = FactKind::left_out_of_norm});
    }
    if (auto near = near_overflow(*step.sighting)) facts.push_back(*std::move(near));
    if (is_anyone_missing) findings_.add_missing_evidence(origin, places, phase);
    facts.push_back({.kind = FactKind::missing_gradient_inputs});
    findings_.add_origin(std::move(origin), FoundIn::isolated);
  }

  void add_other_replicas(Origin& origin, const ParameterRecord& parameter, const Lane& lane,
                          const Stage& stage, const Cell& cell) const {
    std::int64_t clean = 0, bad = 0;
    for (const Place* place : findings_.groups().at({cell.tp, stage.pp})) {
      if (place->evidence == nullptr || (place->dp == lane.dp && place->cp == lane.cp)) continue;
      switch (place->evidence->status(Phase::grad_local, parameter.name)) {
        case Status::clean:
          ++clean;
          break;
        case Status::bad:
          ++bad;
          break;
        case Status::unknown:
          break;
      }
    }
    if (clean + bad == 0) return;
    origin.facts.push_back({.kind = FactKind::other_replicas, .count = clean, .of = clean + bad});
  }

  void judge_unplaced(const Lane& lane, const Places& places, Phase phase, bool has_flow) {
    if (lane.unplaced.empty()) return;
    if (has_flow) {
      findings_.add_fact({.kind = FactKind::parameters_without_order,
                          .count = static_cast<std::int64_t>(lane.unplaced.size()),
                          .parameter = lane.unplaced.front().bad->name});
      return;
    }
    for (std::size_t i = 0; i < lane.unplaced.size() && i < Findings::kMostIsolatedPerRank; ++i) {
      const Unplaced& entry = lane.unplaced[i];
      if (std::ranges::any_of(
              entry.ranks, [&](int rank) { return findings_.is_explained_by_crossings(rank); })) {
        continue;
      }
      std::set<int> ranks(entry.ranks.begin(), entry.ranks.end());
      // Without an order, the gradient may have been received from any rank that exchanges with
      // this one.
      for (const Place* place : places) {
        if (place->dp == lane.dp || phase != Phase::grad_local) ranks.insert(place->rank);
      }
      ranks.insert(findings_.incident().unplaced().begin(), findings_.incident().unplaced().end());
      Origin origin = findings_.make_origin(phase, Cause::unknown, Confidence::low, sorted(ranks));
      set_parameter(origin, entry.bad->name, *entry.bad->sighting);
      origin.facts.push_back({.kind = FactKind::gradient_without_order,
                              .ranks = entry.ranks,
                              .bad = bad_count(entry.bad->sighting->stats)});
      findings_.add_origin(std::move(origin), FoundIn::isolated);
    }
  }

  /// A bad loss makes every gradient of its replica bad before replicas exchange anything. If the
  /// other replicas' losses are finite, only the replicas with a bad loss remain candidates.
  void keep_replicas_with_bad_loss(Origin& origin) const {
    std::set<int> seen, bad, ranks;
    std::int64_t bad_values = 0;
    for (const Place& place : findings_.incident().places()) {
      if (place.evidence == nullptr || !place.evidence->scanned(Phase::loss)) continue;
      const int replica = findings_.incident().replica_of(place);
      seen.insert(replica);
      for (const Sighting* loss : place.evidence->bad_losses()) {
        bad.insert(replica);
        ranks.insert(place.rank);
        bad_values += loss->stats.nonfinite();
      }
    }
    std::vector<int> kept;
    std::size_t placed = 0;
    for (const Place& place : findings_.incident().places()) {
      if (!std::ranges::binary_search(origin.candidates, place.rank)) continue;
      ++placed;
      const int replica = findings_.incident().replica_of(place);
      if (!seen.contains(replica)) return;  // its loss may have been bad, too
      if (bad.contains(replica)) kept.push_back(place.rank);
    }
    if (kept.empty() || placed != origin.candidates.size() || kept.size() == placed) return;
    set_candidates(origin, findings_.incident(), kept);
    origin.facts.push_back(
        {.kind = FactKind::other_losses_finite, .ranks = sorted(ranks), .count = bad_values});
  }

  /// A stretch of many parameters was not made by a collective: some replica had it before.
  /// Replicas whose ranks all reported clean gradients are excluded.
  void keep_unseen_replicas(Origin& origin) const {
    if (!findings_.incident().unplaced().empty()) return;
    std::set<int> unseen;
    for (const Place& place : findings_.incident().places()) {
      if (findings_.is_blind(place, Phase::grad_local))
        unseen.insert(findings_.incident().replica_of(place));
    }
    std::vector<int> kept;
    for (const Place& place : findings_.incident().places()) {
      if (unseen.contains(findings_.incident().replica_of(place)) &&
          std::ranges::binary_search(origin.candidates, place.rank)) {
        kept.push_back(place.rank);
      }
    }
    if (kept.empty() || kept.size() == origin.candidates.size()) return;
    set_candidates(origin, findings_.incident(), kept);
    origin.facts.push_back({.kind = FactKind::only_unseen_replicas_left});
  }

  Findings& findings_;
};

}  // namespace

void judge_local_gradients(Findings& findings) {
  GradientRules(findings).judge_local();
}

void judge_merged_gradients(Findings& findings, const std::set<ParameterKey>& keys, Phase phase) {
  GradientRules(findings).judge_merged(keys, phase);
}

}  // namespace nanlocator::inline locate_room
