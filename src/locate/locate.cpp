#include "nanlocator/locate/locate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "locate/backward_flow.hpp"
#include "locate/birth_origins.hpp"
#include "locate/evidence.hpp"
#include "locate/lanes.hpp"
#include "locate/origin_text.hpp"

namespace nanlocator {
namespace {

/// A verdict is read by people: what one fault can fill with thousands of entries is cut here, and
/// a note says so.
constexpr std::size_t kMostIsolatedPerRank = 16;
/// More bad parameters by themselves on one rank than this are no single element's corruption, and
/// may be a flow through a model whose structure the rules misread: not a sure thing any more.
constexpr std::size_t kFewIsolated = 4;
constexpr std::size_t kMostOriginsPerPhase = 64;
constexpr std::size_t kMostNotes = 32;

constexpr std::array kJudgedPhases = {Phase::params_before, Phase::grad_local, Phase::grad_reduced,
                                      Phase::grad_norm, Phase::params_after};

/// What the ranks hold in common: tensor-parallel duplicates over tp, tied parameters over the
/// pipeline (their gradients are reduced there, parallel to the data-parallel reduction).
struct ParameterKey {
  std::string name;  // "" for all tied parameters: the copies have different names
  int tp = -1;       // -1: of every tensor-parallel rank
  int pp = -1;       // -1: of every stage
  friend auto operator<=>(const ParameterKey&, const ParameterKey&) = default;
};

ParameterKey key_of(const RankEvidence& rank, const BadParameter& bad) {
  ParameterKey key{bad.name, rank.coordinates().tp.rank, rank.coordinates().pp.rank};
  if (!bad.position) return key;
  const ParameterRecord& parameter = rank.parameter(*bad.position);
  if (parameter.is_tp_duplicate) key.tp = -1;
  if (parameter.is_tied) {
    key.name.clear();
    key.pp = -1;
  }
  return key;
}

struct BadOnRank {
  const RankEvidence* rank = nullptr;
  const BadParameter* bad = nullptr;
};
using BadByKey = std::map<ParameterKey, std::vector<BadOnRank>>;

using Places = std::vector<const Place*>;

/// Sorted by rank, each once.
std::vector<int> sorted(std::set<int> ranks) {
  return {ranks.begin(), ranks.end()};
}

class Locator {
 public:
  Locator(std::span<const Ledger> ledgers, int world_size) : incident_(ledgers, world_size) {
    for (const RankEvidence& rank : incident_.ranks()) {
      for (const Phase phase : kJudgedPhases) {
        for (const BadParameter& bad : rank.bad(phase)) {
          bad_[phase][key_of(rank, bad)].push_back({&rank, &bad});
          remember_order(rank, bad);
        }
      }
    }
    for (const Place& place : incident_.places()) {
      replicas_[incident_.replica_of(place)].push_back(&place);
      groups_[{place.tp, place.pp}].push_back(&place);
    }
  }

  Verdict run() {
    if (!incident_.ranks().empty()) {
      const Ledger& first = incident_.ranks().front().ledger();
      verdict_.run_id = first.run_id;
      verdict_.iteration = first.iteration;
    }
    judge_weights();
    // A bad weight makes everything after it bad; what else may be wrong cannot be told apart.
    if (bad_[Phase::params_before].empty()) {
      judge_local_gradients();
      judge_reduced_gradients();
      judge_norm_gradients();
      judge_updated_parameters();
      judge_norm_value();
      judge_losses();
    }
    adopt_births();
    describe_spread();
    add_status_and_notes();
    return std::move(verdict_);
  }

 private:
  // ---- order ----

  /// Backward order over stages: (−stage, position) of the lowest rank that holds the parameter.
  using Order = std::pair<std::int64_t, std::size_t>;

  void remember_order(const RankEvidence& rank, const BadParameter& bad) {
    Order order{std::numeric_limits<std::int64_t>::max(), 0};  // of unknown place: last
    if (bad.position) {
      const std::int64_t stage =
          std::int64_t{rank.parameter(*bad.position).chunk} * incident_.pipeline_size() +
          rank.coordinates().pp.rank;
      order = {-stage, *bad.position};
    }
    order_.try_emplace(bad.name, order);
  }

  std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>> in_backward_order(
      const BadByKey& keys) const {
    std::vector<std::pair<const ParameterKey*, const std::vector<BadOnRank>*>> ordered;
    for (const auto& [key, ranks] : keys) ordered.emplace_back(&key, &ranks);
    std::ranges::stable_sort(
        ordered, {}, [&](const auto& entry) { return order_.at(entry.second->front().bad->name); });
    return ordered;
  }

  // ---- who could say more ----

  /// The ranks that may hold what `key` means.
  Places holders_of(const ParameterKey& key) const {
    Places holders;
    const auto add = [&](const Places& group) {
      holders.insert(holders.end(), group.begin(), group.end());
    };
    if (key.tp != -1 && key.pp != -1) {
      if (const auto found = groups_.find({key.tp, key.pp}); found != groups_.end()) {
        add(found->second);
      }
      return holders;
    }
    for (const auto& [where, group] : groups_) {
      const bool is_held =
          (key.tp == -1 || key.tp == where.first) && (key.pp == -1 || key.pp == where.second);
      if (is_held) add(group);
    }
    return holders;
  }

  bool is_blind(const Place& place, Phase phase) const {
    return place.evidence == nullptr || !place.evidence->looked_at(phase);
  }

  /// Ranks that may hold `key` and said nothing of it in `phase`.
  std::set<int> blind_holders(const ParameterKey& key, Phase phase) const {
    std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
    for (const Place* place : holders_of(key)) {
      if (is_blind(*place, phase)) blind.insert(place->rank);
    }
    return blind;
  }

  bool is_anyone_blind(const Places& places, Phase phase) const {
    return !incident_.unplaced().empty() ||
           std::ranges::any_of(places, [&](const Place* place) { return is_blind(*place, phase); });
  }

