#include "locate/crossing_simulator/reduction.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "locate/simulated_transformer.hpp"

namespace nanlocator::pipeline {
namespace {

using namespace simulator;

class Reduction {
 public:
  Reduction(const Layout& layout, const BackwardOrders& orders, const std::vector<Fault>& faults,
            BadByRank local, Observer& observer)
      : layout_(layout), orders_(orders), faults_(faults), observer_(observer) {
    bad_.local = std::move(local);
  }

  BadGradients result() {
    sum_over_dp();
    strike(Plant::reduced, bad_.reduced);
    bad_.read = bad_.reduced;
    for (int dp = 0; dp < layout_.dp; ++dp) {
      if (layout_.has_sequence_parallel) {
        for (int pp = 0; pp < layout_.pp; ++pp) reduce_duplicates(dp, pp);
      }
      if (layout_.has_tied_embeddings && layout_.pp > 1) {
        for (int tp = 0; tp < layout_.tp; ++tp) reduce_tied(dp, tp);
      }
    }
    strike(Plant::norm_gradient, bad_.read);
    return std::move(bad_);
  }

 private:
  void strike(Plant plant, BadByRank& bad) const {
    for (const Fault& fault : faults_) {
      if (fault.plant != plant) continue;
      add_bad(bad[rank_of(layout_, fault)], gradient_of(layout_, fault),
              element_of(layout_, fault));
    }
  }

  void sum_over_dp() {
    std::map<std::pair<int, int>, BadParameters> sums;  // by (tp, pp)
    for (const auto& [rank, bad] : bad_.local) {
      const RankCoordinates at = layout_.coordinates_of(rank);
      for (const auto& [name, extent] : bad) add_bad(sums[{at.tp.rank, at.pp.rank}], name, extent);
    }
    for (const Fault& fault : faults_) {
      if (fault.plant != Plant::reduced_everywhere) continue;
      add_bad(sums[{fault.tp, fault.stage % layout_.pp}], gradient_of(layout_, fault),
              element_of(layout_, fault));
    }
    for (const auto& [part, sum] : sums) {
      const auto [tp, pp] = part;
      for (int dp = 0; dp < layout_.dp; ++dp) bad_.reduced[layout_.rank(tp, pp, dp)] = sum;
    }
  }

  void reduce_duplicates(int dp, int pp) {
    std::vector<int> members;
    std::vector<Tokens> sent;
    BadParameters all;
    for (int tp = 0; tp < layout_.tp; ++tp) {
      members.push_back(layout_.rank(tp, pp, dp));
      sent.push_back(0);
      for (const auto& [name, extent] : found_or_empty(bad_.reduced, members.back())) {
        if (!is_reduced_duplicate(pp, name)) continue;
        add_bad(all, name, extent);
        sent.back() = 1;
      }
    }
    all_reduce("tp", members, sent, !all.empty());
    for (const int rank : members) {
      for (const auto& [name, extent] : all) add_bad(bad_.read[rank], name, extent);
    }
  }
  [[nodiscard]] bool is_reduced_duplicate(int pp, const std::string& name) const {
    const auto& order = orders_[static_cast<std::size_t>(pp)];
    const auto found = std::ranges::find(order, name, &ParameterRecord::name);
    return found != order.end() && found->is_tp_duplicate && !name.starts_with("embedding.");
  }

  void reduce_tied(int dp, int tp) {
    const int first = layout_.rank(tp, 0, dp), last = layout_.rank(tp, layout_.pp - 1, dp);
    const bool is_first_bad = found_or_empty(bad_.reduced, first).contains(kWordEmbeddings);
    const bool is_last_bad = found_or_empty(bad_.reduced, last).contains(kOutputLayer);
    const bool is_bad = is_first_bad || is_last_bad;
    all_reduce("embd", {first, last}, {Tokens{is_first_bad}, Tokens{is_last_bad}}, is_bad);
    if (!is_bad) return;
    add_bad(bad_.read[first], kWordEmbeddings, Extent());
    add_bad(bad_.read[last], kOutputLayer, Extent());
  }

  void all_reduce(const std::string& group, const std::vector<int>& members,
                  const std::vector<Tokens>& sent, bool is_sum_bad) {
    observer_.collective({Phase::grad_reduced}, group, members, "c10d::allreduce_", sent,
                         std::vector(members.size(), Received{Tokens{is_sum_bad}}));
  }

  const Layout& layout_;
  const BackwardOrders& orders_;
  const std::vector<Fault>& faults_;
  Observer& observer_;
  BadGradients bad_;
};

}  // namespace

BadGradients reduce(const Layout& layout, const BackwardOrders& orders,
                    const std::vector<Fault>& faults, BadByRank local, Observer& observer) {
  return Reduction(layout, orders, faults, std::move(local), observer).result();
}

}  // namespace nanlocator::pipeline
