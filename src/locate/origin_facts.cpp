#include "locate/origin_facts.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "nanlocator/record/collective_kind.hpp"
#include "nanlocator/scan/dtype.hpp"

namespace nanlocator::inline locate_room {
namespace {

/// True for Inf without NaN beside finite elements within a factor `reach` of the dtype's largest.
bool is_near_overflow(const Sighting& sighting, double reach) {
  const auto largest = largest_finite(sighting.dtype);
  const TensorStats& stats = sighting.stats;
  return largest && stats.nan == 0 && stats.has_finite() && stats.absmax > *largest / reach;
}

/// The largest of the rank's local gradients, of these parameters or of all.
std::optional<double> largest_gradient(const RankEvidence& rank,
                                       const std::set<std::string_view>& parameters) {
  if (parameters.empty()) return rank.absmax(Phase::grad_local);
  std::optional<double> largest;
  for (const std::string_view name : parameters) {
    largest = std::max(largest, rank.absmax(Phase::grad_local, name));
  }
  return largest;
}

/// The largest that the rank put into this reduction in the re-run, whose result was bad there,
/// too.
std::optional<double> largest_sent(const RankEvidence& rank, const Sighting& received) {
  std::optional<double> largest;
  for (const Birth& birth : rank.ledger().births) {
    const bool is_it = birth.kind == BirthKind::collective && received.crossing &&
                       birth.sighting.op == received.op &&
                       birth.members == received.crossing->members &&
                       birth.sighting.module == received.module &&
                       birth.sighting.microbatch == received.microbatch;
    if (is_it) largest = std::max(largest, birth.largest_sent);
  }
  return largest;
}

/// What the largest addend of each member adds up to; empty if one is not known.
std::optional<double> sum_of_maxima(const Incident& incident, const Sighting& received,
                                    const std::vector<int>& members,
                                    const std::set<std::string_view>& parameters) {
  std::vector<double> known;
  for (const int member : members) {
    const RankEvidence* const rank = incident.find(member);
    if (rank == nullptr) return std::nullopt;
    const bool is_of_gradients = received.phase > Phase::grad_local;
    const auto largest =
        is_of_gradients ? largest_gradient(*rank, parameters) : largest_sent(*rank, received);
    if (!largest && is_of_gradients) return std::nullopt;
    if (largest) known.push_back(*largest);
  }
  return sum_of_addends(known, members.size(), received.op);
}

/// A gradient may be summed in a narrower dtype than it has afterwards.
std::string dtype_of_sum(const Incident& incident, const Sighting& sighting,
                         const std::vector<int>& members) {
  for (const int member : members) {
    const RankEvidence* const rank = incident.find(member);
    const auto position = rank == nullptr ? std::nullopt : rank->position_of(sighting.parameter);
    if (!position) continue;
    const std::string& dtype = rank->parameter(*position).reduce_dtype;
    if (!dtype.empty()) return dtype;
  }
  return sighting.dtype;
}

bool watches_gathers(const Ledger& ledger, const RankList& members) {
  return std::ranges::any_of(ledger.crossings, [&](const CrossingCoverage& each) {
    return each.watches_weights && each.is_whole() && each.members == members;
  });
}

}  // namespace

std::optional<double> sum_of_addends(std::span<const double> known, std::size_t members,
                                     std::string_view op) {
  if (known.empty()) return std::nullopt;
  const bool keeps_parts = collective_kind_of(op) == CollectiveKind::reduce_scatter;
  if (known.size() < members && !keeps_parts) return std::nullopt;
  const auto unknown = static_cast<double>(members - std::min(members, known.size()));
  return std::accumulate(known.begin(), known.end(), 0.0) + unknown * std::ranges::max(known);
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(product, size, &product)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return product;
}

OriginTensor tensor_of(const Sighting& sighting) {
  const TensorStats& stats = sighting.stats;
  OriginTensor tensor;
  tensor.role = sighting.role;
  tensor.shape = sighting.shape;
  tensor.dtype = sighting.dtype;
  tensor.nan = stats.nan;
  tensor.pos_inf = stats.pos_inf;
  tensor.neg_inf = stats.neg_inf;
  if (stats.first_bad >= 0 && stats.first_bad < numel_of(sighting.shape)) {
    tensor.first_bad = stats.first_bad;
    tensor.first_bad_index = unravel_index(stats.first_bad, sighting.shape);
  }
  if (stats.has_finite()) tensor.absmax_finite = stats.absmax;
  return tensor;
}

std::optional<Fact> learning_rate_of(const Incident& incident, const Origin& origin) {
  const bool is_of_size = origin.cause == Cause::operator_overflow ||
                          origin.cause == Cause::divergence ||
                          has_fact(origin.facts, FactKind::norm_overflows);
  if (!is_of_size || origin.candidates.empty()) return std::nullopt;
  const RankEvidence* const rank = incident.find(origin.candidates.front());
  if (rank == nullptr) return std::nullopt;
  const OptimizerState* rate = nullptr;
  for (const OptimizerState& each : rank->ledger().optimizer_states) {
    if (each.name != "lr") continue;
    if (rate != nullptr) return std::nullopt;  // of another group
    rate = &each;
  }
  const bool is_known = rate != nullptr && rate->stats.is_finite() && rate->stats.absmax > 0;
  if (!is_known) return std::nullopt;
  return Fact{.kind = FactKind::learning_rate, .value = rate->stats.absmax};
}

std::optional<Fact> near_overflow(const Sighting& sighting) {
  // 16 is four binary orders; healthy gradients of any dtype stay far below.
  if (!is_near_overflow(sighting, 16)) return std::nullopt;
  return Fact{
      .kind = FactKind::near_overflow, .value = sighting.stats.absmax, .dtype = sighting.dtype};
}

std::optional<Fact> overflow_of_sum(const Incident& incident, const Sighting& sighting,
                                    const std::vector<int>& members,
                                    const std::set<std::string_view>& parameters) {
  if (const auto sum = sum_of_maxima(incident, sighting, members, parameters)) {
    if (sighting.stats.nan > 0) return std::nullopt;
    return sum_beyond_range(*sum, members.size(), dtype_of_sum(incident, sighting, members));
  }
  if (!is_near_overflow(sighting, 2.0 * static_cast<double>(members.size()))) return std::nullopt;
  return Fact{.kind = FactKind::sum_near_overflow,
              .count = std::ssize(members),
              .value = sighting.stats.absmax,
              .dtype = sighting.dtype};
}

std::optional<Fact> sum_beyond_range(double sum, std::size_t members, const std::string& dtype) {
  const auto largest = largest_finite(dtype);
  if (!largest || sum <= *largest) return std::nullopt;
  return Fact{.kind = FactKind::sum_may_exceed_range,
              .count = static_cast<std::int64_t>(members),
              .value = sum,
              .last_value = largest,
              .dtype = dtype};
}

Direction direction_of(Phase phase) noexcept {
  switch (phase) {
    case Phase::forward:
    case Phase::loss:
      return Direction::forward;
    case Phase::backward:
      return Direction::backward;
    default:
      return Direction::none;
  }
}

std::optional<Fact> weights_gathered_unseen(const Incident& incident,
                                            const std::vector<int>& ranks) {
  Fact fact{.kind = FactKind::weights_gathered_unseen};
  std::set<int> givers;
  for (const int each : ranks) {
    const RankEvidence* const rank = incident.find(each);
    if (rank == nullptr) continue;
    const RankList* last = nullptr;  // neighbouring parameters have the same group
    for (const ParameterRecord& parameter : rank->ledger().backward_order) {
      const RankList& members = parameter.shard_group;
      if (members == RankList() || (last != nullptr && members == *last)) continue;
      last = &members;
      if (watches_gathers(rank->ledger(), members)) continue;
      const auto below = members.ranks_below(incident.world_size());
      if (below.size() < 2) continue;
      givers.insert(below.begin(), below.end());
      if (fact.ranks.empty() || fact.ranks.back() != each) fact.ranks.push_back(each);
    }
  }
  if (fact.ranks.empty()) return std::nullopt;
  fact.peers.assign(givers.begin(), givers.end());
  return fact;
}

std::optional<Fact> samples_of(const Incident& incident, const Origin& origin) {
  constexpr std::string_view kBegin = "samples ", kBad = "; NaN or Inf in ";
  constexpr std::size_t kMost = 3;
  const bool is_of_step = origin.phase >= Phase::forward && origin.phase <= Phase::backward;
  if (!is_of_step || origin.candidates.empty()) return std::nullopt;
  const int rank = origin.candidates.front();
  const RankEvidence* const evidence = incident.find(rank);
  if (evidence == nullptr) return std::nullopt;
  Fact fact{.kind = FactKind::samples, .ranks = {rank}};
  std::size_t batches = 0;
  for (const Microbatch& microbatch : evidence->ledger().microbatches) {
    for (const std::string& line : microbatch.tensors) {
      if (!line.starts_with(kBegin)) continue;
      const auto bad = line.find(kBad);
      const auto of = line.rfind(" of ", bad);
      if (bad != line.npos && of != line.npos && fact.text.empty()) {
        fact.text = "sample " + line.substr(bad + kBad.size()) + line.substr(of, bad - of);
      }
      if (++batches <= kMost) fact.names.push_back(line);
    }
  }
  if (batches == 0) return std::nullopt;
  if (batches > kMost) fact.names.push_back(std::to_string(batches - kMost) + " more batches");
  return fact;
}

std::string place_of(const Origin& origin) {
  const bool is_number =
      !origin.module.empty() && origin.module.find_first_not_of("0123456789.") == std::string::npos;
  return (is_number ? "module " : "") + origin.module + " in " + std::string(name_of(origin.phase));
}

void add_elsewhere(Origin& first, FactKind kind, std::string where) {
  constexpr std::size_t kMostNames = 4;
  const auto known = std::ranges::find(first.facts, kind, &Fact::kind);
  Fact& elsewhere = known != first.facts.end()
                        ? *known
                        : first.facts.emplace_back(Fact{.kind = kind, .count = 0});
  ++*elsewhere.count;
  if (elsewhere.names.size() >= kMostNames) return;
  elsewhere.names.push_back(std::move(where));
}

}  // namespace nanlocator::inline locate_room
