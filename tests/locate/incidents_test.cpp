// 300 incidents on 1 to 4,096 ranks, from planted faults to the verdict: every cause that a level
// can name, one to three at once, with all ledgers and with some lost or cut off.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "locate/crossing_simulator/pass.hpp"
#include "locate/text_of_verdict.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator {
namespace {

using pipeline::Fault;
using pipeline::Pass;
using pipeline::Plant;
using pipeline::TracedBirth;
using simulator::Layout;

enum class Level {
  grads,
  boundaries,
  repeat
};  // repeat: level boundaries, with the step re-run and traced

struct PlantedIncident {
  Layout layout;
  std::vector<Fault> faults;
  Level level = Level::boundaries;
  unsigned seed = 0;

  [[nodiscard]] Pass pass() const { return Pass(layout, faults, seed); }
  [[nodiscard]] std::vector<Ledger> ledgers() const {
    if (level == Level::repeat) return ledgers_with_repeat(layout, faults, seed);
    std::vector<Ledger> ledgers = pass().ledgers();
    if (level == Level::boundaries) return ledgers;
    for (Ledger& ledger : ledgers) {
      ledger.level = "grads";
      ledger.crossings.clear();
      std::erase_if(ledger.sightings,
                    [](const Sighting& each) { return each.crossing || each.role == "loss"; });
    }
    return ledgers;
  }
};

// ---- the incidents ----

class Draw {
 public:
  explicit Draw(unsigned seed) : seed_(seed), random_(seed) {}

  PlantedIncident incident() {
    for (;;) {
      PlantedIncident incident{.layout = layout(), .faults = {}, .level = level(), .seed = seed_};
      const int count = 1 + choose(3);
      for (int attempts = 0; std::ssize(incident.faults) < count && attempts < 20; ++attempts) {
        add_fault(incident);
      }
      if (!incident.faults.empty()) return incident;
    }
  }

