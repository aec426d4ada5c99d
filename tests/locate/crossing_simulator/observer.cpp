#include "locate/crossing_simulator/observer.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace nanlocator::pipeline {

using simulator::found_or_empty;

namespace {

bool is_of_pass(Phase phase) {
  return phase <= Phase::backward;
}

}  // namespace

Sighting sighting_of(Phase phase, int microbatch, int chunk, int nan) {
  Sighting sighting;
  sighting.iteration = 7;
  sighting.microbatch = microbatch;
  sighting.chunk = chunk;
  sighting.phase = phase;
  sighting.dtype = "float32";
  sighting.shape = {64, 128};
  sighting.stats.numel = 8192;
  sighting.stats.nan = nan;
  sighting.stats.first_bad = 3;
  sighting.stats.absmax = 0.5;
  return sighting;
}

void turn_into_overflow(Sighting& sighting) {
  sighting.stats.pos_inf = std::exchange(sighting.stats.nan, 0);
  sighting.stats.absmax = 3e38;
}

void Observer::collective(const Place& place, const std::string& group,
                          const std::vector<int>& members, const std::string& op,
                          const std::vector<Tokens>& sent, const std::vector<Received>& received) {
  if (members.size() < 2) return;
  const Kind kind{group, members, std::nullopt, "sent"};
  Crossing crossing{group, members, std::nullopt, 0};
  for (const int rank : members) crossing.sequence = count(place, rank, kind);
  for (std::size_t i = 0; i < members.size(); ++i) {
    write(place, members[i], op, "sent", crossing, sent[i]);
    issue(place, members[i]);
  }
  if (op.find("allgather") != std::string::npos) return;  // scanned on the sender
  for (std::size_t i = 0; i < members.size(); ++i) {
    Sighting* bad = write(place, members[i], op, "received", crossing, received[i].tokens);
    if (bad != nullptr && received[i].is_overflow) turn_into_overflow(*bad);
  }
}

std::int64_t Observer::send(const Place& place, const Link& link, Tokens tokens) {
  const Kind kind{"pp", link.pipeline, link.to, "sent"};
  const std::int64_t sequence = count(place, link.from, kind);
  write(place, link.from, "c10d::send", "sent", {"pp", link.pipeline, link.to, sequence}, tokens);
  issue(place, link.from);
  return sequence;
}

void Observer::receive(const Place& place, const Link& link, std::int64_t sequence, Tokens tokens) {
  count(place, link.to, {"pp", link.pipeline, link.from, "received"});
  issue(place, link.to);
  write(place, link.to, "c10d::recv_", "received", {"pp", link.pipeline, link.from, sequence},
        tokens);
}

void Observer::loss(const Place& place, int rank, bool is_empty) {
  Sighting loss = sighting_of(Phase::loss, place.microbatch, place.stage / layout_.pp, 1);
  loss.shape = {};
  loss.stats.numel = 1;
  loss.stats.first_bad = 0;
  loss.role = "loss";
  loss.valid_labels = is_empty ? 0 : 512;
  losses_[rank].push_back(std::move(loss));
}

std::vector<Sighting> Observer::sightings_on(int rank) const {
  std::vector<Sighting> sightings = found_or_empty(bad_crossings_, rank);
  const std::vector<Sighting>& losses = found_or_empty(losses_, rank);
  sightings.insert(sightings.end(), losses.begin(), losses.end());
  return sightings;
}

std::vector<CrossingCoverage> Observer::crossings_on(int rank) const {
  std::vector<CrossingCoverage> crossings;
  const auto add = [&](const Kind& kind, std::int64_t count) {
    crossings.push_back({kind.group, kind.members, kind.peer, kind.role, 0, count});
  };
  Counts late = found_or_empty(late_counts_, rank);
  for (const auto& [kind, count] : counts_of_pass(rank)) {
    const Kind here = moved(kind, offset_of(rank));
    const auto more = late.extract(here);
    add(here, count + (more ? more.mapped() : 0));
  }
  for (const auto& [kind, count] : late) add(kind, count);
  return crossings;
}

bool Observer::has_crossed(int rank) const {
  return losses_.contains(rank) ||
         std::ranges::any_of(found_or_empty(bad_crossings_, rank), is_of_pass, &Sighting::phase);
}

Observer::Kind Observer::moved(Kind kind, int offset) {
  for (int& member : kind.members) member += offset;
  if (kind.peer) *kind.peer += offset;
  return kind;
}

int Observer::offset_of(int rank) const {
  return layout_.coordinates_of(rank).dp.rank / layout_.ep * layout_.ep * layout_.tp;
}

const Observer::Counts& Observer::counts_of_pass(int rank) const {
  return found_or_empty(counts_, rank - offset_of(rank));
}

std::int64_t Observer::count(const Place& place, int rank, const Kind& kind) {
  if (is_of_pass(place.phase)) return counts_[rank][kind]++;
  const Counts& of_pass = counts_of_pass(rank);
  const auto before = of_pass.find(moved(kind, -offset_of(rank)));
  return (before == of_pass.end() ? 0 : before->second) + late_counts_[rank][kind]++;
}

void Observer::issue(const Place& place, int rank) {
  ++(is_of_pass(place.phase) ? issued_ : late_issued_)[rank];
}

std::int64_t Observer::position_of(int rank) const {
  const auto of_pass = issued_.find(issued_.contains(rank) ? rank : rank - offset_of(rank));
  return (of_pass == issued_.end() ? 0 : of_pass->second) + found_or_empty(late_issued_, rank);
}

Sighting* Observer::write(const Place& place, int rank, const std::string& op,
                          std::string_view role, const Crossing& crossing, Tokens bad) {
  if (bad == 0) return nullptr;
  Sighting sighting =
      sighting_of(place.phase, place.microbatch, place.stage / layout_.pp, std::popcount(bad));
  if (!is_of_pass(place.phase)) {
    sighting.microbatch.reset();
    sighting.chunk.reset();
  }
  sighting.module = place.module;
  sighting.op = op;
  sighting.role = role;
  sighting.crossing = crossing;
  sighting.position = position_of(rank);
  return &bad_crossings_[rank].emplace_back(std::move(sighting));
}

}  // namespace nanlocator::pipeline
