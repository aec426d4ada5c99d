#include "nanlocator/watch/boundary_watch.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nanlocator/error.hpp"
#include "nanlocator/tensor/scan_one.hpp"
#include "nanlocator/watch/position.hpp"

namespace nanlocator {
namespace {

constexpr const char* kAllReduce = "c10d::allreduce_";

using Tensors = std::vector<at::Tensor>;

at::Tensor bad() {
  return at::full({2, 3}, NAN);
}

/// Writes as a collective does: no operator, no new version.
void overwrite(const at::Tensor& tensor, float value) {
  static_cast<float*>(tensor.data_ptr())[0] = value;
}

class BoundaryWatchTest : public ::testing::Test {
 protected:
  BoundaryWatchTest()
      : tp_(watch_.add_group("tp", {1, 0})), pp_(watch_.add_group("pp", {0, 2, 4})) {
    watch_.begin_step();
  }
  ~BoundaryWatchTest() override { set_current_microbatch({}); }

  CrossingId start_all_reduce(const at::Tensor& tensor) {
    const auto crossing = watch_.begin_collective(tp_, kAllReduce, Tensors{tensor});
    watch_.was_issued(crossing);
    return crossing;
  }
  void all_reduce(const at::Tensor& tensor) {
    watch_.finish(start_all_reduce(tensor), Tensors{tensor});
  }
  void send(int peer, const at::Tensor& tensor) {
    watch_.was_issued(watch_.begin_send(pp_, peer, Tensors{tensor}));
  }
  void receive(int peer, const at::Tensor& tensor) {
    const auto crossing = watch_.begin_receive(pp_, peer);
    watch_.was_issued(crossing);
    watch_.finish(crossing, Tensors{tensor});
  }
  void within(const std::string& module, const std::function<void()>& body) {
    const ModuleScope scope(module);
    const auto call = watch_.enter(current_module());
    body();
    watch_.leave(call);
  }
  void forward(MicrobatchPlace place, const std::function<void()>& body) {
    watch_.begin_forward(place, {});
    set_current_microbatch(place);
    body();
    set_current_microbatch({});
    watch_.end_forward(place, {});
  }

  std::vector<Sighting> sightings() { return watch_.collect(7).sightings; }
  Sighting only_sighting() {
    const auto all = sightings();
    EXPECT_EQ(all.size(), 1U);
    return all.empty() ? Sighting{} : all.front();
  }
  std::vector<std::string> coverage() {
    std::vector<std::string> lines;
    for (const auto& c : watch_.collect(7).coverage) {
      lines.push_back(c.group + " " + (c.peer ? std::to_string(*c.peer) : "-") + " " +
                      c.role.text() + " " + std::to_string(c.count));
    }
    return lines;
  }