  // ---- origins ----

  Origin make_origin(Phase phase, Cause cause, Confidence confidence,
                     const std::vector<int>& candidates) const {
    Origin origin;
    origin.phase = phase;
    origin.iteration = verdict_.iteration;
    origin.cause = cause;
    origin.confidence = confidence;
    origin.candidates = candidates;
    if (candidates.size() == 1) {
      if (const auto* rank = incident_.find(candidates.front())) {
        origin.coordinates = rank->coordinates();
      }
    }
    origin.data_parallel_replica = shared_replica(candidates);
    return origin;
  }

  std::optional<int> shared_replica(const std::vector<int>& candidates) const {
    std::optional<int> replica;
    for (const int rank : candidates) {
      const auto found = std::ranges::lower_bound(incident_.places(), rank, {}, &Place::rank);
      if (found == incident_.places().end() || found->rank != rank) return std::nullopt;
      if (replica && *replica != found->dp) return std::nullopt;
      replica = found->dp;
    }
    return replica;
  }

  static void set_parameter(Origin& origin, const std::string& name, const Sighting& sighting) {
    origin.parameter = name;
    origin.chunk = sighting.chunk;
    origin.tensor = tensor_of(sighting);
  }

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

  /// True, and the origin counted, where the phase has as many as a verdict lists.
  bool is_full(Phase phase) {
    auto& count = origins_per_phase_[phase];
    if (count < kMostOriginsPerPhase) return false;
    ++count;
    return true;
  }

  /// Keeps a verdict readable when thousands of tensors are bad at once.
  void add_origin(Origin origin) {
    auto& count = origins_per_phase_[origin.phase];
    if (++count <= kMostOriginsPerPhase) verdict_.origins.push_back(std::move(origin));
  }

  // ---- params_before ----

