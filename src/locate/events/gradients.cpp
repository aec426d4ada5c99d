// Sources among gradients: stretches to the end of backward, and single ones. Edges: backward order
// (backward.hpp), and whatever crossed bad on a rank before, which makes its gradients bad.
#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/events/backward.hpp"
#include "locate/events/events.hpp"
#include "locate/make_origin.hpp"
#include "locate/origin_facts.hpp"

namespace nanlocator::inline locate_room::events {
namespace {

constexpr std::size_t kMostPerRank = 16;
/// More single bad gradients on a rank are not one corrupted element each: perhaps the backward
/// order was misread.
constexpr std::size_t kFewPerRank = 4;

class Gradients {
 public:
  Gradients(const Findings& seen, const Crossed& crossed, Phase phase, const Places& places,
            Sources& sources)
      : seen_(seen), crossed_(crossed), phase_(phase), places_(places), sources_(sources) {
    is_blind_ = seen.is_anyone_blind(places, phase);
    has_only_finite_ = phase == Phase::grad_local && seen.have_only_finite_crossings(places);
  }

  /// One lane for each (dp, cp).
  void add_lanes() {
    std::map<std::pair<int, int>, Places> members;
    for (const Place* place : places_) members[{place->dp, place->cp}].push_back(place);
    for (const auto& [where, of_lane] : members) {
      lanes_.push_back(make_lane(seen_.incident(), of_lane, phase_,
                                 [](const RankEvidence&, const BadParameter&) { return true; }));
      add_unordered(lanes_.back(), of_lane, nullptr);
    }
  }

  /// All places as one lane.
  void add_shared_lane(const std::set<ParameterKey>& keys) {
    lanes_.push_back(make_lane(seen_.incident(), places_, phase_,
                               [&](const RankEvidence& rank, const BadParameter& bad) {
                                 return keys.contains(key_of(rank, bad));
                               }));
    add_unordered(lanes_.back(), places_, &keys);
  }

  /// Returns true if the stretch may have come from forward.
  bool find() {
    std::vector<std::optional<Flow>> flows;
    for (Lane& lane : lanes_) flows.push_back(find_flow(lane));
    const auto flow = join(flows);
    if (flow) add_flow(*first_lane_, *flow);
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      add_single(lanes_[i]);
      add_without_order(lanes_[i], unordered_[i]);
    }
    return flow && flow->may_come_from_forward;
  }

 private:
  struct Unordered {
    const BadParameter* bad = nullptr;
    std::vector<int> ranks;
  };

  static std::int64_t index_at(const Lane& lane, const Flow& flow) {
    return lane.stages[flow.chain->steps[flow.start].stage].index;
  }