  BoundaryWatch watch_;
  CrossingGroup tp_, pp_;
};

using Lines = std::vector<std::string>;

TEST_F(BoundaryWatchTest, TellsWhatWasPutInFromWhatCameOutOfACollective) {
  all_reduce(at::ones({4}));
  const auto tensor = at::ones({2, 3});
  const auto crossing = watch_.begin_collective(tp_, kAllReduce, Tensors{tensor});
  overwrite(tensor, NAN);
  watch_.finish(crossing, Tensors{tensor});

  const auto sighting = only_sighting();
  EXPECT_EQ(sighting.role, "received");
  EXPECT_EQ(sighting.op, kAllReduce);
  EXPECT_EQ(sighting.iteration, 7);
  EXPECT_EQ(sighting.dtype, "float32");
  EXPECT_EQ(sighting.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(sighting.stats.nan, 1U);
  EXPECT_EQ(sighting.crossing, (Crossing{"tp", {0, 1}, std::nullopt, 1}));
}

TEST_F(BoundaryWatchTest, CountsWhatItCannotScanAsNotScannedAndNotAsFinite) {
  all_reduce(at::ones({4}));
  const auto payload = at::zeros({16}, at::kByte);  // a quantised tensor's
  const auto all = at::zeros({32}, at::kByte);
  watch_.finish(watch_.begin_collective(tp_, "c10d::_allgather_base_", Tensors{payload}),
                Tensors{all});
  all_reduce(at::zeros({4}, at::kLong));                              // counts of tokens
  all_reduce(at::empty({4}, at::TensorOptions().device(at::kMeta)));  // a subclass may look so
  all_reduce(at::empty({0}, at::kByte));
  const auto coverage = watch_.collect(7).coverage;
  ASSERT_EQ(coverage.size(), 1U);
  EXPECT_EQ(coverage[0].count, 5);
  EXPECT_EQ(coverage[0].not_scanned, RankList({1, 3}));
  EXPECT_FALSE(coverage[0].is_unseen_by_member);  // a gather, a sum: all receive the same
  EXPECT_FALSE(coverage[0].is_whole());
}

TEST_F(BoundaryWatchTest, CountsWhatCrossesBetweenPassesAndScansNoneOfIt) {
  watch_.skip_collective(tp_);
  watch_.skip_message(pp_, 4, /*is_received=*/true);
  watch_.begin_pass();
  all_reduce(bad());
  receive(4, bad());
  watch_.skip_collective(tp_);
  const auto [seen, coverage] = watch_.collect(7);
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].crossing->sequence, 1);
  EXPECT_EQ(seen[2].crossing, (Crossing{"pp", {0, 2, 4}, 4, 1}));
  ASSERT_EQ(coverage.size(), 2U);
  EXPECT_EQ(coverage[0].first, 1);
  EXPECT_EQ(coverage[0].count, 2);  // excludes the one after the pass
  EXPECT_EQ(coverage[1].first, 1);
}

TEST_F(BoundaryWatchTest, ForgetsWhatWasSeenBeforeThePassButNotItsNumber) {
  all_reduce(bad());
  watch_.begin_pass();
  all_reduce(bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].crossing->sequence, 1);
  watch_.begin_step();
  all_reduce(bad());
  EXPECT_EQ(sightings()[0].crossing->sequence, 0);
}

TEST_F(BoundaryWatchTest, NamesTheOwnerOfWeightsAndGradientsThatAFrameworkExchanges) {
  watch_.enter_transfer(intern_module_path("layers.3"), /*reduces_gradients=*/false);
  all_reduce(bad());
  watch_.leave_transfer();
  watch_.enter_transfer(intern_module_path("head"), /*reduces_gradients=*/true);
  all_reduce(bad());
  watch_.leave_transfer();
  all_reduce(bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 6U);
  EXPECT_EQ(seen[0].module, "layers.3");
  EXPECT_EQ(seen[0].phase, Phase::forward);
  EXPECT_TRUE(seen[1].crossing->carries_weights);
  EXPECT_EQ(seen[2].module, "head");
  EXPECT_EQ(seen[2].phase, Phase::grad_reduced);
  EXPECT_FALSE(seen[2].crossing->carries_weights);
  EXPECT_EQ(seen[4].module, "");
}

TEST_F(BoundaryWatchTest, KeepsWhatEveryMemberGetsAlikeWhereARankAsks) {
  const auto finish = [&](CrossingGroup group, const char* op, const at::Tensor& out) {
    watch_.finish(watch_.begin_collective(group, op, Tensors{out}), Tensors{out});
  };
  finish(tp_, kAllReduce, at::ones({4}));  // no rank asks
  EXPECT_TRUE(watch_.take_results().empty());
  watch_.begin_step();
  watch_.keep_results({.rank = 1, .microbatch = 0});
  forward({0, {}}, [&] { finish(tp_, kAllReduce, at::tensor({3.0F, -4.0F, 0.0F})); });
  forward({0, {}}, [&] { finish(tp_, "c10d::_reduce_scatter_base_", at::ones({4})); });
  forward({0, {}}, [&] { finish(tp_, kAllReduce, at::full({4}, NAN)); });
  forward({1, {}}, [&] { finish(tp_, kAllReduce, at::ones({4})); });
  forward({0, {}}, [&] { finish(pp_, kAllReduce, at::ones({4})); });  // rank 1 is no member
  const auto results = watch_.take_results();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].crossing, (Crossing{"tp", {0, 1}, std::nullopt, 0}));
  EXPECT_EQ(results[0].microbatch, 0);
  EXPECT_EQ(results[0].phase, Phase::forward);
  EXPECT_EQ(results[0].absmax, 4);
  EXPECT_EQ(results[0].sum_of_squares, 25);
  EXPECT_EQ(results[0].zeros, 1);
  EXPECT_EQ(results[0].fingerprint, scan_one(at::tensor({3.0F, -4.0F, 0.0F}))->fingerprint);
  finish(tp_, kAllReduce, at::ones({4}));
  EXPECT_TRUE(watch_.take_results().empty());
}