 private:
  int choose(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  Level level() {
    constexpr Level kLevels[] = {Level::boundaries, Level::boundaries, Level::repeat, Level::grads};
    return kLevels[choose(4)];
  }

  Layout layout() {
    Layout layout = simulator::random_layout(random_);
    layout.cp = 1;
    layout.is_order_observed = true;
    if (seed_ % 10 == 0) {  // a large job: 128 to 512 ranks, for every third one 1,024 to 4,096
      const int world = (seed_ % 30 == 0 ? 1024 : 128) << choose(3);
      layout.tp = 1 << choose(4);
      layout.pp = 1 << choose(5);
      layout.dp = std::max(1, world / (layout.tp * layout.pp));
      layout.chunks = layout.pp > 1 ? 1 + choose(2) : 1;
      layout.layers_per_stage = 1 + choose(2);
      layout.has_sequence_parallel &= layout.tp > 1;
    }
    if (layout.has_experts) layout.ep = std::min(layout.dp, 1 << choose(4));
    if (!layout.has_experts || layout.dp % layout.ep != 0) layout.ep = 1;
    return layout;
  }

  void add_fault(PlantedIncident& incident) {
    const Layout& layout = incident.layout;
    Fault fault{.plant = static_cast<Plant>(choose(15)),
                .tp = choose(layout.tp),
                .dp = choose(layout.dp),
                .stage = choose(layout.stages()),
                .layer = choose(layout.layers_per_stage),
                .is_mlp = choose(2) == 0,
                .microbatch = choose(layout.microbatches + 1) - 1,
                .is_repeated = choose(2) == 0,
                .token = choose(64),
                .is_overflow = choose(2) == 0,
                .is_on_every_replica = false,
                .is_climb = choose(2) == 0,
                .birth = {}};
    if (fault.plant == Plant::empty_loss) fault.stage = layout.stages() - 1;
    if (fault.plant == Plant::weight) {
      fault.microbatch = pipeline::kEveryMicrobatch;
      fault.is_repeated = true;
      fault.is_on_every_replica = layout.world() <= 64 && choose(2) == 0;
    }
    fault.birth = birth(fault);
    if (!is_possible(incident, fault) || !can_be_told(incident, fault)) return;
    incident.faults.push_back(fault);
  }

  TracedBirth birth(const Fault& fault) {
    constexpr TracedBirth kForward[] = {{BirthKind::nan, ReplayConclusion::deterministic_undefined},
                                        {BirthKind::inf, ReplayConclusion::deterministic_overflow},
                                        {BirthKind::nan, ReplayConclusion::deterministic_kernel},
                                        {BirthKind::nan, ReplayConclusion::varies},
                                        {BirthKind::buffer, ReplayConclusion::not_replayed},
                                        {BirthKind::data, ReplayConclusion::not_replayed},
                                        {BirthKind::opaque, ReplayConclusion::not_replayed}};
    constexpr TracedBirth kBackward[] = {
        {BirthKind::nan, ReplayConclusion::deterministic_undefined},
        {BirthKind::user_hook, ReplayConclusion::not_replayed},
        {BirthKind::memory, ReplayConclusion::not_replayed},
        {BirthKind::nan, ReplayConclusion::deterministic_undefined, /*is_of_recomputation=*/true},
        {BirthKind::inf, ReplayConclusion::deterministic_overflow, /*is_of_recomputation=*/false,
         /*is_of_auxiliary_loss=*/true}};
    if (fault.plant == Plant::operator_forward) return kForward[choose(std::size(kForward))];
    if (fault.plant == Plant::operator_backward) return kBackward[choose(std::size(kBackward))];
    return {};
  }

  /// True if the fault can happen in this layout and is visible at this level.
  bool is_possible(const PlantedIncident& incident, const Fault& fault) const {
    const Layout& layout = incident.layout;
    const bool is_after_backward = fault.plant > Plant::weight;
    switch (fault.plant) {
      case Plant::weight:
        if (fault.is_mlp && layout.has_experts) return false;
        break;
      case Plant::reduced_everywhere:
        if (layout.dp < 2 || layout.has_distributed_optimizer) return false;
        break;
      case Plant::norm_gradient:
      case Plant::update:
      case Plant::norm_value:
        if (incident.level == Level::repeat) return false;  // after the step: no re-run
        break;
      default:
        break;
    }
    return is_after_backward || Pass(layout, {fault}, incident.seed).has_struck(fault);
  }

  /// True if the fault leaves evidence of its own beside the others'.
  bool can_be_told(const PlantedIncident& incident, const Fault& fault) const {
    const Layout& layout = incident.layout;
    const auto is_alone = [](const Fault& each) {
      return each.plant == Plant::update || each.plant == Plant::norm_value ||
             each.is_on_every_replica;
    };
    if (incident.faults.empty()) return true;
    if (is_alone(fault)) return false;  // it, or its effect on the step, hides the others
    std::vector<Fault> all = incident.faults;
    all.push_back(fault);
    for (const Fault& each : incident.faults) {
      if (is_alone(each) || !are_separate(incident, each, fault)) return false;
    }
    // A sum with a bad input from any replica is bad, whatever the other inputs are.
    for (const Fault& each : all) {
      if (each.is_in_pass() || each.plant == Plant::gradient) continue;
      std::vector<Fault> others;
      for (const Fault& other : all) {
        if (other.is_in_pass() || other.plant == Plant::gradient) others.push_back(other);
      }
      const Pass pass(layout, others, incident.seed);
      for (int dp = 0; dp < layout.dp; ++dp) {
        if (pass.bad_on(layout.rank(each.tp, each.stage, dp)).contains(gradient_of(layout, each))) {
          return false;
        }
      }
    }
    return true;
  }

  static bool are_separate(const PlantedIncident& incident, const Fault& a, const Fault& b) {
    const Layout& layout = incident.layout;
    const bool is_same_part =
        a.tp == b.tp && a.stage % layout.pp == b.stage % layout.pp && a.stage == b.stage;
    const bool is_a_local = a.is_in_pass() || a.plant == Plant::gradient;
    const bool is_b_local = b.is_in_pass() || b.plant == Plant::gradient;
    if (!is_a_local && !is_b_local) return !is_same_part;
    if (!is_a_local || !is_b_local) return true;
    if (a.dp / layout.ep != b.dp / layout.ep) {
      // The same operator in two replicas is reported as one origin with a common cause.
      return incident.level != Level::repeat || a.plant != b.plant || a.stage != b.stage;
    }
    // In one replica: two microbatches, each seen at its own crossing.
    if (incident.level != Level::boundaries || a.plant >= Plant::gradient ||
        b.plant >= Plant::gradient) {
      return false;
    }
    const auto has_crossed = [&](const Fault& fault) {
      const Pass pass(layout, {fault}, incident.seed);
      return pass.has_crossed(rank_of(layout, fault));
    };
    // The same fault in two microbatches is reported as one.
    const bool is_of_stage = a.plant == Plant::empty_loss || a.plant == Plant::sum_everywhere;
    const bool is_same =
        a.plant == b.plant && (is_same_part || (is_of_stage && a.stage == b.stage));
    return a.microbatch >= 0 && b.microbatch >= 0 && a.microbatch != b.microbatch && !is_same &&
           has_crossed(a) && has_crossed(b);
  }

  unsigned seed_;
  std::mt19937 random_;
};

// ---- the expected verdict ----

struct Truth {
  std::vector<int> ranks;   // must be named by the origin
  bool is_exact = true;     // no other rank may be named; false: other ranks of `within` may be
  std::vector<int> within;  // ascending
  std::set<Phase> phases;
  std::set<Cause> causes;
  std::optional<Direction> direction;
  std::optional<int> microbatch;
  std::string parameter;
};

Cause cause_of(const TracedBirth& birth) {
  if (birth.is_of_recomputation) return Cause::recompute_mismatch;
  switch (birth.kind) {
    case BirthKind::buffer:
      return Cause::bad_buffer;
    case BirthKind::data:
      return Cause::bad_input;
    case BirthKind::user_hook:
      return Cause::user_hook;
    case BirthKind::memory:
      return Cause::memory_corruption;
    case BirthKind::opaque:
      return Cause::unknown;
    default:
      break;
  }
  switch (birth.replay) {
    case ReplayConclusion::deterministic_overflow:
      return Cause::operator_overflow;
    case ReplayConclusion::deterministic_kernel:
      return Cause::operator_bug;
    case ReplayConclusion::varies:
      return Cause::not_reproduced;
    default:
      return Cause::operator_undefined;
  }
}

class TruthOf {
 public:
  TruthOf(const PlantedIncident& incident, const Pass& pass, const Fault& fault)
      : incident_(incident), layout_(incident.layout), pass_(pass), fault_(fault) {}