  /// A bad value may pass between lanes (context-parallel attention, experts): one flow for all.
  std::optional<Flow> join(const std::vector<std::optional<Flow>>& flows) {
    const Flow* first = nullptr;
    bool may_come_from_forward = false;
    const auto order = [](const Lane& lane, const Flow& flow) {
      const std::size_t stage = flow.chain->steps[flow.start].stage;
      return std::pair(-lane.stages[stage].index, flow.start - flow.chain->cells[stage].begin);
    };
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (!flows[i]) continue;
      may_come_from_forward |= flows[i]->may_come_from_forward;
      if (first == nullptr || order(lanes_[i], *flows[i]) < order(*first_lane_, *first)) {
        first = &*flows[i];
        first_lane_ = &lanes_[i];
      }
    }
    if (first == nullptr) return std::nullopt;
    Flow flow = *first;
    flow.may_come_from_forward = may_come_from_forward;
    if (lanes_.size() == 1) return flow;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (flows[i] && index_at(lanes_[i], *flows[i]) == index_at(*first_lane_, flow)) {
        flow.stages.insert(flows[i]->stages.begin(), flows[i]->stages.end());
      }
    }
    for (const Place* place : places_) {
      if (may_come_from_forward || flow.stages.contains(place->pp)) flow.ranks.insert(place->rank);
    }
    flow.is_on_one_rank = false;
    explain_experts(flow);
    return flow;
  }

  /// Token gradients of one lane pass through other lanes' experts, whose dense parameters stay
  /// finite.
  void explain_experts(const Flow& flow) {
    const std::int64_t start = index_at(*first_lane_, flow);
    const std::string_view layer = layer_of(flow.chain->steps[flow.start].parameter->name);
    const auto is_of_layer = [&](const Step& step) {
      return layer_of(step.parameter->name) == layer;
    };
    for (Lane& lane : lanes_) {
      for (Chain& chain : lane.chains) {
        for (std::size_t stage = 0; stage < lane.stages.size(); ++stage) {
          if (lane.stages[stage].index > start) continue;
          bool is_reached = lane.stages[stage].index < start ||
                            std::ranges::none_of(chain.steps_of(stage), is_of_layer);
          for (std::size_t i = chain.cells[stage].begin; i < chain.cells[stage].end; ++i) {
            Step& step = chain.steps[i];
            is_reached |= is_of_layer(step);
            step.is_in_flow |= is_reached && step.parameter->may_be_untouched;
          }
        }
      }
    }
  }

  // ---- edges from other sites ----

  /// Anything that crossed bad, or a bad loss, makes the gradients of its rank bad. Assumed for a
  /// rank that did not answer if something crossed bad in its replica.
  bool is_explained(const std::vector<int>& ranks) const {
    return std::ranges::any_of(ranks, [&](int rank) {
      const Place* const place = seen_.incident().place_of(rank);
      return place != nullptr &&
             (Findings::is_blind(*place, Phase::grad_local) ||
              seen_.crossings().has_bad_activations(rank)) &&
             crossed_.replicas.contains(seen_.incident().replica_of(*place));
    });
  }

  /// Tells a source in backward that crossed which gradient was the first to become bad.
  void tell_crossing(const Lane& lane, const Flow& flow, const std::vector<int>& ranks) {
    for (Source& source : sources_.all()) {
      Origin& origin = source.origin;
      const bool is_it = origin.phase == Phase::backward && source.first_bad_gradient.empty() &&
                         std::ranges::any_of(ranks, [&](int rank) {
                           return std::ranges::binary_search(origin.candidates, rank);
                         });
      if (!is_it) continue;
      source.first_bad_gradient = flow.chain->steps[flow.start].parameter->name;
      set_neighbours(origin, lane, *flow.chain, flow.start);
      Fact fact{.kind = FactKind::first_bad_gradient, .parameter = source.first_bad_gradient};
      if (!origin.clean_before.empty()) fact.names = {origin.clean_before};
      origin.facts.push_back(std::move(fact));
    }
  }

  // ---- origins ----

  /// The nearest witnesses on the same rank and stage.
  static void set_neighbours(Origin& origin, const Lane& lane, const Chain& chain, std::size_t at) {
    const std::size_t stage = chain.steps[at].stage;
    for (std::size_t i = at; i-- > chain.cells[stage].begin;) {
      if (!lane.is_witness(chain.steps[i])) continue;
      origin.clean_before = chain.steps[i].parameter->name;
      break;
    }
    for (std::size_t i = at + 1; i < chain.cells[stage].end; ++i) {
      if (!lane.is_witness(chain.steps[i])) continue;
      origin.clean_after = chain.steps[i].parameter->name;
      break;
    }
  }

  /// True if the step's losses were scanned, and none was bad.
  bool has_finite_loss() const {
    bool has_scanned = false;
    for (const Place* place : places_) {
      if (place->evidence == nullptr) continue;
      has_scanned |= place->evidence->scanned(Phase::loss);
      const auto& sightings = place->evidence->ledger().sightings;
      if (std::ranges::count(sightings, Phase::loss, &Sighting::phase) > 0) return false;
    }
    return has_scanned;
  }

  void add_flow(const Lane& lane, Flow flow) {
    const Step& start = flow.chain->steps[flow.start];
    const std::vector<int>& own = flow.chain->cells[start.stage].ranks;
    if (is_explained(own)) {
      if (!flow.may_come_from_forward) tell_crossing(lane, flow, own);
      return;
    }
    const auto& unplaced = seen_.incident().unplaced();
    // Nothing crossed bad: it started on a rank that has it.
    if (has_only_finite_) {
      std::erase_if(flow.ranks,
                    [&](int rank) { return seen_.incident().find(rank)->bad(phase_).empty(); });
    }
    if (!flow.is_on_one_rank) flow.ranks.insert(unplaced.begin(), unplaced.end());
    const bool is_one = flow.ranks.size() == 1;
    const bool is_sure =
        is_one && !is_blind_ && (lane.is_order_observed || lane.stages.size() == 1);
    Origin origin = make_origin(seen_.incident(), phase_, Cause::unknown,
                                phase_ != Phase::grad_local ? Confidence::low
                                : is_sure                   ? Confidence::high
                                                            : Confidence::medium,
                                sorted(flow.ranks));
    const std::string& name = start.parameter->name;
    const std::int64_t count = static_cast<std::int64_t>(flow.bad_steps);
    Facts& facts = origin.facts;
    if (flow.may_come_from_forward) {
      // A change of all gradients after backward, as a clip makes it, hides which was bad first.
      const bool is_loss_finite = has_finite_loss();
      if (is_one && (!is_loss_finite || count == 1)) set_parameter(origin, name, *start.sighting);
      facts.push_back({.kind = is_loss_finite ? FactKind::all_gradients_bad_loss_finite
                                              : FactKind::all_gradients_bad,
                       .count = count,
                       .parameter = name});
      if (phase_ == Phase::grad_local) facts.push_back({.kind = FactKind::before_collective});
    } else {
      set_parameter(origin, name, *start.sighting);
      set_neighbours(origin, lane, *flow.chain, flow.start);
      add_stretch_facts(origin, lane, flow, name);
    }
    if (!lane.is_order_observed) facts.push_back({.kind = FactKind::order_not_observed});
    if (is_blind_) add_blind(origin);
    facts.push_back({.kind = FactKind::missing_activations});
    if (phase_ != Phase::grad_local) leave_out_finite_replicas(origin, flow);
    sources_.add({.origin = std::move(origin), .site = Site::flow});
  }

  void add_stretch_facts(Origin& origin, const Lane& lane, const Flow& flow,
                         const std::string& name) const {
    const std::size_t width = std::ranges::count_if(lane.chains, [&](const Chain& chain) {
      return !chain.cells[flow.chain->steps[flow.start].stage].ranks.empty();
    });
    // One that the other tensor-parallel ranks do not have did not travel with activations'
    // gradients.
    const bool has_travelled = flow.has_reached_others || width == 1;
    if (has_travelled) origin.direction = Direction::backward;
    Facts& facts = origin.facts;
    Fact seen{.kind = FactKind::gradients_bad_to_the_end,
              .count = static_cast<std::int64_t>(flow.bad_steps),
              .parameter = name};
    if (!origin.clean_before.empty()) seen.names = {origin.clean_before};
    facts.push_back(std::move(seen));
    if (!has_travelled) {
      facts.push_back({.kind = FactKind::stayed_on_rank});
    } else if (flow.is_on_one_rank) {
      facts.push_back({.kind = FactKind::sharded_first_here});
    } else if (flow.ranks.size() > 1 && width > 1) {
      facts.push_back({.kind = FactKind::no_rank_earlier});
    }
    if (has_only_finite_) {
      facts.push_back({.kind = FactKind::nothing_received});
    } else if (flow.is_first_of_stage && flow.stages.size() > 1) {
      facts.push_back({.kind = FactKind::at_stage_boundary});
    }
    if (lanes_.size() > 1) facts.push_back({.kind = FactKind::exchanged_within_layer});
  }

  /// Replicas whose ranks all reported finite gradients before the reduction, and, if every
  /// gradient is bad, those whose losses were finite, made nothing bad.
  void leave_out_finite_replicas(Origin& origin, const Flow& flow) const {
    const Incident& incident = seen_.incident();
    std::set<int> unseen, with_loss, with_bad_loss, ranks_with_bad_loss;
    std::int64_t bad_values = 0;
    for (const Place& place : incident.places()) {
      const int replica = incident.replica_of(place);
      if (Findings::is_blind(place, Phase::grad_local)) unseen.insert(replica);
      if (place.evidence == nullptr || !place.evidence->scanned(Phase::loss)) continue;
      with_loss.insert(replica);
      for (const Sighting* loss : place.evidence->bad_losses()) {
        with_bad_loss.insert(replica);
        ranks_with_bad_loss.insert(place.rank);
        bad_values += loss->stats.nonfinite();
      }
    }
    const auto keep = [&](const std::set<int>& replicas, Fact fact) {
      std::vector<int> kept;
      for (const int rank : origin.candidates) {
        const Place* const place = incident.place_of(rank);
        if (place == nullptr) return;
        if (replicas.contains(incident.replica_of(*place))) kept.push_back(rank);
      }
      if (kept.empty() || kept.size() == origin.candidates.size()) return;
      set_candidates(origin, incident, kept);
      origin.facts.push_back(std::move(fact));
    };
    if (flow.bad_steps < 2) return;
    keep(unseen, {.kind = FactKind::only_unseen_replicas_left});
    const bool is_loss_known = std::ranges::all_of(origin.candidates, [&](int rank) {
      const Place* const place = incident.place_of(rank);
      return place != nullptr && with_loss.contains(incident.replica_of(*place));
    });
    if (!flow.may_come_from_forward || !is_loss_known) return;
    keep(with_bad_loss, {.kind = FactKind::other_losses_finite,
                         .ranks = sorted(ranks_with_bad_loss),
                         .count = bad_values});
  }

  void add_blind(Origin& origin) const {
    origin.facts.push_back({.kind = FactKind::no_whole_answer,
                            .ranks = sorted(seen_.blind_ranks(places_, phase_)),
                            .phase = phase_});
  }

  // ---- single gradients ----

  /// The copies of a duplicate that are bad, the ranks from which the value may have come, and why.
  struct Single {
    std::set<int> ranks;
    bool is_everywhere = false;
    bool may_have_arrived = false;
    bool is_vouched = false;
  };

  void add_single(Lane& lane) {
    std::map<int, std::size_t> per_rank;
    std::set<std::pair<std::size_t, std::string_view>>
        done;  // duplicates that are bad on all ranks
    const std::size_t first_new = sources_.all().size();
    for (std::size_t stage = 0; stage < lane.stages.size(); ++stage) {
      for (const Chain& chain : lane.chains) {
        const Cell& cell = chain.cells[stage];
        for (std::size_t i = cell.begin; i < cell.end; ++i) {
          const Step& step = chain.steps[i];
          if (step.status != Status::bad || step.is_in_flow || is_explained(cell.ranks)) continue;
          if (done.contains({stage, step.parameter->name})) continue;
          if (++per_rank[cell.ranks.front()] > kMostPerRank || sources_.is_full(phase_)) continue;
          const Single single = single_at(lane, chain, i);
          if (single.is_everywhere) done.emplace(stage, step.parameter->name);
          add_single(lane, chain, i, single);
        }
      }
    }
    std::set<int> with_more;
    for (const auto& [rank, count] : per_rank) {
      if (count > kMostPerRank) with_more.insert(rank);
    }
    for (std::size_t i = first_new; i < sources_.all().size(); ++i) {
      Origin& origin = sources_.all()[i].origin;
      const std::size_t count = per_rank[origin.candidates.front()];
      if (count <= kFewPerRank) continue;
      origin.place_confidence = std::min(origin.place_confidence, Confidence::medium);
      origin.facts.push_back(
          {.kind = FactKind::many_isolated, .count = static_cast<std::int64_t>(count)});
    }
    if (with_more.empty()) return;
    sources_.add_fact({.kind = FactKind::isolated_not_listed,
                       .ranks = sorted(with_more),
                       .count = static_cast<std::int64_t>(kMostPerRank)});
  }

  Single single_at(const Lane& lane, const Chain& chain, std::size_t at) const {
    const Step& step = chain.steps[at];
    const Cell& cell = chain.cells[step.stage];
    Single single{.ranks = {cell.ranks.begin(), cell.ranks.end()}};
    std::set<int> all, not_clean;
    bool is_on_all = true, has_others = false;
    for (const Chain& other : lane.chains) {
      const Cell& its = other.cells[step.stage];
      has_others |= &other != &chain && !its.ranks.empty();
      const auto steps = other.steps_of(step.stage);
      const auto same = std::ranges::find_if(
          steps, [&](const Step& each) { return each.parameter->name == step.parameter->name; });
      all.insert(its.ranks.begin(), its.ranks.end());
      if (same != steps.end() && same->status == Status::clean) {
        is_on_all = false;
      } else {
        not_clean.insert(its.ranks.begin(), its.ranks.end());
      }
    }
    if (!has_others) return single;
    const bool is_duplicate = step.parameter->is_tp_duplicate;
    if (is_duplicate && is_on_all) {
      single.is_everywhere = true;
      single.ranks = std::move(not_clean);
    } else if (is_vouched_by_embeddings(chain, step, not_clean == single.ranks)) {
      single.is_vouched = true;
    } else if ((is_duplicate || step.parameter->may_be_untouched) && !has_only_finite_ &&
               !has_witness_after(lane, chain, at)) {
      // Another rank's partial sum may have put it here.
      single.ranks = std::move(all);
      single.may_have_arrived = true;
    }
    return single;
  }

  /// Embeddings are added before their sum is scattered over the sequence, and backward gathers it
  /// first (language_model_embedding.py): a bad value from the layers is in every copy of the
  /// position embeddings' gradient.
  static bool is_vouched_by_embeddings(const Chain& chain, const Step& step, bool is_only_copy) {
    const auto is_embedding = [](const Step& each) {
      return each.parameter->name.starts_with("embedding.");
    };
    if (!is_embedding(step)) return false;
    if (step.parameter->is_tp_duplicate) return is_only_copy;
    return std::ranges::any_of(chain.steps_of(step.stage), [&](const Step& each) {
      return is_embedding(each) && each.parameter->is_tp_duplicate &&
             !each.parameter->may_be_untouched && each.status == Status::clean;
    });
  }

  static bool has_witness_after(const Lane& lane, const Chain& chain, std::size_t at) {
    const Step& step = chain.steps[at];
    for (std::size_t i = at + 1; i < chain.steps.size(); ++i) {
      const bool is_after =
          lane.is_order_observed || chain.steps[i].stage != step.stage ||
          layer_of(chain.steps[i].parameter->name) != layer_of(step.parameter->name);
      if (is_after && lane.is_witness(chain.steps[i])) return true;
    }
    return false;
  }

  void add_single(const Lane& lane, const Chain& chain, std::size_t at, const Single& single) {
    const Step& step = chain.steps[at];
    Origin origin = make_origin(seen_.incident(), phase_, Cause::unknown,
                                phase_ != Phase::grad_local            ? Confidence::low
                                : is_blind_ || single.may_have_arrived ? Confidence::medium
                                                                       : Confidence::high,
                                sorted(single.ranks));
    set_parameter(origin, step.parameter->name, *step.sighting);
    set_neighbours(origin, lane, chain, at);
    Facts& facts = origin.facts;
    facts.push_back({.kind = FactKind::gradient_bad,
                     .ranks = sorted(single.ranks),
                     .phase = phase_,
                     .bad = bad_count(step.sighting->stats),
                     .parameter = step.parameter->name});
    if (phase_ == Phase::grad_local) add_other_replicas(origin, lane, chain, step);
    if (!origin.clean_after.empty()) {
      Fact clean{.kind = FactKind::neighbours_clean, .parameter = origin.clean_after};
      if (!origin.clean_before.empty()) clean.names = {origin.clean_before};
      facts.push_back(std::move(clean));
    }
    if (single.is_everywhere) {
      facts.push_back({.kind = FactKind::same_on_tensor_parallel_copies});
    } else if (single.is_vouched) {
      facts.push_back({.kind = FactKind::embedding_copy_clean});
    } else if (single.may_have_arrived) {
      facts.push_back({.kind = FactKind::may_have_arrived});
    } else if (step.parameter->is_tp_duplicate && chain.tp > 0) {
      facts.push_back({.kind = FactKind::left_out_of_norm});
    }
    if (auto near = near_overflow(*step.sighting)) facts.push_back(*std::move(near));
    if (is_blind_) add_blind(origin);
    facts.push_back({.kind = FactKind::missing_gradient_inputs});
    sources_.add({.origin = std::move(origin), .site = Site::gradient});
  }

  void add_other_replicas(Origin& origin, const Lane& lane, const Chain& chain,
                          const Step& step) const {
    std::int64_t clean = 0, bad = 0;
    for (const Place* place : seen_.groups().at({chain.tp, lane.stages[step.stage].pp})) {
      if (place->evidence == nullptr || (place->dp == lane.dp && place->cp == lane.cp)) continue;
      const Status status = place->evidence->status(Phase::grad_local, step.parameter->name);
      clean += status == Status::clean ? 1 : 0;
      bad += status == Status::bad ? 1 : 0;
    }
    if (clean + bad == 0) return;
    origin.facts.push_back({.kind = FactKind::other_replicas, .count = clean, .of = clean + bad});
  }

  // ---- gradients in no backward order ----

  /// Bad parameters that are in no chain: unknown names, and other ranks' experts in a shared lane.
  void add_unordered(const Lane& lane, const Places& places, const std::set<ParameterKey>* keys) {
    std::set<std::string_view> ordered;
    for (const Chain& chain : lane.chains) {
      for (const Step& step : chain.steps) {
        if (step.status == Status::bad) ordered.insert(step.parameter->name);
      }
    }
    std::map<std::string_view, Unordered> found;
    for (const Place* place : places) {
      if (place->evidence == nullptr) continue;
      for (const BadParameter& bad : place->evidence->bad(phase_)) {
        if (ordered.contains(bad.name)) continue;
        if (keys != nullptr && !keys->contains(key_of(*place->evidence, bad))) continue;
        Unordered& entry = found[bad.name];
        if (entry.bad == nullptr) entry.bad = &bad;
        entry.ranks.push_back(place->rank);
      }
    }
    auto& list = unordered_.emplace_back();
    for (auto& [name, entry] : found) {
      std::ranges::sort(entry.ranks);
      list.push_back(std::move(entry));
    }
  }

  void add_without_order(const Lane& lane, const std::vector<Unordered>& unordered) {
    if (unordered.empty()) return;
    const bool has_flow = std::ranges::any_of(lane.chains, [](const Chain& chain) {
      return std::ranges::any_of(chain.steps, &Step::is_in_flow);
    });
    if (has_flow) {
      sources_.add_fact({.kind = FactKind::parameters_without_order,
                         .count = static_cast<std::int64_t>(unordered.size()),
                         .parameter = unordered.front().bad->name});
      return;
    }
    for (std::size_t i = 0; i < std::min(unordered.size(), kMostPerRank); ++i) {
      const Unordered& entry = unordered[i];
      if (is_explained(entry.ranks)) continue;
      // It may have come from any rank that exchanges with this one.
      std::set<int> ranks(entry.ranks.begin(), entry.ranks.end());
      for (const Place* place : places_) {
        if (place->dp == lane.dp || phase_ != Phase::grad_local) ranks.insert(place->rank);
      }
      ranks.insert(seen_.incident().unplaced().begin(), seen_.incident().unplaced().end());
      Origin origin =
          make_origin(seen_.incident(), phase_, Cause::unknown, Confidence::low, sorted(ranks));
      set_parameter(origin, entry.bad->name, *entry.bad->sighting);
      origin.facts.push_back({.kind = FactKind::gradient_without_order,
                              .ranks = entry.ranks,
                              .bad = bad_count(entry.bad->sighting->stats)});
      sources_.add({.origin = std::move(origin), .site = Site::gradient});
    }
  }

  const Findings& seen_;
  const Crossed& crossed_;
  Phase phase_;
  const Places& places_;
  Sources& sources_;
  bool is_blind_ = false;         // a place did not report the phase
  bool has_only_finite_ = false;  // everything that crossed on these places was finite
  std::vector<Lane> lanes_;
  std::vector<std::vector<Unordered>> unordered_;  // by lane
  const Lane* first_lane_ = nullptr;               // that of the first flow
};

}  // namespace