TEST_F(BoundaryWatchTest, KnowsWhereEachMemberGotSomethingElseUnseen) {
  const Tensors payload = {at::zeros({16}, at::kByte)};
  watch_.finish(watch_.begin_collective(tp_, "c10d::alltoall_base_", payload), payload);
  (void)watch_.begin_send(pp_, 2, payload);
  const auto coverage = watch_.collect(7).coverage;
  ASSERT_EQ(coverage.size(), 2U);
  for (const auto& each : coverage) {
    EXPECT_EQ(each.not_scanned, RankList({0}));
    EXPECT_TRUE(each.is_unseen_by_member);
  }
}

TEST_F(BoundaryWatchTest, SaysInEachStepThatAGroupHasUnwatchedExchanges) {
  watch_.has_unwatched(tp_);
  for (int step = 0; step < 2; ++step) {
    watch_.begin_step();
    const auto coverage = watch_.collect(7).coverage;
    ASSERT_EQ(coverage.size(), 1U);
    EXPECT_EQ(coverage[0].group, "tp");
    EXPECT_TRUE(coverage[0].has_unwatched);
  }
}

TEST_F(BoundaryWatchTest, ScansAgainMemoryThatWasSeenBad) {
  const auto tensor = bad();
  const auto crossing = watch_.begin_collective(tp_, kAllReduce, Tensors{tensor});
  for (std::int64_t i = 0; i < tensor.numel(); ++i) static_cast<float*>(tensor.data_ptr())[i] = 1;
  watch_.finish(crossing, Tensors{tensor});

  EXPECT_EQ(only_sighting().role, "sent");
}

TEST_F(BoundaryWatchTest, CountsCollectivesByGroupAndMessagesByPeerAndDirection) {
  all_reduce(at::ones({1}));
  send(2, at::ones({1}));
  all_reduce(at::ones({1}));
  send(4, at::ones({1}));
  send(2, at::ones({1}));
  receive(2, at::ones({1}));

  EXPECT_EQ(coverage(), (Lines{"tp - sent 2", "pp 2 sent 2", "pp 4 sent 1", "pp 2 received 1"}));

  send(2, bad());
  receive(4, bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].crossing, (Crossing{"pp", {0, 2, 4}, 2, 2}));
  EXPECT_EQ(seen[0].role, "sent");
  EXPECT_EQ(seen[1].crossing, (Crossing{"pp", {0, 2, 4}, 4, 0}));
  EXPECT_EQ(seen[1].role, "received");
}

TEST_F(BoundaryWatchTest, CoversNothingBehindACrossingWhoseResultWasNotSeen) {
  const auto first = watch_.begin_collective(tp_, kAllReduce, {});
  const auto second = watch_.begin_collective(tp_, kAllReduce, {});
  watch_.finish(second, {});
  EXPECT_EQ(coverage(), Lines{"tp - sent 0"});
  watch_.finish(first, {});
  EXPECT_EQ(coverage(), Lines{"tp - sent 2"});
}

TEST_F(BoundaryWatchTest, IgnoresTheEndOfACrossingOfAnEarlierStep) {
  const auto late = watch_.begin_collective(tp_, kAllReduce, {});
  watch_.begin_step();
  const auto current = watch_.begin_collective(tp_, kAllReduce, {});
  watch_.finish(late, Tensors{bad()});
  EXPECT_TRUE(sightings().empty());
  EXPECT_EQ(coverage(), Lines{"tp - sent 0"});
  watch_.finish(current, {});
  EXPECT_EQ(coverage(), Lines{"tp - sent 1"});
}

TEST_F(BoundaryWatchTest, RefusesAGroupThatWasNotAdded) {
  EXPECT_THROW((void)watch_.begin_collective(17, kAllReduce, {}), UsageError);
}

