#include "locate/receipts.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// The crossings of the birth's group that were numbered below this may have come before it.
std::int64_t next_crossing_after(const Root& root) {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const Sighting& later : root.rank->ledger().sightings) {
    if (!later.crossing || later.crossing->members != root.birth->members) continue;
    if (later.position && *later.position >= *root.birth->sighting.position) {
      next = std::min(next, later.crossing->sequence);
    }
  }
  return next;
}

/// True if the rank scanned what it gave to the birth's group, and no such value, or result, was
/// bad before the crossing `next` in the birth's microbatch.
bool was_finite_before(const RankEvidence& rank, const Birth& birth, std::int64_t next) {
  const Ledger& ledger = rank.ledger();
  const auto is_whole = [&](const CrossingCoverage& each) {
    return each.members == birth.members && !each.peer && each.is_whole();
  };
  const auto is_bad_before = [&](const Sighting& crossed) {
    const bool may_be_same_microbatch = !crossed.microbatch || !birth.sighting.microbatch ||
                                        crossed.microbatch == birth.sighting.microbatch;
    return may_be_same_microbatch && crossed.crossing &&
           crossed.crossing->members == birth.members && crossed.crossing->sequence < next;
  };
  return ledger.is_complete && std::ranges::any_of(ledger.crossings, is_whole) &&
         std::ranges::none_of(ledger.sightings, is_bad_before);
}

/// True if the root came out of an all-gather into which every member put finite values, and whose
/// result the first pass did not see: levels below `modules` do not read gathered tensors.
bool is_gathered_unseen(const Incident& incident, const Root& root) {
  const Birth& birth = *root.birth;
  if (collective_kind_of(birth.sighting.op) != CollectiveKind::all_gather) return false;
  if (!birth.sighting.position) return false;
  const std::int64_t next = next_crossing_after(root);
  return std::ranges::all_of(birth.members.ranks_below(incident.world_size()), [&](int member) {
    const RankEvidence* rank = incident.find(member);
    return rank != nullptr && was_finite_before(*rank, birth, next);
  });
}

}  // namespace

bool is_judged_in_first_pass(const Incident& incident, const Root& receipt) {
  const RankList& members = receipt.birth->members;
  if (members == RankList()) return true;
  if (is_gathered_unseen(incident, receipt)) return false;
  return std::ranges::count(receipt.rank->ledger().crossings, members, &CrossingCoverage::members) >
         0;
}

}  // namespace nanlocator::inline locate_room
