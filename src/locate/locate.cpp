#include "nanlocator/locate/locate.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "locate/birth_origins.hpp"
#include "locate/boundary_origins.hpp"
#include "locate/divergence.hpp"
#include "locate/findings.hpp"
#include "locate/gradient_rules.hpp"
#include "locate/machine_check.hpp"
#include "locate/merge_births.hpp"
#include "locate/origin_text.hpp"
#include "locate/reduction_rules.hpp"
#include "locate/refutation.hpp"
#include "locate/step_rules.hpp"

namespace nanlocator {
namespace {

constexpr std::size_t kMostOrigins = 256;
constexpr std::size_t kMostNotes = 32;

constexpr std::array kParameterPhases = {Phase::params_before, Phase::grad_local,
                                         Phase::grad_reduced, Phase::grad_norm,
                                         Phase::params_after};

class Locator {
 public:
  Locator(std::span<const Ledger> ledgers, int world_size) : findings_(ledgers, world_size) {}

  Verdict run() {
    const Incident& incident = findings_.incident();
    if (!incident.ranks().empty()) {
      const Ledger& first = incident.ranks().front().ledger();
      verdict_.run_id = first.run_id;
      verdict_.iteration = first.iteration;
    }
    judge_weights(findings_);
    findings_.add_boundary_origins(find_boundary_origins(incident, findings_.crossings()));
    judge_local_gradients(findings_);
    judge_reduced_gradients(findings_);
    judge_norm_gradients(findings_);
    // What a bad weight has made of its own replica was the whole step's end.
    if (findings_.bad(Phase::params_before).empty()) {
      judge_updated_parameters(findings_);
      judge_norm_value(findings_);
      judge_losses(findings_);
    }
    merge_with_births();
    judge_divergence(incident, verdict_.origins);
    for (Origin& origin : verdict_.origins) origin.refutation = refutation_of(origin);
    add_machine_check(incident, verdict_.origins);
    describe_spread();
    add_status_and_notes();
    return std::move(verdict_);
  }

 private:
  void merge_with_births() {
    const Incident& incident = findings_.incident();
    verdict_.rerun = rerun_of(incident);
    const bool has_crossings = !findings_.crossings().events().empty();
    verdict_.origins = merge_births(incident, std::move(findings_.found()),
                                    origins_of_births(incident, has_crossings), verdict_.rerun);
    if (verdict_.origins.size() > kMostOrigins) {
      verdict_.notes.push_back(std::to_string(verdict_.origins.size() - kMostOrigins) +
                               " further origins are not listed");
      verdict_.origins.resize(kMostOrigins);
    }
  }

  void see(const RankEvidence& rank, Phase phase, std::set<int>& ranks) {
    ranks.insert(rank.rank());
    verdict_.spread.first_seen = std::min(phase, verdict_.spread.first_seen.value_or(phase));
  }

  static bool has_bad_loss(const RankEvidence& rank) {
    return std::ranges::any_of(rank.ledger().sightings, [](const Sighting& sighting) {
      return sighting.phase == Phase::loss && !sighting.crossing && !sighting.stats.is_finite();
    });
  }

  void describe_spread() {
    std::set<int> ranks;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (has_bad_loss(rank)) see(rank, Phase::loss, ranks);
      for (const Phase phase : kParameterPhases) {
        if (!rank.bad(phase).empty()) see(rank, phase, ranks);
      }
    }
    for (const BoundaryEvent& event : findings_.crossings().events()) {
      if (event.role != BoundaryRole::loss) see(*event.rank, event.sighting->phase, ranks);
    }
    verdict_.spread.ranks = sorted(ranks);
    verdict_.spread.parameters = findings_.bad_parameters();
    std::set<std::string_view> listed;
    for (const Origin& origin : verdict_.origins) {
      for (const std::string* name : {&origin.clean_before, &origin.clean_after}) {
        if (!name->empty() && listed.insert(*name).second) verdict_.clean.push_back(*name);
      }
    }
  }

  [[nodiscard]] VerdictStatus status_of_complete_evidence() const {
    if (verdict_.origins.empty()) return VerdictStatus::clean;
    const bool is_benign = std::ranges::all_of(
        verdict_.origins, [](const Origin& origin) { return origin.cause == Cause::loss_scale; });
    return is_benign ? VerdictStatus::benign : VerdictStatus::located;
  }

  void add_status_and_notes() {
    verdict_.notes.insert(verdict_.notes.begin(), findings_.notes().begin(),
                          findings_.notes().end());
    verdict_.silent_ranks = findings_.incident().silent();
    if (!findings_.incident().silent().empty() || findings_.incident().has_cut_off_ledgers()) {
      verdict_.status = VerdictStatus::partial;
    } else {
      verdict_.status = status_of_complete_evidence();
    }
    for (const auto& [phase, count] : findings_.origins_per_phase()) {
      if (count <= Findings::kMostOriginsPerPhase) continue;
      verdict_.notes.push_back("up to " + std::to_string(count - Findings::kMostOriginsPerPhase) +
                               " further origins in " + std::string(name_of(phase)) +
                               " are not listed");
    }
    if (!findings_.ranks_with_more_isolated().empty()) {
      verdict_.notes.push_back("more parameters are bad by themselves than the " +
                               std::to_string(Findings::kMostIsolatedPerRank) +
                               " that are listed for a rank, on " +
                               describe_rank_count(findings_.ranks_with_more_isolated()));
    }
    std::set<int> cut_off;
    std::map<std::string, std::set<int>> ranks_by_note;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
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

  Findings findings_;
  Verdict verdict_;
};

}  // namespace

Verdict locate(std::span<const Ledger> ledgers, int world_size) {
  return Locator(ledgers, world_size).run();
}

}  // namespace nanlocator