TEST_F(BoundaryWatchTest, PlacesACollectiveInTheModuleThatRunsAndInItsMicrobatch) {
  forward({3, 1}, [&] {
    within("decoder", [&] {
      within("decoder.layers.0", [] {});
      all_reduce(bad());
    });
  });

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  for (const auto& sighting : seen) {
    EXPECT_EQ(sighting.phase, Phase::forward);
    EXPECT_EQ(sighting.module, "decoder");
    EXPECT_EQ(sighting.microbatch, 3);
    EXPECT_EQ(sighting.chunk, 1);
  }
}

TEST_F(BoundaryWatchTest, TellsDataFromTheLossByWhetherTheModelHasRun) {
  forward({0, 0}, [&] {
    all_reduce(bad());
    within("GPTModel", [] {});
    all_reduce(bad());
  });

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 4U);
  EXPECT_EQ(seen[0].phase, Phase::forward);
  EXPECT_EQ(seen[2].phase, Phase::loss);
  EXPECT_EQ(seen[2].module, "");
}

TEST_F(BoundaryWatchTest, PlacesWhatFollowsTheLastMicrobatchAfterTheReduction) {
  forward({0, 0}, [] {});
  all_reduce(bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].phase, Phase::grad_reduced);
  EXPECT_EQ(seen[0].microbatch, std::nullopt);
}

// ---- Backward -----------------------------------------------------------------------------------

std::function<void()> in_backward;

/// The identity; its backward is where tensor-parallel layers sum their gradients.
struct ActsInBackward : torch::autograd::Function<ActsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    in_backward();
    return gradients;
  }
};

TEST_F(BoundaryWatchTest, PlacesABackwardCollectiveInTheModuleWhoseForwardMadeTheNode) {
  auto x = at::ones({2, 3});
  x.requires_grad_(true);
  at::Tensor y;
  forward({2, 0}, [&] {
    within("decoder", [&] {
      within("decoder.a", [&] { y = x * 2; });
      within("decoder.b", [&] { y = ActsInBackward::apply(y * 3) * 4; });
      y = y * 5;
      within("decoder.c", [&] { y = y.sum(); });
    });
  });
  in_backward = [&] { all_reduce(bad()); };
  y.backward();

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].phase, Phase::backward);
  EXPECT_EQ(seen[0].module, "decoder.b");
  EXPECT_EQ(seen[0].microbatch, 2);  // the forward's, if the schedule gives none
}

TEST_F(BoundaryWatchTest, PlacesANodeThatIsMadeBehindAModuleInItsCaller) {
  auto x = at::ones({2, 3});
  x.requires_grad_(true);
  at::Tensor y;
  within("decoder", [&] {
    within("decoder.a", [&] { y = x * 2; });
    y = ActsInBackward::apply(y);
    within("decoder.b", [&] { y = y.sum(); });
  });
  in_backward = [&] { all_reduce(bad()); };
  y.backward();
  EXPECT_EQ(sightings().front().module, "decoder");
}

TEST_F(BoundaryWatchTest, ACollectiveOfARecomputedModuleIsForwardAndItsGradientsAreItsOwn) {
  auto x = at::ones({2, 3});
  x.requires_grad_(true);
  at::Tensor y;
  within("decoder", [&] { y = ActsInBackward::apply(x).sum(); });
  in_backward = [&] {
    const at::AutoGradMode grad(true);
    at::Tensor again;
    within("decoder.layers.4", [&] {
      all_reduce(bad());
      again = ActsInBackward::apply(x * 2).sum();
    });
    in_backward = [&] { all_reduce(bad()); };
    again.backward();
  };
  y.backward();

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 4U);
  EXPECT_EQ(seen[0].phase, Phase::forward);
  EXPECT_EQ(seen[0].module, "decoder.layers.4");
  EXPECT_EQ(seen[2].phase, Phase::backward);
  EXPECT_EQ(seen[2].module, "decoder.layers.4");
}

