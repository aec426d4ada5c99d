#include "locate/events/backward.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace nanlocator::inline locate_room::events {
namespace {

/// What the rank knows of a step; null unless bad.
void look(const RankEvidence& rank, std::size_t position, Phase phase, const BadFilter& keep,
          Step& step) {
  const BadParameter* const bad = rank.find_bad(phase, position);
  if (bad != nullptr && !keep(rank, *bad)) return;
  const Status status = bad != nullptr ? Status::bad : rank.status(phase, position);
  if (step.status == Status::bad || status == Status::unknown) return;
  const bool is_zero = status == Status::clean && rank.absmax(phase, position) == 0;
  step.is_zero = is_zero && (step.is_zero || step.status == Status::unknown);
  step.status = status;
  step.sighting = bad != nullptr ? bad->sighting : nullptr;
}

/// Appends what the places, which share a tensor-parallel rank and a stage, know of it. A step is
/// bad if it is bad on one of them, else finite if one found it finite.
void add_cell(Chain& chain, std::size_t stage, int chunk, std::span<const Place* const> places,
              Phase phase, const BadFilter& keep) {
  Cell& cell = chain.cells.emplace_back();
  cell.begin = chain.steps.size();
  for (const Place* place : places) {
    cell.ranks.push_back(place->rank);
    if (place->evidence == nullptr) continue;
    const RankEvidence& rank = *place->evidence;
    cell.has_evidence |= rank.scanned(phase);
    if (chain.steps.size() == cell.begin) {
      for (std::size_t position = 0; position < rank.size(); ++position) {
        if (rank.parameter(position).chunk != chunk) continue;
        look(rank, position, phase, keep,
             chain.steps.emplace_back(Step{stage, &rank.parameter(position)}));
      }
      continue;
    }
    for (std::size_t i = cell.begin; i < chain.steps.size(); ++i) {
      const auto position = rank.position_of(std::string_view(chain.steps[i].parameter->name));
      if (position) look(rank, *position, phase, keep, chain.steps[i]);
    }
  }
  cell.end = chain.steps.size();
  std::ranges::sort(cell.ranks);
}

/// Steps in different orders cannot be compared; only layers can.
bool have_one_order(const Lane& lane) {
  const auto is_same = [](const Step& a, const Step& b) {
    return a.parameter->name == b.parameter->name;
  };
  for (std::size_t s = 0; s < lane.stages.size(); ++s) {
    std::span<const Step> first;
    for (const Chain& chain : lane.chains) {
      const auto steps = chain.steps_of(s);
      if (first.empty()) first = steps;
      if (!steps.empty() && !std::ranges::equal(first, steps, is_same)) return false;
    }
  }
  return true;
}

class FlowFinder {
 public:
  explicit FlowFinder(Lane& lane) : lane_(lane) {
    for (const Chain& chain : lane_.chains) {
      for (const Step& step : chain.steps) {
        if (lane_.is_witness(step)) finite_.emplace(step.stage, step.parameter->name);
      }
    }
  }

  std::optional<Flow> find() {
    std::size_t bad_steps = 0;
    for (Chain& chain : lane_.chains) {
      close(chain);
      bad_steps += chain.bad_steps;
    }
    // A single bad gradient at the very end has not visibly spread, unless no rank can say what
    // came before or after.
    const bool is_flow = std::ranges::any_of(lane_.chains, [&](const Chain& chain) {
      return chain.bad_steps > 0 && (bad_steps > 1 || !chain.has_witness || is_end_unseen(chain));
    });
    if (!is_flow) return std::nullopt;
    for (Chain& chain : lane_.chains) {
      if (chain.bad_steps > 0) extend_over_layer(chain);
    }
    return describe();
  }

 private:
  /// Propagates finite values backwards: all before the last witness is finite.
  void close(Chain& chain) const {
    for (std::size_t i = chain.steps.size(); i-- > 0;) {
      if (lane_.is_witness(chain.steps[i])) {
        chain.has_witness = true;
        break;
      }
      if (chain.steps[i].status != Status::bad) continue;
      chain.later_start = i;
      ++chain.bad_steps;
    }
    chain.start = chain.later_start;
  }

  bool is_end_unseen(const Chain& chain) const {
    if (!lane_.has_all_stages) return true;
    for (std::size_t s = chain.steps[*chain.later_start].stage + 1; s < lane_.stages.size(); ++s) {
      if (lane_.stages[s].has_unseen) return true;
    }
    return false;
  }

  static std::pair<std::size_t, std::string_view> layer_at(const Chain& chain, std::size_t i) {
    return {chain.steps[i].stage, layer_of(chain.steps[i].parameter->name)};
  }

