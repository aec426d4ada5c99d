#include "report/page_data.hpp"
#include "files/text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>

#include "report/page_text.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

using nlohmann::ordered_json;

/// Numbers are for reading, not for computing: four digits; NaN and infinities are texts.
ordered_json page_number(double number, const char* format = "%.4g") {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  char text[40];
  std::snprintf(text, sizeof text, format, number);
  const double rounded = std::strtod(text, nullptr);
  if (std::abs(rounded) < 1e15 && rounded == std::floor(rounded))
    return static_cast<std::int64_t>(rounded);  // "3" instead of "3.0"
  return rounded;
}

class Strings {
 public:
  explicit Strings(std::size_t most_bytes) : most_bytes_(most_bytes) {}

  int index_of(const std::string& text) {
    const auto known = indices_.emplace(text, static_cast<int>(indices_.size()));
    if (known.second) strings_.push_back(page_text(text, most_bytes_));
    return known.first->second;
  }
  [[nodiscard]] ordered_json json() && { return std::move(strings_); }

 private:
  std::size_t most_bytes_;
  std::unordered_map<std::string, int> indices_;
  ordered_json strings_ = ordered_json::array();
};

/// The places that sightings of many ranks share, each stored once.
class Places {
 public:
  explicit Places(Strings& strings) : strings_(strings) {}

  int index_of(const Sighting& sighting) {
    const Place place{static_cast<int>(sighting.phase),
                      sighting.microbatch.value_or(-1),
                      sighting.chunk.value_or(-1),
                      strings_.index_of(sighting.module),
                      strings_.index_of(sighting.op),
                      strings_.index_of(sighting.role.text()),
                      strings_.index_of(sighting.parameter),
                      strings_.index_of(sighting.dtype),
                      strings_.index_of(describe_shape(sighting.shape)),
                      sighting.crossing ? strings_.index_of(sighting.crossing->group) : -1,
                      sighting.crossing ? sighting.crossing->sequence : -1};
    const auto known = indices_.emplace(place, static_cast<int>(indices_.size()));
    if (known.second) add(place, std::make_index_sequence<std::tuple_size_v<Place>>());
    return known.first->second;
  }
  [[nodiscard]] ordered_json json() && { return std::move(columns_); }

 private:
  using Place = std::tuple<int, int, int, int, int, int, int, int, int, int, std::int64_t>;
  static constexpr std::array<const char*, std::tuple_size_v<Place>> kColumns = {
      "phase",     "microbatch", "chunk", "module", "operator", "role",
      "parameter", "dtype",      "shape", "group",  "sequence"};

  template <std::size_t... column>
  void add(const Place& place, std::index_sequence<column...>) {
    (columns_[kColumns[column]].push_back(std::get<column>(place)), ...);
  }

  Strings& strings_;
  std::map<Place, int> indices_;
  ordered_json columns_ = ordered_json::object();
};

/// The largest per-rank limit with which all ranks together stay within `most`.
std::size_t fair_share(const std::vector<PageRank>& ranks, std::size_t most) {
  std::vector<std::size_t> sizes;
  for (const PageRank& rank : ranks) {
    if (rank.ledger) sizes.push_back(rank.ledger->sightings.size());
  }
  std::ranges::sort(sizes);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::size_t share = most / (sizes.size() - i);
    if (sizes[i] > share) return share;
    most -= sizes[i];
  }
  return sizes.empty() ? 0 : sizes.back();
}

class PageData {
 public:
  PageData(const RunReport& report, const PagePictures& pictures, const PageLimits& limits)
      : report_(report),
        pictures_(pictures),
        limits_(limits),
        strings_(limits.name_bytes),
        places_(strings_) {}

  ordered_json json() && {
    ordered_json json;
    json["iteration"] = report_.verdict.iteration;
    json["phases"] = phase_names();
    json["axes"] = axes();
    json["ranks"] = ranks();
    json["origins"] = origins();
    json["sightings"] = sightings();
    json["timeline"] = timeline();
    json["parameters"] = parameters();
    json["births"] = births();
    json["microbatches"] = microbatches();
    json["curves"] = curves();
    json["windows"] = windows();
    json["places"] = std::move(places_).json();
    json["strings"] = std::move(strings_).json();
    return json;
  }

