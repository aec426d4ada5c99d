#include "locate/backward_flow.hpp"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace nanlocator::inline locate_room {
namespace {

/// The steps of one tensor-parallel rank through all stages, in backward order.
struct Chain {
  int tp = 0;
  std::vector<StepPlace> places;
  // The bad stretch at the end of backward, if `bad_steps` > 0. places[strict_start..] hold no
  // clean witness. places[start..] may hold some within the start's own layer, on a parallel
  // branch: q's gradient is bad, k's is clean, and all that backward visits after them are bad.
  std::size_t strict_start = 0;
  std::size_t start = 0;
  std::size_t bad_steps = 0;
  bool has_clean_witness = false;
};

class FlowFinder {
 public:
  explicit FlowFinder(Lane& lane) : lane_(lane) {}

  std::optional<Flow> find() {
    make_chains();
    std::size_t bad_steps = 0;
    for (Chain& chain : chains_) {
      find_stretch(chain);
      bad_steps += chain.bad_steps;
    }
    if (bad_steps == 0) return std::nullopt;
    // One bad parameter at the very end of backward has not visibly spread, unless no rank can say
    // what came before it or after it.
    if (bad_steps == 1 && std::ranges::none_of(chains_, [&](const Chain& chain) {
          return chain.bad_steps > 0 && (!chain.has_clean_witness || is_end_unseen(chain));
        })) {
      return std::nullopt;
    }
    for (Chain& chain : chains_) {
      if (chain.bad_steps > 0) extend_over_layer(chain);
    }
    return describe();
  }

 private:
  const Stage& stage(StepPlace place) const { return lane_.stages[place.stage]; }
  const Cell& cell(StepPlace place) const { return stage(place).cells[place.cell]; }
  Step& step(StepPlace place) {
    return lane_.stages[place.stage].cells[place.cell].steps[place.step];
  }
  bool is_bad(StepPlace place) { return step(place).status == Status::bad; }
  bool is_clean(StepPlace place) { return is_clean_witness(stage(place), step(place)); }

  void make_chains() {
    std::set<int> tps;
    for (const Stage& each : lane_.stages) {
      for (const Cell& each_cell : each.cells) tps.insert(each_cell.tp);
    }
    for (const int tp : tps) {
      Chain chain;
      chain.tp = tp;
      for (std::size_t s = 0; s < lane_.stages.size(); ++s) {
        const auto& cells = lane_.stages[s].cells;
        for (std::size_t c = 0; c < cells.size(); ++c) {
          if (cells[c].tp != tp) continue;
          for (std::size_t i = 0; i < cells[c].steps.size(); ++i) chain.places.push_back({s, c, i});
        }
      }
      chains_.push_back(std::move(chain));
    }
  }

  void find_stretch(Chain& chain) {
    bool is_in_stretch = true;
    for (std::size_t i = chain.places.size(); i-- > 0;) {
      if (is_clean(chain.places[i])) {
        chain.has_clean_witness = true;
        is_in_stretch = false;
      } else if (is_in_stretch && is_bad(chain.places[i])) {
        chain.strict_start = i;
        ++chain.bad_steps;
      }
    }
    chain.start = chain.strict_start;
  }

  /// True if a stage that backward visits after the chain's stretch has not answered.
  bool is_end_unseen(const Chain& chain) const {
    if (!lane_.has_all_stages) return true;
    for (std::size_t s = chain.places[chain.strict_start].stage + 1; s < lane_.stages.size(); ++s) {
      if (std::ranges::any_of(lane_.stages[s].cells,
                              [](const Cell& each) { return !each.has_evidence; })) {
        return true;
      }
    }
    return false;
  }

