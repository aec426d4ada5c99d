// Exchange of tokens among the ranks of one replica: reductions over tp, the all-to-alls of expert
// parallelism, messages between pipeline stages. Faults strike the results, and the observer sees
// everything.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "locate/crossing_simulator/observer.hpp"
#include "locate/crossing_simulator/place.hpp"
#include "locate/crossing_simulator/strikes.hpp"
#include "locate/crossing_simulator/tokens.hpp"

namespace nanlocator::pipeline {

class Exchange {
 public:
  /// For the replica whose first dp rank is `first_dp`. Keeps references to its arguments.
  Exchange(const Layout& layout, int first_dp, const ReplicaTokens& tokens, Strikes& strikes,
           Observer& observer)
      : layout_(layout),
        first_dp_(first_dp),
        tokens_(tokens),
        strikes_(strikes),
        observer_(observer) {}

  void all_reduce(Grid& values, const Place& place);
  /// The input of a column-parallel layer: all-gathered if tokens are distributed.
  void enter_column(Grid& hidden, const Place& place);
  /// The output of a row-parallel layer: the sum, or each rank's tokens of it.
  void leave_row(Grid& region, const Place& place);
  /// A column-parallel layer's backward: with sequence parallelism its input is gathered again for
  /// the weight's gradient; then the parts of the input's gradient are summed.
  void leave_column_backward(Grid& region, Grid input, const Place& place);

  /// To the lanes of the tokens' experts, and back.
  void to_experts(Grid& values, const Place& place);
  void from_experts(Grid& values, const Place& place);

  void send(const Grid& values, const Place& place, int to_stage);
  [[nodiscard]] Grid receive(const Place& place, int from_stage);

  [[nodiscard]] int rank_at(int lane, int tp, int stage) const {
    return layout_.rank(tp, stage, first_dp_ + lane);
  }

 private:
  using Cell = std::pair<int, int>;  // lane, tp
  /// Runs a collective among the cells' ranks; `result(lane, tp, sum)` is one cell's result for the
  /// sum of all inputs.
  template <typename Result>
  void collective(const std::string& group, const std::vector<Cell>& cells, const std::string& op,
                  Grid& values, const Place& place, Result result);
  template <typename Result>
  void over_tp(Grid& values, const std::string& op, const Place& place, Result result);
  template <typename Result>
  void over_ep(Grid& values, const Place& place, Result result);
  [[nodiscard]] Link link(int lane, int tp, int from_stage, int to_stage) const;

  struct Message {
    std::int64_t sequence = 0;
    Tokens tokens = 0;
  };
  using MessageKey = std::tuple<Phase, int, int, int, int>;  // to stage, microbatch, lane, tp

  const Layout& layout_;
  int first_dp_;
  const ReplicaTokens& tokens_;
  Strikes& strikes_;
  Observer& observer_;
  std::map<MessageKey, Message> messages_;
};

}  // namespace nanlocator::pipeline