  void judge_weights() {
    for (const auto& [key, bad] : in_backward_order(bad_[Phase::params_before])) {
      if (is_full(Phase::params_before)) continue;
      const std::set<int> ranks = ranks_of(*bad);
      const std::set<int> blind = blind_holders(*key, Phase::params_before);
      std::set<int> candidates = ranks;
      candidates.insert(blind.begin(), blind.end());
      std::set<int> clean;
      for (const Place* place : holders_of(*key)) {
        if (place->evidence == nullptr) continue;
        if (place->evidence->status(Phase::params_before, bad->front().bad->name) ==
            Status::clean) {
          clean.insert(place->rank);
        }
      }
      Origin origin =
          make_origin(Phase::params_before, Cause::bad_weight,
                      blind.empty() ? Confidence::high : Confidence::medium, sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      origin.evidence.push_back("the parameter held " +
                                describe_bad(bad->front().bad->sighting->stats) + " on " +
                                describe_rank_count(ranks) + " before this step's forward");
      if (clean.empty()) {
        origin.evidence.push_back(
            ranks.size() > 1
                ? "every rank that holds it and looked has it: it came from the checkpoint or from "
                  "the step before, not from a fault of one device"
                : "no other rank that looked holds a copy");
        origin.action =
            "check the checkpoint that was loaded, and the optimizer step before this one";
      } else {
        origin.evidence.push_back(
            "the copies on " + describe_rank_count(clean) +
            " are clean: only this copy was damaged, after the last update or "
            "in its parameter all-gather");
        origin.action = "check the memory and the links of " + describe_rank_count(ranks) +
                        "; restore the parameter from a clean copy or a checkpoint";
      }
      add_blind_evidence(origin, blind);
      add_origin(std::move(origin));
    }
  }

  static std::set<int> ranks_of(const std::vector<BadOnRank>& bad) {
    std::set<int> ranks;
    for (const auto& each : bad) ranks.insert(each.rank->rank());
    return ranks;
  }

  static void add_blind_evidence(Origin& origin, const std::set<int>& blind) {
    if (blind.empty()) return;
    origin.evidence.push_back(describe_rank_count(blind) +
                              " did not say what they saw here and cannot be excluded");
  }

  // ---- grad_local ----

  void judge_local_gradients() {
    int bad_replicas = 0;
    int replicas_bad_from_the_start = 0;
    for (const auto& [replica, places] : replicas_) {
      const bool is_bad = std::ranges::any_of(places, [](const Place* place) {
        return place->evidence != nullptr && !place->evidence->bad(Phase::grad_local).empty();
      });
      if (!is_bad) continue;
      ++bad_replicas;
      std::vector<Lane> lanes = make_lanes(incident_, places, Phase::grad_local);
      const auto flow = judge_flow(lanes, places, Phase::grad_local);
      if (flow && flow->may_come_from_forward) ++replicas_bad_from_the_start;
      for (Lane& lane : lanes) judge_isolated(lane, places, Phase::grad_local);
    }
    if (replicas_.size() > 1 && replicas_bad_from_the_start == std::ssize(replicas_)) {
      verdict_.notes.push_back(
          "every data-parallel replica was bad from its loss on: a common cause (a weight, the "
          "data of all replicas, the learning rate) is likelier than as many faults");
    }
  }

  /// One flow for all lanes: a NaN may have crossed between them (context-parallel attention,
  /// expert dispatch). Marks other lanes' experts as explained.
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

  /// With expert parallelism a lane's token gradients pass through other lanes' experts: those are
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

  void add_flow_origin(const Lane& lane, const Flow& flow, const Places& places, Phase phase,
                       std::size_t lane_count) {
    const Stage& stage = lane.stages[flow.start.stage];
    const Cell& cell = stage.cells[flow.start.cell];
    const Step& start = cell.steps[flow.start.step];
    const bool is_anyone_missing = is_anyone_blind(places, phase);
    std::set<int> candidates(flow.candidates.begin(), flow.candidates.end());
    if (!flow.is_one_tp_rank) {
      candidates.insert(incident_.unplaced().begin(), incident_.unplaced().end());
    }
    const bool is_one_rank = candidates.size() == 1;
    const bool is_sure = is_one_rank && !is_anyone_missing && phase == Phase::grad_local &&
                         (lane.is_order_observed || lane.stages.size() == 1);
    Origin origin = make_origin(phase, Cause::unknown,
                                is_sure                      ? Confidence::high
                                : phase == Phase::grad_local ? Confidence::medium
                                                             : Confidence::low,
                                sorted(candidates));
    const std::string& name = start.parameter->name;
    const std::string count = std::to_string(flow.bad_steps);
    if (flow.may_come_from_forward) {
      if (is_one_rank) set_parameter(origin, name, *start.sighting);
      origin.evidence.push_back(
          "all " + count +
          " gradients on the ranks that backward reaches are bad, from the first one (" + name +
          ") on: the loss or its gradient was bad already, so a birth " +
          "in forward cannot be excluded");
      if (phase == Phase::grad_local) {
        origin.evidence.push_back(
            "these gradients were bad before the data-parallel collective: that it is this "
            "replica is certain; which of its ranks, layers or operators is not visible in "
            "gradients");
      }
      origin.action =
          "look at this replica's batch, labels and loss in this step, then at its activations "
          "layer by layer";
    } else {
      set_parameter(origin, name, *start.sighting);
      set_neighbours(origin, stage, cell, flow.start.step);
      // A stretch that stayed on one tensor-parallel rank did not travel with activations'
      // gradients.
      const bool has_travelled = flow.reached_other_tp_ranks || stage.cells.size() == 1;
      if (has_travelled) origin.direction = Direction::backward;
      origin.evidence.push_back(
          count +
          " gradients on the replica's ranks are bad from this parameter to the end of backward" +
          (origin.clean_before.empty() ? std::string()
                                       : "; " + origin.clean_before + " before it is clean"));
      if (!has_travelled) {
        origin.evidence.push_back(
            "the other tensor-parallel ranks stayed clean, though their activations' gradients are "
            "summed with this rank's: it did not travel with those; this rank's own gradient "
            "memory "
            "or kernels are likely");
      } else if (flow.is_one_tp_rank) {
        origin.evidence.push_back(
            "its sharded gradients are bad on this tensor-parallel rank first; the others are bad "
            "only from the next tensor-parallel all-reduce on");
      } else if (!is_one_rank && stage.cells.size() > 1) {
        origin.evidence.push_back(
            "no tensor-parallel rank is bad earlier than the others by a parameter of its own: the "
            "value may have come from any of them through a tensor-parallel collective");
      }
      if (flow.is_at_stage_boundary && flow.candidate_stages.size() > 1) {
        origin.evidence.push_back(
            "it is the first parameter that backward reaches on its pipeline stage and the stage "
            "above is clean: born at the end of that stage's backward, in the transfer, or at the "
            "start of this one's");
      }
      if (lane_count > 1) {
        origin.evidence.push_back(
            "context- or expert-parallel ranks exchange gradients inside a layer: all of theirs on "
            "this stage remain possible");
      }
      origin.action =
          "look at the operators between the clean parameter and this one on these ranks: their "
          "inputs in this step's backward, and the points where their derivatives have poles";
    }
    if (!lane.is_order_observed) {
      origin.evidence.push_back(
          "the order of backward was not observed on these ranks: within a layer it is not known");
    }
    if (is_anyone_missing) add_missing_evidence(origin, places, phase);
    origin.evidence.push_back(
        "missing for the cause: the activations, which this level does not see");
    add_origin(std::move(origin));
  }

  void add_missing_evidence(Origin& origin, const Places& places, Phase phase) const {
    std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
    for (const Place* place : places) {
      if (is_blind(*place, phase)) blind.insert(place->rank);
    }
    origin.evidence.push_back("no whole answer for " + std::string(name_of(phase)) + " from " +
                              describe_rank_count(blind) + ": what they saw is not part of this");
  }

  // ---- bad, and spread nowhere ----

  struct Isolated {
    StepPlace place;
    std::set<int> ranks;         // candidates
    bool is_everywhere = false;  // a duplicate that is bad on all tensor-parallel ranks
    bool may_have_arrived = false;
    bool is_vouched_by_embeddings = false;
  };

  void judge_isolated(const Lane& lane, const Places& places, Phase phase) {
    std::map<int, std::size_t> per_rank;
    const std::size_t first_new = verdict_.origins.size();
    for (std::size_t s = 0; s < lane.stages.size(); ++s) {
      const Stage& stage = lane.stages[s];
      std::set<std::string_view> done;  // duplicates that are bad on all ranks: one origin
      for (std::size_t c = 0; c < stage.cells.size(); ++c) {
        for (std::size_t i = 0; i < stage.cells[c].steps.size(); ++i) {
          const Step& step = stage.cells[c].steps[i];
          if (step.status != Status::bad || step.is_in_flow) continue;
          if (done.contains(step.parameter->name)) continue;
          if (++per_rank[stage.cells[c].ranks.front()] > kMostIsolatedPerRank) continue;
          if (is_full(phase)) continue;
          const Isolated isolated = describe_isolated(lane, {s, c, i});
          if (isolated.is_everywhere) done.insert(step.parameter->name);
          add_isolated_origin(lane, isolated, places, phase);
        }
      }
    }
    for (std::size_t i = first_new; i < verdict_.origins.size(); ++i) {
      Origin& origin = verdict_.origins[i];
      const auto count = per_rank[origin.candidates.front()];
      if (count <= kFewIsolated) continue;
      origin.confidence = std::min(origin.confidence, Confidence::medium);
      origin.evidence.push_back(std::to_string(count) +
                                " parameters of this rank are bad with clean ones between them: "
                                "neither one damaged element nor one flow through backward");
    }
    for (const auto& [rank, count] : per_rank) {
      if (count > kMostIsolatedPerRank) ranks_with_more_isolated_.insert(rank);
    }
    const bool has_flow = std::ranges::any_of(lane.stages, [](const Stage& stage) {
      return std::ranges::any_of(stage.cells, [](const Cell& cell) {
        return std::ranges::any_of(cell.steps, &Step::is_in_flow);
      });
    });
    judge_unplaced(lane, places, phase, has_flow);
  }

  Isolated describe_isolated(const Lane& lane, StepPlace at) const {
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
               !has_clean_witness_after(lane, at)) {
      // Nothing that backward visits later vouches for the activations' gradients: with sequence
      // parallelism another rank's partial sum could have put it here.
      isolated.ranks = all;
      isolated.may_have_arrived = true;
    }
    return isolated;
  }