  /// Moves `start` back to the first bad parameter of the start's layer. If the order within layers
  /// was not observed, only layers can be ordered. If the stretch then begins at the top of its
  /// layer, the layer before it may hold the start behind clean parameters.
  void extend_over_layer(Chain& chain) {
    const auto group_of = [&](std::size_t i) {
      return std::pair(chain.places[i].stage, layer_of(step(chain.places[i]).parameter->name));
    };
    const auto extend = [&](std::size_t from) {
      const auto group = group_of(from);
      std::size_t first = from;
      for (; first > 0 && group_of(first - 1) == group; --first) {
      }
      std::size_t earliest = chain.start;
      bool has_others = false;  // the group has bad or clean ones before the start
      for (std::size_t i = std::min(from + 1, chain.start); i-- > first;) {
        has_others |= is_bad(chain.places[i]) || is_clean(chain.places[i]);
        if (is_bad(chain.places[i])) earliest = i;
      }
      chain.start = earliest;
      return std::pair(first, has_others);
    };
    if (lane_.is_order_observed) {
      if (!group_of(chain.start).second.empty()) extend(chain.start);
      return;
    }
    const auto [first, has_others] = extend(chain.start);
    if (!has_others && first > 0) extend(first - 1);
  }

  /// The chains whose stretch, from `first_of(chain)` on, has a bad sharded parameter that is clean
  /// on another tensor-parallel rank. A duplicate that is bad here is no clean witness there.
  template <typename FirstOf>
  std::set<int> chains_with_own_fault(FirstOf first_of) {
    std::set<int> own;
    for (const Chain& chain : chains_) {
      if (chain.bad_steps == 0) continue;
      for (std::size_t i = first_of(chain); i < chain.places.size(); ++i) {
        if (is_bad(chain.places[i]) && is_clean_on_another(chain.places[i])) {
          own.insert(chain.tp);
          break;
        }
      }
    }
    return own;
  }

  bool is_clean_on_another(StepPlace place) {
    const Stage& at = stage(place);
    if (at.cells.size() < 2) return false;
    const std::string_view name = step(place).parameter->name;
    auto& clean = clean_cells_[place.stage];
    if (clean.empty()) {
      for (std::size_t c = 0; c < at.cells.size(); ++c) {
        for (const Step& each : at.cells[c].steps) {
          if (is_clean_witness(at, each)) clean[each.parameter->name].push_back(c);
        }
      }
    }
    const auto found = clean.find(name);
    return found != clean.end() &&
           std::ranges::any_of(found->second, [&](std::size_t c) { return c != place.cell; });
  }

  /// The only tensor-parallel rank that can hold the start; empty if several can.
  std::optional<int> find_one_tp_rank() {
    const auto strict =
        chains_with_own_fault([](const Chain& chain) { return chain.strict_start; });
    const auto extended = chains_with_own_fault([](const Chain& chain) { return chain.start; });
    if (strict.size() != 1 || extended != strict) return std::nullopt;
    const int tp = *strict.begin();
    const auto& own = *std::ranges::find(chains_, tp, &Chain::tp);
    for (const Chain& other : chains_) {
      if (other.tp == tp || other.bad_steps == 0) continue;
      if (lane_.is_order_observed ? is_before(other, own) : has_bad_that_lacks(other, own)) {
        return std::nullopt;
      }
    }
    return tp;
  }

  static bool is_before(const Chain& a, const Chain& b) {
    const StepPlace at = a.places[a.start], other = b.places[b.start];
    return std::pair(at.stage, at.step) < std::pair(other.stage, other.step);
  }

  /// True if `a`'s stretch has a bad parameter that is not bad in `b`'s.
  bool has_bad_that_lacks(const Chain& a, const Chain& b) {
    std::set<std::pair<std::size_t, std::string_view>> of_b;
    for (std::size_t i = b.start; i < b.places.size(); ++i) {
      if (is_bad(b.places[i])) of_b.emplace(b.places[i].stage, step(b.places[i]).parameter->name);
    }
    for (std::size_t i = a.start; i < a.places.size(); ++i) {
      if (!is_bad(a.places[i])) continue;
      if (step(a.places[i]).parameter->may_be_untouched) continue;  // other rows, other experts
      if (!of_b.contains({a.places[i].stage, step(a.places[i]).parameter->name})) return true;
    }
    return false;
  }