void add_gradients(const Findings& seen, const Crossed& crossed, Sources& sources) {
  std::size_t from_forward = 0;
  for (const auto& [replica, places] : seen.replicas()) {
    const bool is_bad = std::ranges::any_of(places, [](const Place* place) {
      return place->evidence != nullptr && !place->evidence->bad(Phase::grad_local).empty();
    });
    // A bad weight makes all of its replica's gradients bad.
    if (!is_bad || seen.has_bad_weights(replica)) continue;
    Gradients gradients(seen, crossed, Phase::grad_local, places, sources);
    gradients.add_lanes();
    from_forward += gradients.find() ? 1 : 0;
  }
  if (seen.replicas().size() > 1 && from_forward == seen.replicas().size()) {
    sources.add_fact({.kind = FactKind::all_replicas_bad});
  }
}

void add_shared_gradients(const Findings& seen, const Crossed& crossed,
                          const std::set<ParameterKey>& keys, Phase phase, Sources& sources) {
  // Bad weights are taken as the cause.
  if (keys.empty() || !seen.bad(Phase::params_before).empty()) return;
  Places places;
  for (const Place& place : seen.incident().places()) places.push_back(&place);
  const std::size_t first_new = sources.all().size();
  Gradients gradients(seen, crossed, phase, places, sources);
  gradients.add_shared_lane(keys);
  gradients.find();
  const std::vector<int> blind = sorted(seen.blind_ranks(places, Phase::grad_local));
  for (std::size_t i = first_new; i < sources.all().size(); ++i) {
    sources.all()[i].origin.facts.push_back(
        {.kind = FactKind::unseen_before, .ranks = blind, .phase = phase});
  }
}

}  // namespace nanlocator::inline locate_room::events