TEST_F(BoundaryWatchTest, ACallThatRaisedIsLeftWithItsCaller) {
  const auto outer = watch_.enter(intern_module_path("decoder"));
  (void)watch_.enter(intern_module_path("decoder.raises"));
  watch_.leave(outer);
  auto x = at::ones({2, 3});
  x.requires_grad_(true);
  const auto y = ActsInBackward::apply(x).sum();
  in_backward = [&] { all_reduce(bad()); };
  y.backward();
  EXPECT_EQ(sightings().front().module, "");
}

// ---- Between pipeline stages --------------------------------------------------------------------

TEST_F(BoundaryWatchTest, AMessageBelongsToTheScheduleStepThatComputedIt) {
  const auto activation = bad();
  const auto gradient = bad();
  watch_.begin_forward({5, 1}, {});
  watch_.end_forward({5, 1}, Tensors{activation});
  watch_.begin_backward({2, 0}, {});
  watch_.end_backward({2, 0}, Tensors{gradient});
  send(2, gradient);
  send(4, activation);

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].phase, Phase::backward);
  EXPECT_EQ(seen[0].microbatch, 2);
  EXPECT_EQ(seen[0].chunk, 0);
  EXPECT_EQ(seen[1].phase, Phase::forward);
  EXPECT_EQ(seen[1].microbatch, 5);
  EXPECT_EQ(seen[1].chunk, 1);
}

TEST_F(BoundaryWatchTest, AReceivedTensorBelongsToTheScheduleStepThatConsumesIt) {
  const auto activation = bad();
  const auto gradient = bad();
  const auto never_used = bad();
  receive(2, gradient);
  receive(2, activation);
  receive(2, never_used);
  watch_.begin_forward({5, 1}, Tensors{activation});
  watch_.begin_backward({2, 0}, Tensors{gradient});

  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].phase, Phase::backward);
  EXPECT_EQ(seen[0].microbatch, 2);
  EXPECT_EQ(seen[1].phase, Phase::forward);
  EXPECT_EQ(seen[1].microbatch, 5);
  EXPECT_EQ(seen[2].microbatch, std::nullopt);
}

TEST_F(BoundaryWatchTest, IntegersCountAndAreNeverBad) {
  send(2, at::ones({3}, at::kLong));
  receive(2, at::ones({3}, at::kLong));
  EXPECT_TRUE(sightings().empty());
  EXPECT_EQ(coverage(), (Lines{"pp 2 sent 1", "pp 2 received 1"}));
}

// ---- positions: nanlocator/watch/position.hpp ----

TEST_F(BoundaryWatchTest, WhatWentIntoACrossingIsBeforeItAndWhatCameOutOfItIsAfterIt) {
  send(2, bad());     // crossing 0
  all_reduce(bad());  // 1: sent and received
  receive(4, bad());  // 2
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 4U);
  EXPECT_EQ(seen[0].position, 0);
  EXPECT_EQ(seen[1].position, 1);
  EXPECT_EQ(seen[2].position, 2);
  EXPECT_EQ(seen[3].position, 3);
  EXPECT_EQ(current_position(), 3);
}

TEST_F(BoundaryWatchTest, WhatIsReceivedHasThePositionOfTheWaitForIt) {
  const auto receive = watch_.begin_receive(pp_, 4);
  watch_.was_issued(receive);
  const auto sum = start_all_reduce(at::ones({2, 3}));
  send(2, bad());
  watch_.finish(receive, Tensors{bad()});
  send(2, at::ones({2, 3}));
  watch_.finish(sum, Tensors{bad()});
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].position, 2);  // sent
  EXPECT_EQ(seen[1].position, 3);  // received
  EXPECT_EQ(seen[2].position, 4);  // summed
}

TEST_F(BoundaryWatchTest, ACrossingIsCountedWhenItsCallReturns) {
  const auto crossing = watch_.begin_collective(tp_, kAllReduce, Tensors{at::ones({2})});
  EXPECT_EQ(current_position(), 0);
  watch_.was_issued(crossing);
  EXPECT_EQ(current_position(), 1);
}

TEST_F(BoundaryWatchTest, WhatAFrameworkTransfersByItselfDoesNotCount) {
  all_reduce(at::ones({4}));
  watch_.enter_transfer(intern_module_path("layers.3"), /*reduces_gradients=*/false);
  all_reduce(bad());
  watch_.skip_collective(tp_);
  watch_.leave_transfer();
  send(2, bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].position, 1);
  EXPECT_EQ(seen[1].position, 1);
  EXPECT_EQ(seen[2].position, 1);
}