  Truth truth() {
    truth_.ranks = {rank_of(layout_, fault_)};
    truth_.within = layout_.replica_of(fault_.dp);
    truth_.causes = {Cause::unknown};
    if (fault_.plant > Plant::weight) {
      tell_after_backward();
    } else if (fault_.plant == Plant::weight) {
      tell_weight();
    } else if (fault_.plant == Plant::gradient) {
      tell_gradient();
    } else if (incident_.level == Level::grads) {
      truth_.is_exact = false;  // gradients identify the replica
      truth_.phases = {Phase::grad_local};
    } else {
      tell_crossing();
    }
    std::ranges::sort(truth_.ranks);
    return truth_;
  }

 private:
  bool is_gone() const { return incident_.level == Level::repeat && !fault_.is_repeated; }

  std::vector<int> ranks_over_dp() const {
    std::vector<int> ranks;
    for (int dp = 0; dp < layout_.dp; ++dp) {
      ranks.push_back(layout_.rank(fault_.tp, fault_.stage, dp));
    }
    return ranks;
  }

  void tell_crossing() {
    const bool is_of_stage =
        fault_.plant == Plant::empty_loss || fault_.plant == Plant::sum_everywhere;
    if (is_of_stage) {
      truth_.ranks.clear();
      for (int tp = 0; tp < layout_.tp; ++tp) {
        truth_.ranks.push_back(layout_.rank(tp, fault_.stage, fault_.dp));
      }
    }
    const bool is_backward = fault_.plant == Plant::operator_backward ||
                             fault_.plant == Plant::transfer_backward ||
                             fault_.plant == Plant::sum_backward;
    truth_.phases = is_backward ? std::set{Phase::backward} : std::set{Phase::forward, Phase::loss};
    truth_.direction = is_backward ? Direction::backward : Direction::forward;
    truth_.microbatch = std::max(0, fault_.microbatch);
    const bool is_traced =
        fault_.plant == Plant::operator_forward || fault_.plant == Plant::operator_backward;
    switch (fault_.plant) {
      case Plant::transfer_forward:
      case Plant::transfer_backward:
        truth_.causes = {Cause::pipeline_transfer};
        return;
      case Plant::sum_forward:
      case Plant::sum_backward:
        truth_.causes = {Cause::collective_result};
        return;
      case Plant::sum_everywhere:
        // A sum that is finite in the re-run did not overflow.
        truth_.causes = {!fault_.is_overflow ? Cause::collective_result
                         : is_gone()         ? Cause::not_reproduced
                                             : Cause::collective_sum};
        return;
      case Plant::empty_loss:
        truth_.causes = {is_gone() ? Cause::not_reproduced : Cause::empty_loss_mask};
        return;
      default:
        break;
    }
    if (is_gone()) truth_.causes = {Cause::not_reproduced};
    const bool is_born = is_traced && incident_.level == Level::repeat && fault_.is_repeated;
    if (is_born) {
      truth_.causes = {cause_of(fault_.birth)};
      if (fault_.birth.is_of_recomputation || fault_.birth.is_of_auxiliary_loss) {
        truth_.phases = {Phase::forward};
        truth_.direction = Direction::forward;
      }
    } else if (!pass_.has_crossed(truth_.ranks.front())) {
      truth_.phases = {Phase::grad_local};
      truth_.direction.reset();
      truth_.microbatch.reset();
    }
  }