 private:
  static ordered_json phase_names() {
    ordered_json names = ordered_json::array();
    for (int phase = 0; phase <= static_cast<int>(Phase::params_after); ++phase) {
      names.push_back(name_of(static_cast<Phase>(phase)));
    }
    return names;
  }

  ordered_json axes() const {
    const RankCoordinates& layout = pictures_.ranks.layout;
    return {{"tp", layout.tp.size},
            {"cp", layout.cp.size},
            {"dp", layout.dp.size},
            {"pp", layout.pp.size},
            {"ep", layout.ep.size}};
  }

  ordered_json ranks() {
    ordered_json rank = ordered_json::array(), state = rank, is_silent = rank, places = rank,
                 host = rank, device = rank, local = rank, seen = rank, notes = rank;
    for (const PageRank& entry : pictures_.ranks.ranks) {
      rank.push_back(entry.rank);
      state.push_back(static_cast<int>(entry.state));
      if (entry.is_silent) is_silent.push_back(entry.rank);
      const RankCoordinates at = entry.coordinates.value_or(RankCoordinates{});
      const bool is_placed = entry.coordinates.has_value();
      for (const int along : {at.tp.rank, at.cp.rank, at.dp.rank, at.pp.rank, at.ep.rank}) {
        places.push_back(is_placed ? along : -1);
      }
      host.push_back(strings_.index_of(limits_.has_hosts ? at.host : ""));
      device.push_back(strings_.index_of(device_of(entry, at)));
      local.push_back(at.local_rank);
      seen.push_back(entry.ledger ? static_cast<std::int64_t>(entry.ledger->sightings.size()) : -1);
      notes.push_back(entry.ledger ? notes_of(*entry.ledger) : -1);
    }
    return {{"rank", rank},        {"state", state}, {"silent", is_silent},
            {"places", places},    {"host", host},   {"device", device},
            {"local_rank", local}, {"seen", seen},   {"notes", notes}};
  }

  /// In a report of many ranks, "cuda:3" without the UUID, except for the origins' ranks.
  [[nodiscard]] std::string device_of(const PageRank& entry, const RankCoordinates& at) const {
    constexpr std::size_t kMostFullNames = 4'096;
    if (entry.state == RankState::born) return at.device;
    if (!limits_.has_hosts) return "";
    if (entry.state == RankState::candidate || pictures_.ranks.ranks.size() <= kMostFullNames)
      return at.device;
    return at.device.substr(0, at.device.find(' '));
  }

  int notes_of(const Ledger& ledger) {
    std::string text = ledger.is_complete ? "" : "its ledger is cut off; ";
    for (std::size_t i = 0; i < std::min<std::size_t>(ledger.notes.size(), 4); ++i) {
      text += ledger.notes[i] + "; ";
    }
    if (!text.empty()) text.resize(text.size() - 2);
    return strings_.index_of(text);
  }

  ordered_json origins() {
    ordered_json all = ordered_json::array();
    for (const Origin& origin : report_.verdict.origins) {
      const TimelineColumn column{origin.phase, std::max(-1, origin.microbatch.value_or(-1))};
      const auto& columns = pictures_.timeline.columns;
      const auto found = std::ranges::find(columns, column);
      ordered_json ranks = ordered_json::array();
      for (const int rank : ranks_of(origin)) ranks.push_back(rank);
      all.push_back({{"ranks", ranks},
                     {"column", found == columns.end() ? -1 : found - columns.begin()},
                     {"cause", name_of(origin.cause)},
                     {"module", strings_.index_of(origin.module)},
                     {"parameter", strings_.index_of(origin.parameter)}});
    }
    return all;
  }

  static std::vector<int> ranks_of(const Origin& origin) {
    if (origin.coordinates) return {origin.coordinates->rank};
    std::vector<int> ranks = origin.candidates;
    ranks.resize(std::min<std::size_t>(ranks.size(), 64));
    return ranks;
  }