TEST_F(BoundaryWatchTest, AnotherThreadOfTheProgramHasNoPositionAndCountsNothing) {
  all_reduce(at::ones({4}));
  std::thread([&] {
    all_reduce(bad());
    EXPECT_EQ(current_position(), std::nullopt);
  }).join();
  send(2, bad());
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].position, std::nullopt);
  EXPECT_EQ(seen[1].position, std::nullopt);
  EXPECT_EQ(seen[2].position, 1);
}

TEST_F(BoundaryWatchTest, AutogradsThreadWorksForTheStep) {
  all_reduce(at::ones({4}));
  const auto input = at::ones({2}).requires_grad_();
  const auto output = input * 2;
  std::optional<std::int64_t> in_backward;
  output.register_hook([&](const at::Tensor& gradient) {
    send(2, at::ones({2}));
    in_backward = current_position();
    return gradient;
  });
  std::thread([&] { output.sum().backward(); }).join();
  EXPECT_EQ(in_backward, 2);
}

TEST_F(BoundaryWatchTest, EachPassBeginsAtPositionZero) {
  all_reduce(at::ones({4}));
  watch_.begin_pass();
  send(2, bad());
  EXPECT_EQ(only_sighting().position, 0);
  watch_.begin_step();
  all_reduce(at::ones({4}));
  send(2, bad());
  EXPECT_EQ(only_sighting().position, 1);
}

TEST_F(BoundaryWatchTest, ARerunCountsAgainAndKeepsWhatTheFirstPassSaw) {
  watch_.begin_pass();
  send(2, at::ones({2}));
  all_reduce(bad());
  receive(4, at::ones({2}));
  watch_.begin_rerun();
  EXPECT_EQ(current_position(), 0);
  watch_.skip_message(pp_, 2, /*is_received=*/false);
  EXPECT_EQ(current_position(), 1);
  watch_.skip_collective(tp_);
  EXPECT_FALSE(watch_.has_same_crossings());
  watch_.skip_message(pp_, 4, /*is_received=*/true);
  EXPECT_TRUE(watch_.has_same_crossings());
  EXPECT_EQ(current_position(), 3);
  const auto seen = sightings();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].position, 1);
  EXPECT_EQ(seen[1].position, 2);
}

TEST_F(BoundaryWatchTest, KnowsARerunThatIssuedOtherCrossings) {
  const auto send_to = [&](int peer) { watch_.skip_message(pp_, peer, /*is_received=*/false); };
  const auto receive_from = [&](int peer) { watch_.skip_message(pp_, peer, true); };
  watch_.begin_pass();
  send(2, at::ones({2}));
  all_reduce(at::ones({2}));
  const std::vector<std::function<void()>> others = {
      [&] { send_to(2); },
      [&] { send_to(2), watch_.skip_collective(pp_); },
      [&] { send_to(4), watch_.skip_collective(tp_); },
      [&] { receive_from(2), watch_.skip_collective(tp_); },
      [&] { watch_.skip_collective(tp_), send_to(2); },
      [&] { send_to(2), watch_.skip_collective(tp_), watch_.skip_collective(tp_); },
  };
  for (const auto& other : others) {
    watch_.begin_rerun();
    other();
    EXPECT_FALSE(watch_.has_same_crossings());
  }
  watch_.begin_rerun();  // the last re-run is compared with the first pass, not with the one before
  send_to(2), watch_.skip_collective(tp_);
  EXPECT_TRUE(watch_.has_same_crossings());
}

TEST_F(BoundaryWatchTest, WhereNoPassIsCountedThereIsNoPosition) {
  forget_position();
  all_reduce(bad());
  EXPECT_EQ(sightings()[0].position, std::nullopt);
  watch_.begin_step();
  {
    BoundaryWatch other;
    other.begin_pass();  // of another optimizer of this process
    all_reduce(at::ones({4}));
    EXPECT_EQ(current_position(), 0);
  }
  EXPECT_EQ(current_position(), std::nullopt);
}

}  // namespace
}  // namespace nanlocator