  /// Moves `start` back to the first bad step of its layer, which may have parallel branches. If
  /// the order was not observed, the steps of a layer have none, and the last witness's own layer
  /// counts, too.
  void extend_over_layer(Chain& chain) const {
    std::size_t from = *chain.later_start;
    if (lane_.is_order_observed && layer_at(chain, from).second.empty()) return;
    if (!lane_.is_order_observed) {
      while (from > 0 && !lane_.is_witness(chain.steps[from - 1])) --from;
      from -= from > 0 ? 1 : 0;
    }
    const auto layer = layer_at(chain, from);
    for (std::size_t i = from + 1; i-- > 0 && layer_at(chain, i) == layer;) {
      if (chain.steps[i].status == Status::bad) chain.start = i;
    }
  }

  /// The chains that had it before the next sum could spread it: from `start` on, a sharded
  /// parameter that is bad here is finite on another chain.
  std::set<const Chain*> chains_ahead(std::optional<std::size_t> Chain::*start) const {
    std::set<const Chain*> ahead;
    for (const Chain& chain : lane_.chains) {
      const auto is_finite_elsewhere = [&](const Step& step) {
        return step.status == Status::bad && finite_.contains({step.stage, step.parameter->name});
      };
      if (!(chain.*start)) continue;
      if (std::ranges::any_of(std::span(chain.steps).subspan(*(chain.*start)),
                              is_finite_elsewhere)) {
        ahead.insert(&chain);
      }
    }
    return ahead;
  }

  static bool is_before(const Chain& a, const Chain& b) {
    const auto place = [](const Chain& chain) {
      const std::size_t stage = chain.steps[*chain.start].stage;
      return std::pair(stage, *chain.start - chain.cells[stage].begin);
    };
    return place(a) < place(b);
  }

  /// True if `a`'s stretch has a bad step that is not bad in `b`'s. Other experts and other rows
  /// say nothing.
  static bool has_bad_that_lacks(const Chain& a, const Chain& b) {
    std::set<std::pair<std::size_t, std::string_view>> of_b;
    for (std::size_t i = *b.start; i < b.steps.size(); ++i) {
      if (b.steps[i].status == Status::bad) {
        of_b.emplace(b.steps[i].stage, b.steps[i].parameter->name);
      }
    }
    return std::any_of(a.steps.begin() + static_cast<std::ptrdiff_t>(*a.start), a.steps.end(),
                       [&](const Step& step) {
                         return step.status == Status::bad && !step.parameter->may_be_untouched &&
                                !of_b.contains({step.stage, step.parameter->name});
                       });
  }

  const Chain* find_one_ahead() const {
    const auto ahead = chains_ahead(&Chain::start), surely = chains_ahead(&Chain::later_start);
    if (surely.size() != 1 || ahead != surely) return nullptr;
    const Chain* const one = *surely.begin();
    for (const Chain& other : lane_.chains) {
      if (&other == one || !other.start) continue;
      if (lane_.is_order_observed ? is_before(other, *one) : has_bad_that_lacks(other, *one)) {
        return nullptr;
      }
    }
    return one;
  }

  Flow describe() {
    Flow flow;
    const Chain* const one = find_one_ahead();
    flow.is_on_one_rank = one != nullptr;
    for (Chain& chain : lane_.chains) {
      if (!chain.start) continue;
      if (flow.chain == nullptr || is_before(chain, *flow.chain)) flow.chain = &chain;
      flow.may_come_from_forward |= !chain.has_witness;
      for (std::size_t i = *chain.start; i < chain.steps.size(); ++i) {
        Step& step = chain.steps[i];
        step.is_in_flow = step.status == Status::bad;
        flow.bad_steps += step.is_in_flow ? 1 : 0;
      }
    }
    if (one != nullptr) flow.chain = one;
    flow.start = *flow.chain->start;
    flow.has_reached_others = std::ranges::any_of(lane_.chains, [&](const Chain& chain) {
      return &chain != flow.chain && chain.start.has_value();
    });
    for (const Chain& chain : lane_.chains) add_unknown(flow, chain);
    return flow;
  }

  /// Adds the ranks of a chain whose unknown activations' gradients may have made the first bad
  /// step: from its stage up to the last witness before it. A stage above with a witness on any
  /// tensor-parallel rank received nothing bad, as its sums would have spread it.
  void add_unknown(Flow& flow, const Chain& chain) const {
    const bool is_first = &chain == flow.chain;
    if (flow.may_come_from_forward) {
      for (std::size_t s = 0; s < lane_.stages.size(); ++s) add_rank(flow, chain, s);
      return;
    }
    if (flow.is_on_one_rank && !is_first) return;
    const std::size_t stage = flow.chain->steps[flow.start].stage;
    const bool is_proven = has_witness_before(flow, chain);
    if (is_first) flow.is_first_of_stage = !is_proven;
    add_rank(flow, chain, stage);
    for (std::size_t s = stage; s > 0 && !is_proven;) {
      add_rank(flow, chain, --s);
      if (has_witness(s)) break;
    }
  }