  ordered_json sightings() {
    const std::size_t share = fair_share(pictures_.ranks.ranks, limits_.sightings);
    ordered_json shown = ordered_json::array(), place = shown, nan = shown, inf = shown,
                 first = shown, absmax = shown, peer = shown;
    std::size_t left_out = 0;
    for (const PageRank& rank : pictures_.ranks.ranks) {
      const std::size_t all = rank.ledger ? rank.ledger->sightings.size() : 0;
      const std::size_t some = std::min(all, share);
      shown.push_back(some);
      left_out += all - some;
      for (std::size_t i = 0; i < some; ++i) {
        const Sighting& sighting = rank.ledger->sightings[i];
        place.push_back(places_.index_of(sighting));
        nan.push_back(sighting.stats.nan);
        inf.push_back(sighting.stats.pos_inf + sighting.stats.neg_inf);
        first.push_back(sighting.stats.first_bad);
        absmax.push_back(sighting.stats.has_finite() ? page_number(sighting.stats.absmax)
                                                     : ordered_json(-1));
        // Relative to the rank, so that all ranks of a stage have the same number.
        const bool has_peer = sighting.crossing && sighting.crossing->peer;
        peer.push_back(has_peer ? ordered_json(std::int64_t{*sighting.crossing->peer} - rank.rank)
                                : ordered_json(0));
      }
    }
    return {{"shown", shown}, {"left_out", left_out}, {"place", place},   {"nan", nan},
            {"inf", inf},     {"first", first},       {"absmax", absmax}, {"peer", peer}};
  }

  ordered_json timeline() {
    const TimelinePicture& picture = pictures_.timeline;
    ordered_json columns = ordered_json::array(), rows = columns, arrows = columns,
                 further = columns;
    for (const TimelineColumn& column : picture.columns) {
      columns.push_back({static_cast<int>(column.phase), column.microbatch});
    }
    for (const TimelineRow& row : picture.rows) {
      ordered_json marks = ordered_json::array(), covered = marks;
      for (const TimelineMark& mark : row.marks) {  // four numbers per mark
        marks.push_back(mark.column);
        marks.push_back(mark.clock);
        marks.push_back(static_cast<int>(mark.kind));
        marks.push_back(places_.index_of(*mark.sighting));
      }
      for (const bool is_covered : row.is_covered) covered.push_back(is_covered ? 1 : 0);
      rows.push_back({{"rank", row.rank}, {"marks", marks}, {"covered", covered}});
    }
    for (const TimelineArrow& arrow : picture.arrows) {
      arrows.push_back(
          {arrow.from_row, arrow.from_mark, arrow.to_row, arrow.to_mark, arrow.is_first ? 1 : 0});
    }
    for (const auto& [column, ranks] : picture.further_ranks) {
      further.push_back({column < picture.columns.size() ? std::int64_t(column) : -1, ranks});
    }
    return {{"columns", columns}, {"rows", rows}, {"arrows", arrows}, {"further", further}};
  }

