#include "nanlocator/locate/locate.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "incident/findings.hpp"
#include "locate/events/events.hpp"
#include "locate/job_state.hpp"
#include "locate/judges.hpp"
#include "locate/origin_facts.hpp"
#include "locate/rerun_facts.hpp"
#include "nanlocator/verdict/cause_table.hpp"

namespace nanlocator::inline locate_room {
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
    verdict_.rerun = rerun_of(incident);
    find_by_events();
    judge_left_gradients(incident, verdict_.origins);
    judge_divergence(incident, verdict_.origins);
    judge_bad_weights(findings_, verdict_.origins);
    judge_collective_results(incident, verdict_.origins);
    judge_races(incident, verdict_.rerun, verdict_.origins);
    for (Origin& origin : verdict_.origins) {
      if (auto samples = samples_of(incident, origin)) {
        const bool is_of_loader = !samples->text.empty();  // as the data set gave it
        if (origin.detail == Detail::unrecorded && is_of_loader) origin.detail = Detail::none;
        origin.facts.push_back(*std::move(samples));
      }
      if (auto rate = learning_rate_of(incident, origin)) origin.facts.push_back(*std::move(rate));
      complete(origin);
    }
    describe_job();
    describe_spread();
    add_status_and_notes();
    verdict_.decision = decide(verdict_);
    return std::move(verdict_);
  }

 private:
  void find_by_events() {
    if (findings_.incident().ranks().empty()) return;
    auto found = events::origins_of_events(findings_, verdict_.rerun);
    verdict_.origins = std::move(found.origins);
    verdict_.facts = std::move(found.facts);
    limit_origins();
  }

  void limit_origins() {
    if (verdict_.origins.size() > kMostOrigins) {
      add_fact({.kind = FactKind::origins_not_listed,
                .count = static_cast<std::int64_t>(verdict_.origins.size() - kMostOrigins)});
      verdict_.origins.resize(kMostOrigins);
    }
  }

  void see(const RankEvidence& rank, Phase phase, std::set<int>& ranks) {
    ranks.insert(rank.rank());
    verdict_.spread.first_seen = std::min(phase, verdict_.spread.first_seen.value_or(phase));
  }

  void describe_spread() {
    std::set<int> ranks;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (!rank.bad_losses().empty()) see(rank, Phase::loss, ranks);
      for (const Phase phase : kParameterPhases) {
        if (!rank.bad(phase).empty()) see(rank, phase, ranks);
      }
    }
    for (const BoundaryEvent& event : findings_.crossings().events()) {
      if (event.role != RoleKind::loss) see(*event.rank, event.sighting->phase, ranks);
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
    verdict_.silent_ranks = findings_.incident().silent();
    if (!findings_.incident().silent().empty() || findings_.incident().has_cut_off_ledgers()) {
      verdict_.status = VerdictStatus::partial;
    } else {
      verdict_.status = status_of_complete_evidence();
    }
    std::set<int> cut_off;
    std::map<std::string, std::set<int>> ranks_by_note;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      if (!rank.ledger().is_complete) cut_off.insert(rank.rank());
      for (const std::string& note : rank.ledger().notes) ranks_by_note[note].insert(rank.rank());
    }
    if (!cut_off.empty()) {
      add_fact({.kind = FactKind::ledgers_cut_off, .ranks = sorted(cut_off)});
    }
    for (const auto& [note, ranks] : ranks_by_note) {
      if (verdict_.notes.size() >= kMostNotes) {
        add_fact({.kind = FactKind::notes_not_listed});
        break;
      }
      verdict_.notes.push_back(ranks_text(sorted(ranks)) + ": " + note);
    }
  }

  void describe_job() {
    const auto ranks = findings_.incident().ranks();
    if (ranks.empty()) return;
    verdict_.job = job_state_of(findings_.incident(), verdict_.origins, verdict_.rerun);
    JobLayout layout;
    layout.first_rank = ranks.front().coordinates();
    // Silent ranks are not listed, so the size of a host follows from its highest local rank.
    for (const RankEvidence& rank : ranks) {
      layout.ranks_per_host = std::max(layout.ranks_per_host, rank.coordinates().local_rank + 1);
    }
    for (const int rank : mentioned_ranks()) {
      const RankEvidence* const evidence = findings_.incident().find(rank);
      if (evidence != nullptr && layout.mentioned.size() < kMostMentioned) {
        layout.mentioned.push_back(evidence->coordinates());
      }
    }
    const auto hosts = hosts_by_block(layout.ranks_per_host);
    for (const int rank : findings_.incident().silent()) {
      const auto host = hosts.find(rank / layout.ranks_per_host);
      if (host == hosts.end()) continue;
      if (layout.mentioned.size() >= kMostMentioned) break;
      RankCoordinates place;
      place.rank = rank;
      place.world_size = layout.first_rank.world_size;
      place.local_rank = rank % layout.ranks_per_host;
      place.host = host->second;
      layout.mentioned.push_back(std::move(place));
    }
    std::ranges::sort(layout.mentioned, {}, &RankCoordinates::rank);
    verdict_.layout = std::move(layout);
  }

  /// The host of each block of ranks from which one answered, if ranks are numbered host by host;
  /// else empty.
  std::map<int, std::string> hosts_by_block(int ranks_per_host) const {
    std::map<int, std::string> hosts;
    std::map<std::string, int> blocks;
    for (const RankEvidence& rank : findings_.incident().ranks()) {
      const RankCoordinates& at = rank.coordinates();
      const int block = at.rank / ranks_per_host;
      const bool is_in_order = !at.host.empty() && at.rank % ranks_per_host == at.local_rank &&
                               hosts.try_emplace(block, at.host).first->second == at.host &&
                               blocks.try_emplace(at.host, block).first->second == block;
      if (!is_in_order) return {};
    }
    return hosts;
  }

  std::set<int> mentioned_ranks() const {
    std::set<int> ranks;
    for (const Origin& origin : verdict_.origins) {
      ranks.insert(origin.candidates.begin(), origin.candidates.end());
      for (const Fact& fact : origin.facts) {
        ranks.insert(fact.ranks.begin(), fact.ranks.end());
        ranks.insert(fact.peers.begin(), fact.peers.end());
      }
    }
    return ranks;
  }

  void add_fact(Fact fact) { verdict_.facts.push_back(std::move(fact)); }

  Findings findings_;
  Verdict verdict_;
};

}  // namespace

Verdict locate(std::span<const Ledger> ledgers, int world_size) {
  return Locator(ledgers, world_size).run();
}

}  // namespace nanlocator::inline locate_room