  void tell_gradient() {
    truth_.phases = {Phase::grad_local};
    truth_.parameter = gradient_of(layout_, fault_);
    if (incident_.level != Level::repeat) return;
    truth_.causes = {is_gone() ? Cause::not_reproduced : Cause::memory_corruption};
    if (!is_gone()) truth_.phases = {Phase::backward};
  }

  void tell_weight() {
    truth_.phases = {Phase::params_before};
    if (incident_.level == Level::repeat) truth_.phases.insert(Phase::forward);
    truth_.causes = {Cause::bad_weight};
    truth_.parameter = weight_of(layout_, fault_);
    // In shards, the copy of the rank that updates it is the one that the others gathered.
    const bool has_owner = layout_.has_distributed_optimizer;
    if (fault_.is_on_every_replica && !has_owner) truth_.ranks = ranks_over_dp();
  }

  void tell_after_backward() {
    truth_.parameter = gradient_of(layout_, fault_);
    truth_.direction = Direction::none;
    switch (fault_.plant) {
      case Plant::reduced:
      case Plant::reduced_everywhere:
        truth_.phases = {Phase::grad_reduced};
        if (layout_.dp == 1) {
          truth_.causes = {is_gone() ? Cause::not_reproduced : Cause::unknown};
          if (incident_.level == Level::repeat) truth_.causes.insert(Cause::unknown);
          return;
        }
        truth_.causes = {Cause::collective_result};
        if (fault_.plant == Plant::reduced && !layout_.has_distributed_optimizer) return;
        truth_.ranks = ranks_over_dp();
        if (fault_.plant == Plant::reduced_everywhere && fault_.is_overflow) {
          truth_.causes = {Cause::collective_sum};
          if (is_gone()) truth_.causes.insert(Cause::not_reproduced);
        }
        return;
      case Plant::norm_gradient:
        truth_.phases = {Phase::grad_norm};
        return;
      case Plant::update:
        truth_.phases = {Phase::params_after};
        truth_.causes = {Cause::optimizer_update};
        return;
      default:
        truth_.phases = {Phase::grad_norm};
        truth_.causes = {fault_.is_climb ? Cause::divergence : Cause::unknown};
        return;
    }
  }

