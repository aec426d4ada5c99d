#include "locate/crossing_simulator/exchange.hpp"

namespace nanlocator::pipeline {

template <typename Result>
void Exchange::collective(const std::string& group, const std::vector<Cell>& cells,
                          const std::string& op, Grid& values, const Place& place, Result result) {
  std::vector<int> members;
  std::vector<Tokens> sent;
  Tokens sum = 0;
  for (const auto& [lane, tp] : cells) {
    members.push_back(rank_at(lane, tp, place.stage));
    sent.push_back(values[lane][tp]);
    sum |= sent.back();
  }
  std::vector<Received> received;
  for (const auto& [lane, tp] : cells) {
    received.push_back(result(lane, tp, sum));
    values[lane][tp] = received.back().tokens;
  }
  observer_.collective(place, group, members, op, sent, received);
}

template <typename Result>
void Exchange::over_tp(Grid& values, const std::string& op, const Place& place, Result result) {
  for (int lane = 0; lane < tokens_.lanes(); ++lane) {
    std::vector<Cell> cells;
    for (int tp = 0; tp < layout_.tp; ++tp) cells.emplace_back(lane, tp);
    collective("tp", cells, op, values, place, result);
  }
}

template <typename Result>
void Exchange::over_ep(Grid& values, const Place& place, Result result) {
  for (int tp = 0; tp < layout_.tp; ++tp) {
    std::vector<Cell> cells;
    for (int lane = 0; lane < tokens_.lanes(); ++lane) cells.emplace_back(lane, tp);
    collective("ep", cells, "c10d::alltoall_base_", values, place, result);
  }
}

void Exchange::all_reduce(Grid& values, const Place& place) {
  over_tp(values, "c10d::allreduce_", place, [](int, int, Tokens sum) { return Received{sum}; });
}

void Exchange::enter_column(Grid& hidden, const Place& place) {
  if (!layout_.has_sequence_parallel) return;
  over_tp(hidden, "c10d::_allgather_base_", place,
          [](int, int, Tokens all) { return Received{all}; });
}

void Exchange::leave_row(Grid& region, const Place& place) {
  const bool is_dealt_out = layout_.has_sequence_parallel;
  over_tp(region, is_dealt_out ? "c10d::_reduce_scatter_base_" : "c10d::allreduce_", place,
          [&](int lane, int tp, Tokens sum) {
            const Tokens held = tokens_.held_by(lane, tp);
            Received out;  // a group of one rank has no sum that can fail
            if (layout_.tp > 1) out = strikes_.at_sum(place, first_dp_ + lane, tp, held);
            out.tokens |= sum & held;
            return out;
          });
}

void Exchange::leave_column_backward(Grid& region, Grid input, const Place& place) {
  enter_column(input, place);
  leave_row(region, place);
}

void Exchange::to_experts(Grid& values, const Place& place) {
  const Grid routed = tokens_.routed();
  over_ep(values, place,
          [&](int lane, int tp, Tokens all) { return Received{all & routed[lane][tp]}; });
}

void Exchange::from_experts(Grid& values, const Place& place) {
  over_ep(values, place,
          [&](int lane, int tp, Tokens all) { return Received{all & tokens_.held_by(lane, tp)}; });
}

void Exchange::send(const Grid& values, const Place& place, int to_stage) {
  tokens_.each_cell([&](int lane, int tp) {
    const Tokens tokens = values[lane][tp];
    const std::int64_t sequence =
        observer_.send(place, link(lane, tp, place.stage, to_stage), tokens);
    messages_[{place.phase, to_stage, place.microbatch, lane, tp}] = {sequence, tokens};
  });
}

Grid Exchange::receive(const Place& place, int from_stage) {
  Grid values = tokens_.none();
  tokens_.each_cell([&](int lane, int tp) {
    const Message& message = messages_.at({place.phase, place.stage, place.microbatch, lane, tp});
    values[lane][tp] = message.tokens |
                       strikes_.at_transfer(place, first_dp_ + lane, tp, tokens_.held_by(lane, tp));
    observer_.receive(place, link(lane, tp, from_stage, place.stage), message.sequence,
                      values[lane][tp]);
  });
  return values;
}

Link Exchange::link(int lane, int tp, int from_stage, int to_stage) const {
  Link link{{}, rank_at(lane, tp, from_stage), rank_at(lane, tp, to_stage)};
  for (int pp = 0; pp < layout_.pp; ++pp) link.pipeline.push_back(rank_at(lane, tp, pp));
  return link;
}

}  // namespace nanlocator::pipeline