  // Embeddings are added before their sum is scattered over the sequence, and backward gathers it
  // first (language_model_embedding.py): a bad value that came from the layers is in the position
  // embeddings' gradient on every tensor-parallel rank. Where one of those copies is clean, it did
  // not come from there.
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
      // Where the order was not observed, only other layers are known to come after.
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
    const bool is_anyone_missing = is_anyone_blind(places, phase);
    Origin origin =
        make_origin(phase, Cause::unknown,
                    !is_local                                        ? Confidence::low
                    : is_anyone_missing || isolated.may_have_arrived ? Confidence::medium
                                                                     : Confidence::high,
                    sorted(isolated.ranks));
    set_parameter(origin, step.parameter->name, *step.sighting);
    set_neighbours(origin, stage, cell, isolated.place.step);
    if (is_local) {
      origin.evidence.push_back(
          describe_bad(step.sighting->stats) +
          " in this rank's own gradient, before the data-parallel collective");
      add_other_replicas(origin, *step.parameter, lane, stage, cell);
    }
    if (!origin.clean_after.empty()) {
      origin.evidence.push_back(
          origin.clean_after + ", which backward reaches later, is clean" +
          (origin.clean_before.empty() ? "" : ", and so is " + origin.clean_before + " before it") +
          ": the gradients of the activations were finite here");
    }
    if (isolated.is_everywhere) {
      origin.evidence.push_back(
          "it is the same on every tensor-parallel rank of the stage, which hold copies of it: "
          "they "
          "cannot be told apart");
    } else if (isolated.is_vouched_by_embeddings) {
      origin.evidence.push_back(
          "a bad gradient from the layers would be in the position embeddings of every "
          "tensor-parallel rank, and a copy of those is clean");
    } else if (isolated.may_have_arrived) {
      origin.evidence.push_back(
          "no sharded parameter comes after it in backward: another tensor-parallel rank's part of "
          "a sum could have put it here");
    } else if (step.parameter->is_tp_duplicate && cell.tp > 0) {
      origin.evidence.push_back(
          "Megatron leaves this parameter out of the gradient norm on tensor-parallel ranks above "
          "0: the norm would not have shown it");
    }
    if (auto hint = overflow_hint(*step.sighting)) origin.evidence.push_back(std::move(*hint));
    if (is_anyone_missing) add_missing_evidence(origin, places, phase);
    origin.evidence.push_back(
        "missing for the cause: the weight-gradient operator's inputs; a kernel, a hook and the "
        "memory itself look alike in gradients");
    origin.action =
        "run this step again from the last checkpoint: if the gradient is clean then, test this "
        "device's memory; if it repeats, look at the inputs of this weight's gradient";
    add_origin(std::move(origin));
  }