  const PlantedIncident& incident_;
  const Layout& layout_;
  const Pass& pass_;
  const Fault& fault_;
  Truth truth_;
};

bool are_of(const Truth& truth, std::initializer_list<Phase> phases) {
  return std::ranges::all_of(
      truth.phases, [&](Phase each) { return std::ranges::find(phases, each) != phases.end(); });
}

bool have_common_cause(const Truth& a, const Truth& b) {
  return std::ranges::any_of(a.causes, [&](Cause each) { return b.causes.contains(each); });
}

/// What a collective of the same ranks spoils is one origin, in several places; so is one weight
/// that is bad in several replicas.
bool is_one_origin(const Truth& a, const Truth& b) {
  if (a.causes == std::set{Cause::bad_weight}) {
    return b.causes == a.causes && a.parameter == b.parameter;
  }
  if (a.ranks != b.ranks || !have_common_cause(a, b)) return false;
  const auto are_both = [&](std::initializer_list<Phase> phases) {
    return are_of(a, phases) && are_of(b, phases);
  };
  const bool have_parameter = !a.parameter.empty() && !b.parameter.empty();
  return are_both({Phase::grad_reduced}) || (have_parameter && are_both({Phase::grad_norm})) ||
         (a.causes == b.causes && are_both({Phase::forward, Phase::loss, Phase::backward}) &&
          std::ranges::all_of(a.causes, [](Cause each) {
            return each == Cause::collective_result || each == Cause::collective_sum;
          }));
}

void join(Truth& first, const Truth& other) {
  std::set<int> ranks(first.ranks.begin(), first.ranks.end());
  ranks.insert(other.ranks.begin(), other.ranks.end());
  first.ranks.assign(ranks.begin(), ranks.end());
  first.phases.insert(other.phases.begin(), other.phases.end());
  first.causes.insert(other.causes.begin(), other.causes.end());
  if (first.parameter != other.parameter) first.parameter.clear();
  first.direction.reset();
  first.microbatch.reset();
}

std::vector<Truth> truths_of(const PlantedIncident& incident) {
  std::vector<Truth> truths;
  for (const Fault& fault : incident.faults) {
    // Each fault alone, so that crossings of another fault do not count as its own.
    const Pass pass(incident.layout, {fault}, incident.seed);
    Truth truth = TruthOf(incident, pass, fault).truth();
    const auto same =
        std::ranges::find_if(truths, [&](const Truth& each) { return is_one_origin(each, truth); });
    if (same == truths.end()) {
      truths.push_back(std::move(truth));
    } else {
      join(*same, truth);
    }
  }
  return truths;
}

// ---- texts ----

std::string text_of(const PlantedIncident& incident) {
  constexpr const char* kLevels[] = {"grads", "boundaries", "repeat"};
  std::string text = "seed " + std::to_string(incident.seed) + " " + incident.layout.describe() +
                     kLevels[static_cast<int>(incident.level)];
  for (const Fault& fault : incident.faults) {
    text += "\n  plant " + std::to_string(static_cast<int>(fault.plant)) + " tp" +
            std::to_string(fault.tp) + " dp" + std::to_string(fault.dp) + " stage " +
            std::to_string(fault.stage) + " layer " + std::to_string(fault.layer) + " mlp " +
            std::to_string(fault.is_mlp) + " microbatch " + std::to_string(fault.microbatch) +
            " repeated " + std::to_string(fault.is_repeated) + " overflow " +
            std::to_string(fault.is_overflow) + " birth " + std::string(name_of(fault.birth.kind)) +
            " everywhere " + std::to_string(fault.is_on_every_replica);
  }
  return text;
}

bool is_told_by(const Truth& truth, const Origin& origin) {
  const bool is_of_ranks = truth.is_exact ? origin.candidates == truth.ranks
                                          : std::ranges::includes(origin.candidates, truth.ranks);
  return is_of_ranks && truth.phases.contains(origin.phase) &&
         (!truth.microbatch || origin.microbatch == truth.microbatch) &&
         (truth.parameter.empty() || origin.parameter == truth.parameter);
}

void expect_told(const Truth& truth, const Verdict& verdict) {
  const auto told = [&](const Origin& origin) { return is_told_by(truth, origin); };
  const auto count = std::ranges::count_if(verdict.origins, told);
  EXPECT_EQ(count, 1) << "of ranks " << describe_ranks(truth.ranks) << " " << truth.parameter;
  if (count != 1) return;
  const Origin& origin = *std::ranges::find_if(verdict.origins, told);
  if (!truth.is_exact) {
    EXPECT_TRUE(std::ranges::includes(truth.within, origin.candidates));
  }
  // Two that were bad at once at the same place share code and no device.
  const auto is_same_place = [&](const Origin& other) {
    return &other != &origin && other.candidates != origin.candidates &&
           std::tie(other.phase, other.module, other.op, other.parameter) ==
               std::tie(origin.phase, origin.module, origin.op, origin.parameter);
  };
  const bool may_be_open = truth.causes.contains(Cause::not_reproduced) &&
                           std::ranges::any_of(verdict.origins, is_same_place);
  EXPECT_TRUE(truth.causes.contains(origin.cause) ||
              (may_be_open && origin.cause == Cause::unknown))
      << name_of(origin.cause);
  if (truth.direction) {
    EXPECT_EQ(origin.direction, truth.direction);
  }
  EXPECT_EQ(origin.coordinates.has_value(), origin.candidates.size() == 1);
}

// ---- 300 ----

constexpr unsigned kDrawn = 300;

/// NANLOCATOR_INCIDENTS=10000 runs more.
unsigned incident_count() {
  const char* const count = std::getenv("NANLOCATOR_INCIDENTS");
  return count != nullptr ? static_cast<unsigned>(std::atoi(count)) : kDrawn;
}
constexpr unsigned kShares = 6;  // lets a runner with several cores finish sooner

class Incidents : public ::testing::TestWithParam<unsigned> {
 protected:
  template <typename Check>
  static void for_each_incident(Check check) {
    for (unsigned seed = GetParam(); seed < incident_count(); seed += kShares) {
      const PlantedIncident incident = Draw(seed).incident();
      SCOPED_TRACE(text_of(incident));
      check(incident);
    }
  }
};

TEST_P(Incidents, WithEveryLedgerRanksPhaseAndCauseAreRightInAnyOrderOfReading) {
  for_each_incident([](const PlantedIncident& incident) {
    std::vector<Ledger> ledgers = incident.ledgers();
    const int world = incident.layout.world();
    const Verdict verdict = locate(ledgers, world);
    SCOPED_TRACE(text_of(verdict));
    const std::vector<Truth> truths = truths_of(incident);
    EXPECT_EQ(verdict.origins.size(), truths.size());
    EXPECT_EQ(verdict.status, VerdictStatus::located);
    for (const Truth& truth : truths) expect_told(truth, verdict);

    std::mt19937 random(incident.seed);
    std::ranges::shuffle(ledgers, random);
    EXPECT_EQ(to_json(locate(ledgers, world)), to_json(verdict));
  });
}

/// Drops some ledgers and truncates others in mid-line, those of guilty ranks more often.
std::vector<Ledger> with_losses(const PlantedIncident& incident, const std::vector<Truth>& truths,
                                std::mt19937& random) {
  std::vector<Ledger> ledgers = incident.ledgers();
  std::set<int> hit;
  for (int count = 1 + static_cast<int>(random() % 3); count > 0; --count) {
    const auto& guilty = truths[random() % truths.size()].ranks;
    hit.insert(random() % 2 == 0 ? guilty[random() % guilty.size()]
                                 : static_cast<int>(random() % ledgers.size()));
  }
  std::vector<Ledger> left;
  for (Ledger& ledger : ledgers) {
    if (!hit.contains(ledger.coordinates.rank)) {
      left.push_back(std::move(ledger));
      continue;
    }
    if (random() % 2 == 0) continue;
    std::string text = to_jsonl(ledger);
    const std::size_t header = text.find('\n') + 1;
    text.resize(header + random() % (text.size() - header));
    left.push_back(std::move(ledgers_from_jsonl(text, "ledger").front()));
  }
  return left;
}

TEST_P(Incidents, WithLostAndCutOffLedgersNoWrongRankIsNamedWithHighConfidence) {
  for_each_incident([](const PlantedIncident& incident) {
    std::mt19937 random(incident.seed + 1);
    const std::vector<Truth> truths = truths_of(incident);
    std::vector<Ledger> ledgers = with_losses(incident, truths, random);
    const int world = incident.layout.world();
    const Verdict verdict = locate(ledgers, world);
    SCOPED_TRACE("with losses" + text_of(verdict));
    EXPECT_EQ(verdict.status, VerdictStatus::partial);
    for (const Origin& origin : verdict.origins) {
      if (origin.place_confidence != Confidence::high) continue;
      const bool is_right = std::ranges::any_of(truths, [&](const Truth& truth) {
        return truth.is_exact ? std::ranges::includes(truth.ranks, origin.candidates)
                              : std::ranges::includes(origin.candidates, truth.ranks);
      });
      EXPECT_TRUE(is_right) << "ranks " << describe_ranks(origin.candidates) << " are not guilty";
    }
    if (truths.size() == 1 && !verdict.origins.empty()) {
      EXPECT_TRUE(std::ranges::any_of(verdict.origins, [&](const Origin& origin) {
        return std::ranges::any_of(truths.front().ranks, [&](int rank) {
          return std::ranges::binary_search(origin.candidates, rank);
        });
      })) << "the guilty rank is no candidate";
    }
    std::ranges::shuffle(ledgers, random);
    EXPECT_EQ(to_json(locate(ledgers, world)), to_json(verdict));
  });
}

// ---- the limits of the evidence, computed by the simulator ----

/// The ledgers of one replica's ranks.
std::vector<Ledger> evidence_of(const PlantedIncident& incident, int dp) {
  const std::vector<Ledger> all = incident.ledgers();
  std::vector<Ledger> evidence;
  for (const int rank : incident.layout.replica_of(dp)) {
    evidence.push_back(all[static_cast<std::size_t>(rank)]);
  }
  return evidence;
}

/// Ranks on which some fault, of any kind, leaves the same ledgers.
std::set<int> inseparable_ranks(const PlantedIncident& incident) {
  const Layout& layout = incident.layout;
  const Fault& planted = incident.faults.front();
  const std::vector<Ledger> evidence = evidence_of(incident, planted.dp);
  std::set<int> ranks;
  PlantedIncident other = incident;
  Fault& fault = other.faults.front();
  const int first = planted.dp / layout.ep * layout.ep;
  for (int plant = 0; plant < static_cast<int>(Plant::gradient); ++plant) {
    for (const int rank : layout.replica_of(planted.dp)) {
      const RankCoordinates at = layout.coordinates_of(rank);
      for (int place = 0; place < 2 * layout.chunks * layout.layers_per_stage; ++place) {
        for (int token = 0; token < layout.tp * layout.ep; ++token) {
          fault = {.plant = static_cast<Plant>(plant),
                   .tp = at.tp.rank,
                   .dp = at.dp.rank,
                   .stage = at.pp.rank + layout.pp * (place / (2 * layout.layers_per_stage)),
                   .layer = place / 2 % layout.layers_per_stage,
                   .is_mlp = place % 2 == 1,
                   .microbatch = planted.microbatch,
                   .token = token,
                   .is_overflow = planted.is_overflow};
          const bool is_at_loss = fault.stage == layout.stages() - 1;
          if (fault.plant == Plant::empty_loss && !is_at_loss) continue;
          if (ranks.contains(rank) || !other.pass().has_struck(fault)) continue;
          if (evidence_of(other, first) == evidence) ranks.insert(rank);
        }
      }
    }
  }
  return ranks;
}

/// At level boundaries there are no other candidates. Gradients alone leave more ranks open than
/// these plants can separate.
TEST_P(Incidents, EveryRankThatTheEvidenceCannotSeparateIsACandidate) {
  int incidents = 0;
  for (unsigned seed = 1000 + GetParam(); incidents < 8; seed += kShares) {
    Draw draw(seed);
    PlantedIncident incident = draw.incident();
    const Layout& layout = incident.layout;
    incident.faults.resize(1);
    if (incident.level == Level::repeat) incident.level = Level::grads;
    if (layout.world() > 12 || layout.layers() > 6 || layout.microbatches > 2) continue;
    if (incident.faults.front().plant >= Plant::gradient) continue;
    ++incidents;
    const Verdict verdict = locate(incident.ledgers(), layout.world());
    SCOPED_TRACE(text_of(incident) + text_of(verdict));
    ASSERT_EQ(verdict.origins.size(), 1u);
    const std::vector<int>& candidates = verdict.origins.front().candidates;
    const std::set<int> inseparable = inseparable_ranks(incident);
    EXPECT_TRUE(inseparable.contains(rank_of(layout, incident.faults.front())));
    EXPECT_TRUE(std::ranges::includes(candidates, inseparable))
        << "the same ledgers can come from ranks "
        << describe_ranks({inseparable.begin(), inseparable.end()});
    if (incident.level == Level::boundaries) {
      EXPECT_THAT(candidates, ::testing::ElementsAreArray(inseparable));
    }
  }
}

// ---- the drawn set ----

TEST(DrawnIncidents, HaveEveryFaultAtEveryLevelAndAllSizes) {
  std::map<Plant, int> plants;
  std::map<Level, int> levels;
  std::map<std::size_t, int> counts;
  int large = 0, largest = 0, smallest = 4096;
  for (unsigned seed = 0; seed < kDrawn; ++seed) {
    const PlantedIncident incident = Draw(seed).incident();
    for (const Fault& fault : incident.faults) ++plants[fault.plant];
    ++levels[incident.level];
    ++counts[incident.faults.size()];
    largest = std::max(largest, incident.layout.world());
    smallest = std::min(smallest, incident.layout.world());
    if (incident.layout.world() >= 1024) ++large;
  }
  EXPECT_EQ(plants.size(), 15u);
  for (const auto& [plant, count] : plants) {
    EXPECT_GE(count, 10) << "plant " << static_cast<int>(plant);
  }
  for (const Level level : {Level::grads, Level::boundaries, Level::repeat}) {
    EXPECT_GE(levels[level], 50);
  }
  for (const std::size_t count : {1, 2, 3}) EXPECT_GE(counts[count], 40);
  EXPECT_GE(large, 10);
  EXPECT_EQ(largest, 4096);
  EXPECT_EQ(smallest, 1);
}

INSTANTIATE_TEST_SUITE_P(Shares, Incidents, ::testing::Range(0u, kShares));

}  // namespace
}  // namespace nanlocator