  /// Chooses bad parameters and their neighbours in backward order before the others.
  [[nodiscard]] std::vector<bool> chosen_parameters() const {
    const auto& all = pictures_.parameters.parameters;
    std::vector<bool> is_chosen(all.size(), false);
    std::size_t left = limits_.parameters;
    const auto choose = [&](std::size_t i) {
      if (i >= all.size() || is_chosen[i] || left == 0) return;
      is_chosen[i] = true;
      --left;
    };
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].is_bad()) continue;
      for (const std::size_t near : {i - 1, i, i + 1})
        choose(near);  // i - 1 may wrap to an invalid index
    }
    for (std::size_t i = 0; i < all.size(); ++i) choose(i);
    return is_chosen;
  }

  ordered_json parameters() {
    const auto& all = pictures_.parameters.parameters;
    const std::vector<bool> is_chosen = chosen_parameters();
    ordered_json position = ordered_json::array(), name = position, stage = position,
                 chunk = position, shape = position, phases = position;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!is_chosen[i]) continue;
      position.push_back(i);
      name.push_back(strings_.index_of(all[i].name));
      stage.push_back(all[i].stage);
      chunk.push_back(all[i].chunk);
      shape.push_back(strings_.index_of(describe_shape(all[i].shape)));
    }
    for (std::size_t phase = 0; phase < kParameterPhases.size(); ++phase) {
      const bool is_seen = std::ranges::any_of(
          all, [&](const PageParameter& p) { return p.covered[phase] > 0 || p.bad[phase] > 0; });
      if (!is_seen) continue;
      ordered_json bad = ordered_json::array(), covered = bad;
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!is_chosen[i]) continue;
        bad.push_back(all[i].bad[phase]);
        covered.push_back(all[i].covered[phase]);
      }
      phases.push_back({{"phase", static_cast<int>(kParameterPhases[phase])},
                        {"bad", bad},
                        {"covered", covered}});
    }
    return {{"count", all.size()}, {"position", position},
            {"name", name},        {"stage", stage},
            {"chunk", chunk},      {"shape", shape},
            {"phases", phases},    {"is_order_observed", pictures_.parameters.is_order_observed}};
  }

  /// All ranks, the origins' first.
  [[nodiscard]] std::vector<const PageRank*> origins_first() const {
    std::vector<const PageRank*> ranks;
    for (const PageRank& rank : pictures_.ranks.ranks) ranks.push_back(&rank);
    std::ranges::stable_sort(ranks, {}, [](const PageRank* rank) {
      return rank->state == RankState::born ? 0 : rank->state == RankState::candidate ? 1 : 2;
    });
    return ranks;
  }

  ordered_json texts(const std::vector<std::string>& lines, std::size_t most) const {
    ordered_json json = ordered_json::array();
    for (std::size_t i = 0; i < std::min(most, lines.size()); ++i) {
      json.push_back(page_text(lines[i], limits_.name_bytes));
    }
    return json;
  }

  ordered_json births() {
    ordered_json all = ordered_json::array();
    std::size_t count = 0;
    for (const PageRank* rank : origins_first()) {
      if (!rank->ledger) continue;
      for (const Birth& birth : rank->ledger->births) {
        if (count++ >= limits_.births) continue;
        ordered_json values = ordered_json::array();
        std::vector<std::string> inputs;
        for (const Operand& operand : birth.operands) {
          inputs.push_back(operand_text(operand));
          if (!operand.at_first_bad || values.size() == 16) continue;
          values.push_back(
              {page_text(operand.name, 80), page_number(*operand.at_first_bad, "%.9g")});
        }
        std::vector<std::string> reached;
        for (const Reached& each : birth.reached) reached.push_back(reached_text(each));
        all.push_back({{"rank", rank->rank},
                       {"kind", name_of(birth.kind)},
                       {"place", places_.index_of(birth.sighting)},
                       {"node", page_text(birth.node, limits_.name_bytes)},
                       {"forward", page_text(birth.forward_op, limits_.name_bytes)},
                       {"nan", birth.sighting.stats.nan},
                       {"inf", birth.sighting.stats.pos_inf + birth.sighting.stats.neg_inf},
                       {"values", values},
                       {"inputs", texts(inputs, 12)},
                       {"stack", texts(birth.stack, 16)},
                       {"reached", texts(reached, 12)},
                       {"replay", texts(birth.replay_lines, 12)}});
      }
    }
    return {{"count", count}, {"shown", all}};
  }

  /// The data that the origins' ranks drew.
  ordered_json microbatches() {
    ordered_json all = ordered_json::array();
    for (const PageRank* rank : origins_first()) {
      const bool is_origin = rank->state == RankState::born || rank->state == RankState::candidate;
      if (!is_origin || !rank->ledger) continue;
      for (const Microbatch& microbatch : rank->ledger->microbatches) {
        if (all.size() == 48) return all;
        all.push_back({{"rank", rank->rank},
                       {"number", microbatch.number},
                       {"chunk", microbatch.chunk.value_or(-1)},
                       {"tensors", texts(microbatch.tensors, 8)}});
      }
    }
    return all;
  }

  struct Curve {
    const History* history = nullptr;
    const ParameterHistory* parameter = nullptr;
    bool is_origin = false;
    double growth = 0;  // of absmax: the last finite value over the median
  };

  static double growth_of(const ParameterHistory& parameter) {
    std::vector<float> finite;
    for (const float value : parameter.absmax) {
      if (std::isfinite(value)) finite.push_back(value);
    }
    if (finite.size() < 2) return 0;
    const float last = finite.back();
    const auto middle = finite.begin() + static_cast<std::ptrdiff_t>(finite.size() / 2);
    std::ranges::nth_element(finite, middle);
    return *middle > 0 ? last / *middle : 0;
  }

  [[nodiscard]] bool is_of_an_origin(const History& history,
                                     const ParameterHistory& parameter) const {
    return std::ranges::any_of(report_.verdict.origins, [&](const Origin& origin) {
      if (origin.parameter.empty() || origin.parameter != parameter.name) return false;
      const auto ranks = ranks_of(origin);
      return ranks.empty() || std::ranges::find(ranks, history.coordinates.rank) != ranks.end();
    });
  }

  /// The origins' parameters, then those that grew most; for each name, the rank where it grew
  /// most.
  [[nodiscard]] std::vector<Curve> chosen_curves() const {
    std::vector<Curve> curves;
    for (const History& history : report_.histories) {
      for (const ParameterHistory& parameter : history.parameters) {
        const std::size_t steps = history.iterations.size();
        if (steps == 0 || parameter.norm.size() != steps || parameter.absmax.size() != steps ||
            parameter.nonfinite.size() != steps)
          continue;
        curves.push_back(
            {&history, &parameter, is_of_an_origin(history, parameter), growth_of(parameter)});
      }
    }
    std::ranges::sort(curves, {}, [](const Curve& curve) {
      return std::tuple(!curve.is_origin, -curve.growth, std::string_view(curve.parameter->name),
                        curve.history->coordinates.rank, std::string_view(curve.history->phase));
    });
    std::set<std::string_view> names;
    std::size_t of_origins = 0;
    std::erase_if(curves, [&](const Curve& curve) {
      if (curve.is_origin) return ++of_origins > 4 || !names.insert(curve.parameter->name).second;
      return !names.insert(curve.parameter->name).second;
    });
    if (curves.size() > limits_.curves) curves.resize(limits_.curves);
    return curves;
  }

  ordered_json curves() {
    ordered_json all = ordered_json::array();
    for (const Curve& curve : chosen_curves()) {
      ordered_json steps = ordered_json::array(), norm = steps, absmax = steps, bad = steps;
      const auto number = [](float value) {
        return std::isfinite(value) ? page_number(value) : ordered_json(nullptr);
      };
      const std::size_t count = curve.history->iterations.size();
      for (std::size_t i = count - std::min<std::size_t>(count, 256); i < count; ++i) {
        steps.push_back(curve.history->iterations[i]);
        norm.push_back(number(curve.parameter->norm[i]));
        absmax.push_back(number(curve.parameter->absmax[i]));
        bad.push_back(curve.parameter->nonfinite[i]);
      }
      all.push_back({{"rank", curve.history->coordinates.rank},
                     {"parameter", strings_.index_of(curve.parameter->name)},
                     {"phase", page_text(curve.history->phase, 40)},
                     {"is_origin", curve.is_origin},
                     {"growth", page_number(curve.growth)},
                     {"steps", steps},
                     {"norm", norm},
                     {"absmax", absmax},
                     {"bad", bad}});
    }
    return all;
  }

  ordered_json windows() {
    constexpr std::int64_t kMostCells = 64 * 64;
    std::vector<const OriginWindows*> sorted;
    for (const OriginWindows& of_origin : report_.windows) sorted.push_back(&of_origin);
    std::ranges::stable_sort(sorted, {}, &OriginWindows::origin);
    ordered_json all = ordered_json::array();
    for (const OriginWindows* of_origin : sorted) {
      for (const TensorWindow& window : of_origin->windows) {
        const bool is_sound =
            window.rows > 0 && window.columns > 0 && window.rows <= kMostCells &&
            window.columns <= kMostCells && window.rows * window.columns <= kMostCells &&
            window.values.size() == static_cast<std::size_t>(window.rows * window.columns);
        if (!is_sound || all.size() == limits_.windows) continue;
        ordered_json values = ordered_json::array();
        for (const double value : window.values) values.push_back(page_number(value, "%.6g"));
        all.push_back({{"origin", of_origin->origin},
                       {"name", page_text(window.name, 200)},
                       {"dtype", page_text(window.dtype, 40)},
                       {"shape", window.shape},
                       {"fixed", window.fixed},
                       {"row", window.first_row},
                       {"column", window.first_column},
                       {"rows", window.rows},
                       {"columns", window.columns},
                       {"first_bad", window.first_bad},
                       {"values", values}});
      }
    }
    return all;
  }

  const RunReport& report_;
  const PagePictures& pictures_;
  const PageLimits& limits_;
  Strings strings_;
  Places places_;
};

}  // namespace

ordered_json page_data(const RunReport& report, const PagePictures& pictures,
                       const PageLimits& limits) {
  return PageData(report, pictures, limits).json();
}

}  // namespace nanlocator::inline report_room