  void add_other_replicas(Origin& origin, const ParameterRecord& parameter, const Lane& lane,
                          const Stage& stage, const Cell& cell) const {
    std::size_t clean = 0, bad = 0;
    for (const Place* place : groups_.at({cell.tp, stage.pp})) {
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
    origin.evidence.push_back("the same parameter was clean on " + std::to_string(clean) + " of " +
                              std::to_string(clean + bad) + " other data-parallel ranks");
  }

  void judge_unplaced(const Lane& lane, const Places& places, Phase phase, bool has_flow) {
    if (lane.unplaced.empty()) return;
    if (has_flow) {
      verdict_.notes.push_back(std::to_string(lane.unplaced.size()) +
                               " bad parameters are in no rank's backward order (first: " +
                               lane.unplaced.front().bad->name +
                               "); they count as received from the origin of their replica");
      return;
    }
    for (std::size_t i = 0; i < lane.unplaced.size() && i < kMostIsolatedPerRank; ++i) {
      const Unplaced& entry = lane.unplaced[i];
      std::set<int> ranks(entry.ranks.begin(), entry.ranks.end());
      // Without an order nothing says what it received: everyone who exchanges with this rank.
      for (const Place* place : places) {
        if (place->dp == lane.dp || phase != Phase::grad_local) ranks.insert(place->rank);
      }
      ranks.insert(incident_.unplaced().begin(), incident_.unplaced().end());
      Origin origin = make_origin(phase, Cause::unknown, Confidence::low, sorted(ranks));
      set_parameter(origin, entry.bad->name, *entry.bad->sighting);
      origin.evidence.push_back(describe_bad(entry.bad->sighting->stats) + " on " +
                                describe_rank_count({entry.ranks.begin(), entry.ranks.end()}) +
                                "; the parameter is in no rank's backward order, so what it could "
                                "have received is not known");
      origin.action = "look at the operators that compute this gradient, and at their inputs";
      add_origin(std::move(origin));
    }
  }

  // ---- grad_reduced ----

  bool is_bad_in(Phase phase, const ParameterKey& key) const {
    const auto found = bad_.find(phase);
    return found != bad_.end() && found->second.contains(key);
  }

  void judge_reduced_gradients() {
    std::set<ParameterKey> without_evidence;
    for (const auto& [key, bad] : in_backward_order(bad_[Phase::grad_reduced])) {
      if (is_bad_in(Phase::grad_local, *key)) continue;  // received from a replica
      if (is_clean_on_all_holders(*key, *bad, Phase::grad_local)) {
        add_collective_origin(*bad);
      } else if (has_clean_copy(*bad)) {
        add_own_copy_origin(*bad);
      } else {
        without_evidence.insert(*key);
      }
    }
    judge_merged(without_evidence, Phase::grad_reduced);
  }

  /// Every rank that may hold the parameter looked at it in `phase`, and found it clean.
  bool is_clean_on_all_holders(const ParameterKey& key, const std::vector<BadOnRank>& bad,
                               Phase phase) const {
    if (!incident_.unplaced().empty()) return false;
    std::set<std::string_view> names;
    for (const auto& each : bad) names.insert(each.bad->name);
    return std::ranges::all_of(holders_of(key), [&](const Place* place) {
      if (is_blind(*place, phase)) return false;
      return std::ranges::all_of(names, [&](std::string_view name) {
        const auto position = place->evidence->position_of(name);
        return !position || place->evidence->status(phase, *position) == Status::clean;
      });
    });
  }

  /// Another data-parallel rank of a bad rank's group holds the same elements, whole, and clean: an
  /// all-reduce gives all of them the same result, so the bad copy went bad where it lies.
  bool has_clean_copy(const std::vector<BadOnRank>& bad) const {
    return std::ranges::all_of(bad, [&](const BadOnRank& each) {
      const Sighting& sighting = *each.bad->sighting;
      if (sighting.stats.numel != numel_of(sighting.shape)) return false;
      const RankCoordinates& own = each.rank->coordinates();
      return std::ranges::any_of(groups_.at({own.tp.rank, own.pp.rank}), [&](const Place* place) {
        return place->evidence != nullptr &&
               place->evidence->status(Phase::grad_reduced, each.bad->name) == Status::clean;
      });
    });
  }

  void add_own_copy_origin(const std::vector<BadOnRank>& bad) {
    if (is_full(Phase::grad_reduced)) return;
    const Sighting& sighting = *bad.front().bad->sighting;
    Origin origin =
        make_origin(Phase::grad_reduced, Cause::unknown, Confidence::medium, sorted(ranks_of(bad)));
    set_parameter(origin, bad.front().bad->name, sighting);
    origin.direction = Direction::none;
    origin.evidence.push_back(
        describe_bad(sighting.stats) + " after the data-parallel collective on " +
        describe_rank_count(ranks_of(bad)) +
        "; other data-parallel ranks hold a clean result of the same elements");
    origin.evidence.push_back(
        "what it was before the collective is not known on every rank; had it been bad there, all "
        "members would have received it (unless gradients are not reduced at all)");
    origin.action = "check what touches gradients after the reduction on " +
                    describe_rank_count(ranks_of(bad)) + ", its links and its memory";
    add_origin(std::move(origin));
  }

  void add_collective_origin(const std::vector<BadOnRank>& bad) {
    if (is_full(Phase::grad_reduced)) return;
    const Sighting& sighting = *bad.front().bad->sighting;
    const std::string& name = bad.front().bad->name;
    const std::set<int> ranks = ranks_of(bad);
    std::set<std::pair<int, int>> groups;  // (tp, pp) of the bad ranks
    std::set<std::string_view> names;
    for (const auto& each : bad) {
      groups.emplace(each.rank->coordinates().tp.rank, each.rank->coordinates().pp.rank);
      names.insert(each.bad->name);
    }
    std::set<int> members, clean;
    for (const auto& group : groups) {
      for (const Place* place : groups_.at(group)) {
        // Of tied parameters each stage knows its own name.
        const auto holds = [&](std::string_view each) {
          return place->evidence->position_of(each).has_value();
        };
        if (!std::ranges::any_of(names, holds) && !ranks.contains(place->rank)) continue;
        members.insert(place->rank);
        if (place->evidence->status(Phase::grad_reduced, name) == Status::clean) {
          clean.insert(place->rank);
        }
      }
    }
    const bool is_whole = std::ranges::all_of(bad, [](const BadOnRank& each) {
      return each.bad->sighting->stats.numel == numel_of(each.bad->sighting->shape);
    });
    const bool is_own_copy = is_whole && !clean.empty();
    const bool is_alone = members.size() == 1;
    const auto overflow = overflow_in_sum_hint(sighting, members.size());
    const std::set<int>& candidates = is_own_copy || is_alone ? ranks : members;
    Origin origin = make_origin(Phase::grad_reduced,
                                is_alone                   ? Cause::unknown
                                : overflow && !is_own_copy ? Cause::collective_sum
                                                           : Cause::collective_result,
                                candidates.size() == 1 ? Confidence::high : Confidence::medium,
                                sorted(candidates));
    set_parameter(origin, name, sighting);
    origin.direction = Direction::none;
    origin.evidence.push_back("its gradient was clean before the data-parallel collective on all " +
                              std::to_string(members.size()) + " ranks that hold it, and has " +
                              describe_bad(sighting.stats) + " after it on " +
                              describe_rank_count(ranks));
    if (is_alone) {
      origin.evidence.push_back(
          "no other rank holds it: nothing was received in between, it was "
          "written or damaged on this rank");
      origin.action =
          "check what touches gradients between the two looks, and this device's memory";
    } else if (is_own_copy) {
      origin.evidence.push_back(
          "the other members hold a clean result of the same elements: this "
          "rank's copy alone is bad (its link, its memory, or the collective's "
          "last step on it)");
      origin.action = "check the links and the memory of " + describe_rank_count(ranks) +
                      "; repeat the collective on known values over them";
    } else {
      origin.evidence.push_back(
          is_whole ? "every member has it: the members cannot be told apart"
                   : "only the owner of these elements (" + describe_rank_count(ranks) +
                         ") keeps their sum: it and every rank that sent to it are possible");
      origin.action =
          "repeat the collective on known values over these ranks, and compare the members' local "
          "sums";
    }
    if (overflow) origin.evidence.push_back(*overflow);
    add_origin(std::move(origin));
  }

  // ---- after-reduction findings that no local evidence explains or excludes ----

  /// The parameters of `keys` are bad in `phase`, and not every rank said what it saw before: the
  /// flow through backward is looked for in what all ranks have in common.
  void judge_merged(const std::set<ParameterKey>& keys, Phase phase) {
    if (keys.empty()) return;
    Places places;
    for (const Place& place : incident_.places()) places.push_back(&place);
    std::vector<Lane> lanes;
    lanes.push_back(make_merged_lane(incident_, places, phase,
                                     [&](const RankEvidence& rank, const BadParameter& bad) {
                                       return keys.contains(key_of(rank, bad));
                                     }));
    const std::size_t first_new = verdict_.origins.size();
    const auto flow = judge_flow(lanes, places, phase);
    judge_isolated(lanes.front(), places, phase);

    std::set<int> blind(incident_.unplaced().begin(), incident_.unplaced().end());
    for (const Place& place : incident_.places()) {
      if (is_blind(place, Phase::grad_local)) blind.insert(place.rank);
    }
    for (std::size_t i = first_new; i < verdict_.origins.size(); ++i) {
      Origin& origin = verdict_.origins[i];
      origin.evidence.insert(
          origin.evidence.begin(),
          "bad in " + std::string(name_of(phase)) + "; " +
              (blind.empty() ? "the phase before did not cover this parameter on every rank"
                             : describe_rank_count(blind) +
                                   " did not say what their gradients were before the "
                                   "data-parallel collective"));
      if (flow && flow->bad_steps > 1 && i == first_new) keep_unseen_replicas(origin);
    }
  }

  /// A stretch of many parameters was not made by a collective: some replica had it before. One
  /// whose ranks all said that their gradients were clean did not.
  void keep_unseen_replicas(Origin& origin) const {
    if (!incident_.unplaced().empty()) return;
    std::set<int> unseen;
    for (const Place& place : incident_.places()) {
      if (is_blind(place, Phase::grad_local)) unseen.insert(incident_.replica_of(place));
    }
    std::vector<int> kept;
    for (const Place& place : incident_.places()) {
      if (unseen.contains(incident_.replica_of(place)) &&
          std::ranges::binary_search(origin.candidates, place.rank)) {
        kept.push_back(place.rank);
      }
    }
    if (kept.empty() || kept.size() == origin.candidates.size()) return;
    const Origin narrowed = make_origin(origin.phase, origin.cause, origin.confidence, kept);
    origin.candidates = narrowed.candidates;
    origin.coordinates = narrowed.coordinates;
    origin.data_parallel_replica = narrowed.data_parallel_replica;
    origin.evidence.push_back(
        "the other replicas' gradients were clean before the collective: only replicas with a rank "
        "that did not say are left");
  }

  // ---- grad_norm ----

  void judge_norm_gradients() {
    std::set<ParameterKey> without_evidence;
    for (const auto& [key, bad] : in_backward_order(bad_[Phase::grad_norm])) {
      if (is_bad_in(Phase::grad_local, *key) || is_bad_in(Phase::grad_reduced, *key)) continue;
      const bool was_clean = std::ranges::all_of(*bad, [&](const BadOnRank& each) {
        return was_clean_before_norm(*each.rank, each.bad->name);
      });
      if (was_clean) {
        add_norm_origin(*key, *bad);
      } else {
        without_evidence.insert(*key);
      }
    }
    judge_merged(without_evidence, Phase::grad_norm);
  }

  /// Clean after the reduction; or before it, where there is nobody to reduce with.
  bool was_clean_before_norm(const RankEvidence& rank, const std::string& name) const {
    if (rank.status(Phase::grad_reduced, name) == Status::clean) return true;
    const auto& at = rank.coordinates();
    return at.dp.size * at.cp.size == 1 && rank.status(Phase::grad_local, name) == Status::clean;
  }

  void add_norm_origin(const ParameterKey& key, const std::vector<BadOnRank>& bad) {
    if (is_full(Phase::grad_norm)) return;
    const std::set<int> ranks = ranks_of(bad);
    std::set<int> candidates = ranks;
    const bool is_shared_further = key.tp == -1 || key.pp == -1;
    std::set<int> blind;
    if (is_shared_further) blind = blind_holders(key, Phase::grad_norm);
    // What a rank that said nothing handed on may have come from anywhere in its replica.
    for (const Place& place : incident_.places()) {
      if (!blind.contains(place.rank)) continue;
      for (const Place* mate : replicas_.at(incident_.replica_of(place))) {
        candidates.insert(mate->rank);
      }
    }
    if (is_shared_further)
      candidates.insert(incident_.unplaced().begin(), incident_.unplaced().end());
    Origin origin = make_origin(Phase::grad_norm, Cause::unknown,
                                !blind.empty()          ? Confidence::low
                                : candidates.size() > 1 ? Confidence::medium
                                                        : Confidence::high,
                                sorted(candidates));
    set_parameter(origin, bad.front().bad->name, *bad.front().bad->sighting);
    origin.direction = Direction::none;
    origin.evidence.push_back("clean after the data-parallel reduction, and " +
                              describe_bad(bad.front().bad->sighting->stats) + " on " +
                              describe_rank_count(ranks) + " where the optimizer read it");
    origin.evidence.push_back(
        is_shared_further
            ? "between the two lie unscaling, the optimizer's copy, and the reduction of tied "
              "embeddings or tensor-parallel duplicates, which this parameter takes part in"
            : "between the two lie unscaling and the optimizer's copy");
    add_blind_evidence(origin, blind);
    origin.action = "check the loss scale, gradient hooks, and this device's memory";
    add_origin(std::move(origin));
  }

  // ---- params_after ----

  bool is_any_gradient_bad() const {
    return std::ranges::any_of(std::array{Phase::grad_local, Phase::grad_reduced, Phase::grad_norm},
                               [&](Phase phase) {
                                 const auto found = bad_.find(phase);
                                 return found != bad_.end() && !found->second.empty();
                               });
  }

  const RankEvidence* rank_with_bad_norm() const {
    for (const RankEvidence& rank : incident_.ranks()) {
      const auto& norm = rank.ledger().gradient_norm;
      if (norm && !std::isfinite(*norm)) return &rank;
    }
    return nullptr;
  }

  /// Ranks whose gradients were not seen at any phase: theirs may have been bad, and through the
  /// norm every rank's parameters would be.
  std::set<int> ranks_without_gradients() const {
    std::set<int> ranks(incident_.silent().begin(), incident_.silent().end());
    for (const RankEvidence& rank : incident_.ranks()) {
      if (!rank.looked_at(Phase::grad_local) && !rank.looked_at(Phase::grad_reduced) &&
          !rank.looked_at(Phase::grad_norm)) {
        ranks.insert(rank.rank());
      }
    }
    return ranks;
  }

  void judge_updated_parameters() {
    if (bad_[Phase::params_after].empty() || is_any_gradient_bad()) return;
    if (rank_with_bad_norm() != nullptr) return;  // the norm explains it; judge_norm_value names it
    const std::set<int> unseen = ranks_without_gradients();
    for (const auto& [key, bad] : in_backward_order(bad_[Phase::params_after])) {
      if (is_full(Phase::params_after)) continue;
      const std::set<int> ranks = ranks_of(*bad);
      std::set<int> candidates = ranks;
      candidates.insert(unseen.begin(), unseen.end());
      Origin origin = make_origin(
          Phase::params_after, unseen.empty() ? Cause::optimizer_update : Cause::unknown,
          unseen.empty() ? Confidence::high : Confidence::low, sorted(candidates));
      set_parameter(origin, bad->front().bad->name, *bad->front().bad->sighting);
      origin.direction = Direction::none;
      origin.evidence.push_back(describe_bad(bad->front().bad->sighting->stats) +
                                " in the parameter after the optimizer step on " +
                                describe_rank_count(ranks) +
                                ", though every gradient that was seen is finite");
      if (!unseen.empty()) {
        origin.evidence.push_back("the gradients of " + describe_rank_count(unseen) +
                                  " were not seen: theirs may have been bad");
      }
      origin.evidence.push_back(
          "left are the update itself, the optimizer's state, and the all-gather of updated "
          "parameters (distributed optimizer)");
      origin.action = "look at the optimizer's state of this parameter (second moment, epsilon)";
      add_origin(std::move(origin));
    }
  }

  // ---- the norm itself ----

  void judge_norm_value() {
    const RankEvidence* const witness = rank_with_bad_norm();
    if (witness == nullptr || is_any_gradient_bad()) return;
    double largest = -1;
    std::set<int> ranks;
    std::string parameter;
    for (const RankEvidence& rank : incident_.ranks()) {
      const auto& absmax = rank.ledger().absmax;
      if (!absmax || !std::isfinite(*absmax) || *absmax < largest) continue;
      if (*absmax > largest) {
        ranks.clear();
        parameter = rank.ledger().absmax_parameter;
      }
      largest = *absmax;
      ranks.insert(rank.rank());
    }
    std::set<int> candidates = ranks;
    const std::set<int> unseen = ranks_without_gradients();
    candidates.insert(unseen.begin(), unseen.end());
    // The square of one fp32 number above sqrt(FLT_MAX) = 1.8e19 overflows; with many elements
    // smaller ones do, but not below 1e15: FLT_MAX / 1e30 is 3e8 elements of that size.
    const bool can_overflow = largest > 1e15;
    Origin origin = make_origin(Phase::grad_norm,
                                can_overflow && unseen.empty() ? Cause::divergence : Cause::unknown,
                                Confidence::low, sorted(candidates));
    origin.direction = Direction::none;
    if (largest >= 0) origin.parameter = parameter;
    origin.evidence.push_back(
        "the framework's gradient norm is " +
        std::string(std::isnan(*witness->ledger().gradient_norm) ? "NaN" : "Inf") +
        ", though every gradient that was seen is finite");
    if (can_overflow) {
      origin.evidence.push_back("the largest gradient is " + short_number(largest) +
                                ": the sum of squares overflows fp32 (sqrt of its largest number: "
                                "1.8e19)");
      origin.evidence.push_back(
          "missing for the cause: the history of this maximum over the steps before");
    } else if (largest >= 0) {
      origin.evidence.push_back("the largest gradient is " + short_number(largest) +
                                ", too small for its square to overflow: the norm's own reduction, "
                                "or a gradient that was not scanned");
    } else {
      origin.evidence.push_back("missing for the cause: no rank reported its largest gradient");
    }
    if (!unseen.empty()) {
      origin.evidence.push_back("the gradients of " + describe_rank_count(unseen) +
                                " were not seen: theirs may be bad");
    }
    origin.action =
        "look at the history of the gradient norm; lower the learning rate or check this layer's "
        "scale";
    add_origin(std::move(origin));
  }

  // ---- the loss ----

  static bool has_bad_loss(const RankEvidence& rank) {
    return std::ranges::any_of(rank.ledger().sightings, [](const Sighting& sighting) {
      return sighting.phase == Phase::loss && !sighting.stats.is_finite();
    });
  }

  /// A loss that is bad though no gradient is: zero times NaN on a masked token, a mean over no
  /// labels, whose derivative autograd takes as zero.
  void judge_losses() {
    if (is_any_gradient_bad() || !verdict_.origins.empty()) return;
    std::set<int> ranks;
    const Sighting* first = nullptr;
    for (const RankEvidence& rank : incident_.ranks()) {
      for (const Sighting& sighting : rank.ledger().sightings) {
        if (sighting.phase != Phase::loss || sighting.stats.is_finite()) continue;
        ranks.insert(rank.rank());
        if (first == nullptr) first = &sighting;
      }
    }
    if (first == nullptr) return;
    Origin origin = make_origin(Phase::loss, Cause::unknown, Confidence::medium, sorted(ranks));
    origin.direction = Direction::forward;
    origin.tensor = tensor_of(*first);
    origin.evidence.push_back("the loss holds " + describe_bad(first->stats) + " on " +
                              describe_rank_count(ranks) +
                              ", though every gradient that was seen is finite");
    origin.action = "look at the labels and the mask of this batch, and at the loss's reduction";
    add_origin(std::move(origin));
  }

  // ---- what was seen being born ----

  /// What the trace or the watch saw being born says more than the gradients that it made bad, and
  /// takes their place. Where the repeat of the step came out finite, that is the cause.
  void adopt_births() {
    verdict_.rerun = rerun_of(incident_);
    std::vector<Origin> born = origins_of_births(incident_);
    for (Origin& origin : born) adopt_neighbours(origin);
    if (!born.empty()) {
      verdict_.origins = std::move(born);
      origins_per_phase_.clear();
    }
    const auto sentences = describe_rerun(incident_, verdict_.rerun);
    for (Origin& origin : verdict_.origins) {
      origin.evidence.insert(origin.evidence.begin() + 1, sentences.begin(), sentences.end());
      if (verdict_.rerun.reproduced != false) continue;
      origin.cause = Cause::not_reproduced;
      origin.confidence = std::min(origin.confidence, Confidence::medium);
      origin.action =
          "a fault of the hardware, a race, or a kernel that is not deterministic: test this "
          "device before using it again, and see whether the same rank fails again";
    }
    if (verdict_.origins.size() > kMostOriginsPerPhase) {
      origins_per_phase_[verdict_.origins.front().phase] = verdict_.origins.size();
      verdict_.origins.resize(kMostOriginsPerPhase);
    }
  }

  /// The parameters that bracket the fault, which only the gradients tell.
  void adopt_neighbours(Origin& born) const {
    for (const Origin& seen : verdict_.origins) {
      if (std::ranges::find(seen.candidates, born.candidates.front()) == seen.candidates.end()) {
        continue;
      }
      // In backward it is the first gradient that the birth made bad; a forward birth has none.
      if (born.parameter.empty() && born.direction != Direction::forward) {
        born.parameter = seen.parameter;
      }
      born.clean_before = seen.clean_before;
      born.clean_after = seen.clean_after;
      return;
    }
  }

  // ---- the rest of the verdict ----

  void describe_spread() {
    std::set<int> ranks;
    for (const RankEvidence& rank : incident_.ranks()) {
      if (has_bad_loss(rank)) {
        ranks.insert(rank.rank());
        verdict_.spread.first_seen =
            std::min(Phase::loss, verdict_.spread.first_seen.value_or(Phase::loss));
      }
      for (const Phase phase : kJudgedPhases) {
        if (rank.bad(phase).empty()) continue;
        ranks.insert(rank.rank());
        if (!verdict_.spread.first_seen || phase < *verdict_.spread.first_seen) {
          verdict_.spread.first_seen = phase;
        }
      }
    }
    verdict_.spread.ranks = sorted(ranks);
    for (const auto& [name, order] : order_) verdict_.spread.parameters.push_back(name);
    std::ranges::stable_sort(verdict_.spread.parameters, {},
                             [&](const std::string& name) { return order_.at(name); });
    std::set<std::string_view> listed;
    for (const Origin& origin : verdict_.origins) {
      for (const std::string* name : {&origin.clean_before, &origin.clean_after}) {
        if (!name->empty() && listed.insert(*name).second) verdict_.clean.push_back(*name);
      }
    }
  }

  void add_status_and_notes() {
    verdict_.silent_ranks = incident_.silent();
    if (!incident_.silent().empty() || incident_.has_cut_off_ledgers()) {
      verdict_.status = VerdictStatus::partial;
    } else {
      verdict_.status = verdict_.origins.empty() ? VerdictStatus::clean : VerdictStatus::located;
    }
    for (const auto& [phase, count] : origins_per_phase_) {
      if (count <= kMostOriginsPerPhase) continue;
      verdict_.notes.push_back("up to " + std::to_string(count - kMostOriginsPerPhase) +
                               " further origins in " + std::string(name_of(phase)) +
                               " are not listed");
    }
    if (!ranks_with_more_isolated_.empty()) {
      verdict_.notes.push_back(
          "more parameters are bad by themselves than the " + std::to_string(kMostIsolatedPerRank) +
          " that are listed for a rank, on " + describe_rank_count(ranks_with_more_isolated_));
    }
    std::set<int> cut_off;
    std::map<std::string, std::set<int>> ranks_by_note;
    for (const RankEvidence& rank : incident_.ranks()) {
      if (!rank.ledger().is_complete) cut_off.insert(rank.rank());
      for (const std::string& note : rank.ledger().notes) ranks_by_note[note].insert(rank.rank());
    }
    if (!cut_off.empty()) {
      verdict_.notes.push_back("the ledgers of " + describe_rank_count(cut_off) +
                               " are cut off: what is missing from them counts as unknown");
    }
    for (const auto& [note, ranks] : ranks_by_note) {
      if (verdict_.notes.size() >= kMostNotes) {
        verdict_.notes.push_back("further notes are in the ledgers");
        break;
      }
      verdict_.notes.push_back(describe_rank_count(ranks) + ": " + note);
    }
  }

  Incident incident_;
  std::map<int, Places> replicas_;
  std::map<std::pair<int, int>, Places> groups_;  // by (tp, pp): who shares a data-parallel group
  std::map<Phase, BadByKey> bad_;
  std::map<std::string, Order, std::less<>> order_;
  std::map<Phase, std::size_t> origins_per_phase_;
  std::set<int> ranks_with_more_isolated_;
  Verdict verdict_;
};

}  // namespace

Verdict locate(std::span<const Ledger> ledgers, int world_size) {
  return Locator(ledgers, world_size).run();
}

}  // namespace nanlocator