  void add_rank(Flow& flow, const Chain& chain, std::size_t stage) const {
    flow.stages.insert(lane_.stages[stage].pp);
    flow.ranks.insert(chain.cells[stage].ranks.begin(), chain.cells[stage].ranks.end());
  }

  bool has_witness(std::size_t stage) const {
    return std::ranges::any_of(lane_.chains, [&](const Chain& chain) {
      return std::ranges::any_of(chain.steps_of(stage),
                                 [&](const Step& step) { return lane_.is_witness(step); });
    });
  }

  /// On the stage of the flow's first step, before the chain's own stretch.
  bool has_witness_before(const Flow& flow, const Chain& chain) const {
    const Step& first = flow.chain->steps[flow.start];
    const Cell& cell = chain.cells[first.stage];
    for (std::size_t i = cell.begin; i < std::min(cell.end, chain.start.value_or(cell.end)); ++i) {
      // Without an order, what is in one layer may be after it.
      const bool is_before = lane_.is_order_observed || layer_of(chain.steps[i].parameter->name) !=
                                                            layer_of(first.parameter->name);
      if (is_before && lane_.is_witness(chain.steps[i])) return true;
    }
    return false;
  }

  Lane& lane_;
  std::set<std::pair<std::size_t, std::string_view>> finite_;  // witnesses of any chain
};

}  // namespace

bool Lane::is_witness(const Step& step) const {
  if (step.status != Status::clean || step.is_zero) return false;
  if (step.parameter->may_be_untouched) return false;
  if (!step.parameter->is_tp_duplicate) return true;
  const Stage& stage = stages[step.stage];
  return !stage.has_unseen && !stage.bad_duplicates.contains(step.parameter->name);
}

Lane make_lane(const Incident& incident, std::span<const Place* const> places, Phase phase,
               const BadFilter& keep) {
  const int pipeline_size = incident.pipeline_size();
  Lane lane;
  lane.dp = places.front()->dp;
  lane.cp = places.front()->cp;
  std::set<int> pipeline_ranks, chunks{0}, tps;
  for (const Place* place : places) {
    pipeline_ranks.insert(place->pp);
    tps.insert(place->tp);
    if (place->evidence == nullptr || place->evidence->size() == 0) continue;
    const Ledger& ledger = place->evidence->ledger();
    lane.is_order_observed &= ledger.is_backward_order_observed;
    for (const ParameterRecord& parameter : ledger.backward_order) chunks.insert(parameter.chunk);
  }
  lane.has_all_stages = std::ssize(pipeline_ranks) == pipeline_size;
  std::map<std::pair<int, int>, std::vector<const Place*>> by_cell;  // tp, pp
  for (const Place* place : places) by_cell[{place->tp, place->pp}].push_back(place);
  for (const int chunk : chunks) {
    for (const int pp : pipeline_ranks) {
      lane.stages.push_back({.index = std::int64_t{chunk} * pipeline_size + pp, .pp = pp});
    }
  }
  std::ranges::sort(lane.stages, std::greater{}, &Stage::index);
  for (Stage& stage : lane.stages) stage.has_unseen = !incident.unplaced().empty();
  for (const int tp : tps) {
    Chain& chain = lane.chains.emplace_back();
    chain.tp = tp;
    for (std::size_t s = 0; s < lane.stages.size(); ++s) {
      Stage& stage = lane.stages[s];
      const auto& of_cell = by_cell[{tp, stage.pp}];
      add_cell(chain, s, static_cast<int>(stage.index / pipeline_size), of_cell, phase, keep);
      stage.has_unseen |= !of_cell.empty() && !chain.cells[s].has_evidence;
      for (const Step& step : chain.steps_of(s)) {
        if (step.status != Status::bad || !step.parameter->is_tp_duplicate) continue;
        stage.bad_duplicates.insert(step.parameter->name);
      }
    }
  }
  if (!have_one_order(lane)) lane.is_order_observed = false;
  return lane;
}

std::optional<Flow> find_flow(Lane& lane) {
  return FlowFinder(lane).find();
}

std::string_view layer_of(std::string_view parameter) {
  for (std::size_t begin = 0; begin < parameter.size();) {
    const std::size_t end = std::min(parameter.find('.', begin), parameter.size());
    const std::string_view part = parameter.substr(begin, end - begin);
    const bool is_number =
        !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    if (is_number && end < parameter.size()) return parameter.substr(0, end);
    begin = end + 1;
  }
  return {};
}

}  // namespace nanlocator::inline locate_room::events