  Flow describe() {
    Flow flow;
    const auto one_tp = find_one_tp_rank();
    const Chain* first = nullptr;
    for (const Chain& chain : chains_) {
      if (chain.bad_steps == 0) continue;
      if (one_tp ? chain.tp == *one_tp : first == nullptr || is_before(chain, *first)) {
        first = &chain;
      }
      for (std::size_t i = chain.start; i < chain.places.size(); ++i) {
        if (!is_bad(chain.places[i])) continue;
        step(chain.places[i]).is_in_flow = true;
        ++flow.bad_steps;
      }
    }
    flow.start = first->places[first->start];
    flow.is_one_tp_rank = one_tp.has_value();
    flow.reached_other_tp_ranks = std::ranges::any_of(
        chains_, [&](const Chain& chain) { return &chain != first && chain.bad_steps > 0; });
    // A forward birth reaches the loss and through it every parameter of every rank. One chain
    // without a clean witness suffices to keep it possible: with a vocabulary-parallel loss, the
    // last layer's shards need not all be bad.
    flow.may_come_from_forward = std::ranges::any_of(chains_, [](const Chain& chain) {
      return chain.bad_steps > 0 && !chain.has_clean_witness;
    });
    flow.is_at_stage_boundary = is_at_stage_boundary(*first);
    choose_candidates(flow, *first);
    return flow;
  }

  /// True if no clean witness of the start's stage precedes the start in backward.
  bool is_at_stage_boundary(const Chain& chain) {
    const StepPlace start = chain.places[chain.start];
    const auto layer = layer_of(step(start).parameter->name);
    for (std::size_t i = 0; i < chain.start; ++i) {
      if (chain.places[i].stage != start.stage || !is_clean(chain.places[i])) continue;
      // If the order within a layer was not observed, parameters of one layer cannot be ordered.
      if (lane_.is_order_observed || layer_of(step(chain.places[i]).parameter->name) != layer) {
        return false;
      }
    }
    return true;
  }

  void choose_candidates(Flow& flow, const Chain& first) {
    std::set<int> ranks, stages;
    const auto add = [&](std::size_t s, bool only_this_tp) {
      stages.insert(lane_.stages[s].pp);
      for (const Cell& each : lane_.stages[s].cells) {
        if (!only_this_tp || each.tp == first.tp)
          ranks.insert(each.ranks.begin(), each.ranks.end());
      }
    };
    if (flow.may_come_from_forward) {
      for (std::size_t s = 0; s < lane_.stages.size(); ++s) add(s, false);
    } else {
      add(flow.start.stage, flow.is_one_tp_rank);
      // Goes up through stages without evidence to the first with a clean witness: its last
      // backward may have sent the bad value.
      for (std::size_t s = flow.start.stage; flow.is_at_stage_boundary && s-- > 0;) {
        add(s, flow.is_one_tp_rank);
        if (has_clean_witness(lane_.stages[s])) break;
      }
    }
    // A rank that did not answer may have received the bad value from above and passed it on in a
    // sum.
    if (!flow.is_one_tp_rank) {
      for (const Cell& each : lane_.stages[flow.start.stage].cells) {
        bool is_unseen = !each.has_evidence;
        for (std::size_t s = flow.start.stage; is_unseen && s-- > 0;) {
          is_unseen = false;
          for (const Cell& above : lane_.stages[s].cells) {
            if (above.tp != each.tp) continue;
            stages.insert(lane_.stages[s].pp);
            ranks.insert(above.ranks.begin(), above.ranks.end());
            is_unseen = !above.has_evidence;
          }
        }
      }
    }
    flow.candidates.assign(ranks.begin(), ranks.end());
    flow.candidate_stages.assign(stages.begin(), stages.end());
  }

  static bool has_clean_witness(const Stage& stage) {
    return std::ranges::any_of(stage.cells, [&](const Cell& each) {
      return std::ranges::any_of(each.steps,
                                 [&](const Step& step) { return is_clean_witness(stage, step); });
    });
  }

  Lane& lane_;
  std::vector<Chain> chains_;
  // By stage: the cells in which a parameter is a clean witness.
  std::unordered_map<std::size_t, std::unordered_map<std::string_view, std::vector<std::size_t>>>
      clean_cells_;
};

}  // namespace

bool is_clean_witness(const Stage& stage, const Step& step) {
  if (step.status != Status::clean || step.parameter->may_be_untouched) return false;
  if (!step.parameter->is_tp_duplicate) return true;
  return !stage.has_unseen_cell && !stage.bad_duplicates.contains(step.parameter->name);
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

}  // namespace nanlocator::inline locate_room
