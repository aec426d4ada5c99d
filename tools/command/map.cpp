// `nanlocator map show|find|diff`: the parameter maps of a run.
#include <algorithm>
#include <charconv>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "command.hpp"
#include "console.hpp"
#include "files/printable.hpp"
#include "files/text.hpp"
#include "map/coordinates_json.hpp"
#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/map/map_query.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/report/read_run.hpp"

namespace nanlocator::command {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMapOutputVersion = 1;

const ParameterMap& map_of_rank(const MapDirectory& read, const std::string& directory, int rank) {
  std::vector<int> ranks;
  for (const auto& map : read.maps) {
    if (map.coordinates().rank == rank) return map;
    ranks.push_back(map.coordinates().rank);
  }
  throw UsageError("there is no map of rank " + std::to_string(rank) + " in " + directory +
                   "; it has rank " + describe_ranks(ranks));
}

std::string range_of(const ElementRange& range) {
  const std::string text = std::to_string(range.begin) + ".." + std::to_string(range.end);
  return range.row > 0 ? text + " of each " + std::to_string(range.row) : text;
}

/// "tp0 pp1 dp0": the coordinates in the name of this rank's files.
std::string place_of(const RankCoordinates& coordinates) {
  std::string place = "tp" + std::to_string(coordinates.tp.rank) + " pp" +
                      std::to_string(coordinates.pp.rank) + " dp" +
                      std::to_string(coordinates.dp.rank);
  if (coordinates.cp.size > 1) place += " cp" + std::to_string(coordinates.cp.rank);
  if (coordinates.ep.size > 1) place += " ep" + std::to_string(coordinates.ep.rank);
  return place;
}

// --- show ---------------------------------------------------------------------------------------

std::string shape_of(const ParameterInfo& parameter) {
  return parameter.dtype.empty() ? "?" : describe_shape(parameter.shape);
}

std::string dtype_of(const ParameterInfo& parameter) {
  return parameter.dtype.empty() ? "?" : parameter.dtype;
}

/// The flags, and the model chunk and shard if they are not the usual ones.
std::string remarks_on(const ParameterInfo& parameter) {
  std::string remarks = describe_flags(parameter);
  const auto add = [&](const std::string& remark) { append_item(remarks, remark); };
  if (parameter.chunk != 0) add("chunk " + std::to_string(parameter.chunk));
  if (parameter.shard) {
    const bool is_empty = parameter.shard->begin == parameter.shard->end;
    add(is_empty ? "shard none" : "shard " + range_of(*parameter.shard));
  }
  if (const auto ranks = parameter.shard_group.ranks(); !ranks.empty()) {
    add("weight in shards on " + ranks_text(ranks));
  }
  for (const auto& placement : parameter.placements) add(placement);
  return remarks;
}

void print_map(const ParameterMap& map) {
  std::cout << bold(printable(map.coordinates().describe())) << ": " << map.size() << " parameters";
  if (!map.run_id().empty()) std::cout << ", run " << printable(map.run_id());
  std::cout << '\n';
  Table table({{"id", Alignment::right}, {"name"}, {"shape"}, {"dtype"}, {"flags"}}, 1);
  for (const auto& parameter : map.parameters()) {
    table.add_row({std::to_string(parameter.id), parameter.name, shape_of(parameter),
                   dtype_of(parameter), remarks_on(parameter)});
  }
  table.print(std::cout);
}

Json map_to_json(const ParameterMap& map) {
  Json parameters = Json::array();
  for (const auto& parameter : map.parameters()) parameters.push_back(parameter_to_json(parameter));
  return {{"run_id", map.run_id()},
          {"coordinates", fields_to_json(map.coordinates())},
          {"parameters", std::move(parameters)}};
}

int show_maps(const Arguments& given) {
  const std::string directory = latest_attempt(given.text("DIR")).string();
  const MapDirectory read = read_map_directory(directory);
  std::vector<const ParameterMap*> shown;
  if (const auto rank = given.integer("--rank")) {
    shown.push_back(&map_of_rank(read, directory, static_cast<int>(*rank)));
  } else {
    for (const auto& map : read.maps) shown.push_back(&map);
  }
  if (given.has("--json")) {
    Json maps = Json::array();
    for (const auto* map : shown) maps.push_back(map_to_json(*map));
    print_json({{"version", kMapOutputVersion},
                {"directory", directory},
                {"maps", std::move(maps)},
                {"notes", read.notes}});
    return kClean;
  }
  print_notes(read.notes);
  for (const auto* map : shown) {
    if (map != shown.front()) std::cout << '\n';
    print_map(*map);
  }
  return kClean;
}

// --- find ---------------------------------------------------------------------------------------

/// The pattern as an id, if it is a number and nothing else.
std::optional<std::int64_t> id_from_pattern(const std::string& pattern) {
  if (pattern.empty() || pattern.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  std::int64_t id = 0;
  const auto [end, error] = std::from_chars(pattern.data(), pattern.data() + pattern.size(), id);
  if (error != std::errc()) throw UsageError("the id " + pattern + " is beyond 2^63 - 1");
  return id;
}

/// Which part of the parameter this rank has.
std::string part_of(const ParameterHolder& holder) {
  const auto& parameter = *holder.parameter;
  if (parameter.dtype.empty()) return "unknown";
  std::string part;
  if (holder.tp_slice) {
    part = "tp slice " + std::to_string(holder.tp_slice->rank) + " of " +
           std::to_string(holder.tp_slice->size);
  }
  if (!parameter.shard) return part.empty() ? "whole" : part;
  if (!part.empty()) part += ", of which ";
  if (parameter.shard->begin == parameter.shard->end) return part + "no elements";
  return part + "elements " + range_of(*parameter.shard) + " of " +
         std::to_string(parameter.numel());
}

Json holder_to_json(const ParameterHolder& holder) {
  Json tp_slice = nullptr;
  if (holder.tp_slice) {
    tp_slice = {{"rank", holder.tp_slice->rank}, {"size", holder.tp_slice->size}};
  }
  return {{"coordinates", fields_to_json(holder.map->coordinates())},
          {"part", part_of(holder)},
          {"tp_slice", std::move(tp_slice)},
          {"parameter", parameter_to_json(*holder.parameter)}};
}

void print_found(const FoundParameter& found) {
  std::cout << bold(printable(found.name)) << '\n';
  Table table({{"rank", Alignment::right},
               {"place"},
               {"id", Alignment::right},
               {"shape"},
               {"dtype"},
               {"part"},
               {"flags"}},
              6);
  for (const auto& holder : found.holders) {
    const auto& coordinates = holder.map->coordinates();
    const auto& parameter = *holder.parameter;
    table.add_row({std::to_string(coordinates.rank), place_of(coordinates),
                   std::to_string(parameter.id), shape_of(parameter), dtype_of(parameter),
                   part_of(holder), describe_flags(parameter)});
  }
  table.print(std::cout);
}

int find_in_maps(const Arguments& given) {
  const std::string directory = latest_attempt(given.text("DIR")).string();
  const std::string pattern = given.text("PATTERN");
  if (pattern.empty()) throw UsageError("the pattern is empty; give an id or a name");
  const MapDirectory read = read_map_directory(directory);
  const auto id = id_from_pattern(pattern);
  const auto found =
      id ? find_parameters(read.maps, *id) : find_parameters(read.maps, std::string_view(pattern));
  const int code = found.empty() ? kFindings : kClean;
  if (given.has("--json")) {
    Json matches = Json::array();
    for (const auto& parameter : found) {
      Json holders = Json::array();
      for (const auto& holder : parameter.holders) holders.push_back(holder_to_json(holder));
      matches.push_back({{"name", parameter.name}, {"holders", std::move(holders)}});
    }
    print_json({{"version", kMapOutputVersion},
                {"directory", directory},
                {"pattern", pattern},
                {"matches", std::move(matches)},
                {"notes", read.notes}});
    return code;
  }
  print_notes(read.notes);
  for (const auto& parameter : found) {
    if (&parameter != &found.front()) std::cout << '\n';
    print_found(parameter);
  }
  if (found.empty()) {
    std::cout << "no parameter " << (id ? "with the id " : "whose name matches ")
              << printable(pattern) << " on any of " << read.maps.size() << " ranks\n";
  }
  return code;
}

// --- diff ---------------------------------------------------------------------------------------

struct ComparedPair {
  const ParameterMap* left = nullptr;
  const ParameterMap* right = nullptr;
  std::vector<MapDifference> differences;
};

struct Comparison {
  std::vector<ComparedPair> pairs;
  std::vector<const ParameterMap*> only_left;  // ranks without a counterpart on the other side
  std::vector<const ParameterMap*> only_right;

  [[nodiscard]] bool is_clean() const {
    return only_left.empty() && only_right.empty() &&
           std::ranges::all_of(pairs, [](const auto& pair) { return pair.differences.empty(); });
  }
};

/// Compares ranks of two runs with the same coordinates (tp, pp, dp, cp).
Comparison compare_runs(const MapDirectory& left, const MapDirectory& right) {
  std::map<std::string, const ParameterMap*> right_at;
  for (const auto& map : right.maps) right_at[map.coordinates().file_suffix()] = &map;
  Comparison comparison;
  for (const auto& map : left.maps) {
    const auto same = right_at.find(map.coordinates().file_suffix());
    if (same == right_at.end()) {
      comparison.only_left.push_back(&map);
      continue;
    }
    comparison.pairs.push_back({&map, same->second, compare_maps(map, *same->second)});
    same->second = nullptr;
  }
  for (const auto& map : right.maps) {
    if (right_at[map.coordinates().file_suffix()] != nullptr) {
      comparison.only_right.push_back(&map);
    }
  }
  return comparison;
}

std::string id_or_nothing(const std::optional<std::int64_t>& id) {
  return id ? std::to_string(*id) : "";
}

/// The number of differences, from `begin` on, that form one shift: consecutive parameters whose
/// ids differ by the same amount. One parameter more or less shifts all later ones.
std::size_t length_of_shift(const std::vector<MapDifference>& differences, std::size_t begin) {
  const auto follows = [](const MapDifference& previous, const MapDifference& next) {
    return next.kind == MapDifferenceKind::id && *next.left_id == *previous.left_id + 1 &&
           *next.right_id == *previous.right_id + 1;
  };
  if (differences[begin].kind != MapDifferenceKind::id) return 1;
  std::size_t end = begin + 1;
  while (end < differences.size() && follows(differences[end - 1], differences[end])) ++end;
  return end - begin;
}

void print_differences(const std::vector<MapDifference>& differences) {
  Table table({{"what"},
               {"name"},
               {"left id", Alignment::right},
               {"right id", Alignment::right},
               {"left"},
               {"right"}},
              1);
  for (std::size_t begin = 0; begin < differences.size();) {
    const auto& first = differences[begin];
    const std::size_t length = length_of_shift(differences, begin);
    const auto& last = differences[begin + length - 1];
    constexpr std::size_t kWorthFolding = 4;
    if (length < kWorthFolding) {
      table.add_row({std::string(name_of(first.kind)), first.name, id_or_nothing(first.left_id),
                     id_or_nothing(first.right_id), first.left, first.right});
      ++begin;
      continue;
    }
    table.add_row(
        {"id", first.name, id_or_nothing(first.left_id), id_or_nothing(first.right_id), "", ""});
    table.add_row(
        {"  ...", "and the " + std::to_string(length - 2) + " after it, to", "", "", "", ""});
    table.add_row(
        {"  ...", last.name, id_or_nothing(last.left_id), id_or_nothing(last.right_id), "", ""});
    begin += length;
  }
  table.print(std::cout);
}

std::string describe_ranks_of(const std::vector<const ParameterMap*>& maps) {
  std::vector<int> ranks;
  for (const auto* map : maps) ranks.push_back(map->coordinates().rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + describe_ranks(ranks);
}

/// Pairs with the same differences are listed together: data-parallel replicas have the same.
void print_comparison(const Comparison& comparison, const std::string& left,
                      const std::string& right) {
  std::vector<std::vector<const ComparedPair*>> groups;
  for (const auto& pair : comparison.pairs) {
    if (pair.differences.empty()) continue;
    const auto group = std::ranges::find_if(groups, [&](const auto& candidate) {
      return candidate.front()->differences == pair.differences;
    });
    if (group == groups.end()) {
      groups.push_back({&pair});
    } else {
      group->push_back(&pair);
    }
  }
  for (const auto& group : groups) {
    std::vector<const ParameterMap*> left_maps;
    std::vector<const ParameterMap*> right_maps;
    for (const auto* pair : group) {
      left_maps.push_back(pair->left);
      right_maps.push_back(pair->right);
    }
    std::cout << bold(describe_ranks_of(left_maps) + " of " + printable(left) + " (left), " +
                      describe_ranks_of(right_maps) + " of " + printable(right) + " (right)")
              << '\n';
    print_differences(group.front()->differences);
  }
  const auto print_missing = [](const std::vector<const ParameterMap*>& maps,
                                const std::string& directory) {
    if (maps.empty()) return;
    std::cout << describe_ranks_of(maps) << " in " << printable(directory)
              << " only: the other side has no map with these coordinates\n";
  };
  print_missing(comparison.only_left, left);
  print_missing(comparison.only_right, right);
  if (comparison.is_clean()) {
    std::cout << "no difference: " << comparison.pairs.size()
              << (comparison.pairs.size() == 1 ? " pair" : " pairs") << " of maps compared\n";
  }
}

/// Notes pairs in which one side has no manifest, for which "no difference" means less.
void note_pairs_without_shapes(const Comparison& comparison, std::vector<std::string>& notes) {
  const auto knows_names_alone = [](const ParameterMap& map) {
    return std::ranges::any_of(map.parameters(), [](const auto& p) { return p.dtype.empty(); });
  };
  std::vector<const ParameterMap*> affected;
  for (const auto& pair : comparison.pairs) {
    if (knows_names_alone(*pair.left) || knows_names_alone(*pair.right)) {
      affected.push_back(pair.left);
    }
  }
  if (affected.empty()) return;
  notes.push_back(describe_ranks_of(affected) +
                  ": only ids and names were compared, because one side has no manifest");
}

Json difference_to_json(const MapDifference& difference) {
  const auto id_to_json = [](const std::optional<std::int64_t>& id) {
    return id ? Json(*id) : Json(nullptr);
  };
  const auto text_to_json = [](const std::string& text) {
    return text.empty() ? Json(nullptr) : Json(text);
  };
  return {
      {"kind", name_of(difference.kind)},          {"name", difference.name},
      {"left_id", id_to_json(difference.left_id)}, {"right_id", id_to_json(difference.right_id)},
      {"left", text_to_json(difference.left)},     {"right", text_to_json(difference.right)}};
}

Json comparison_to_json(const Comparison& comparison) {
  Json pairs = Json::array();
  for (const auto& pair : comparison.pairs) {
    Json differences = Json::array();
    for (const auto& difference : pair.differences) {
      differences.push_back(difference_to_json(difference));
    }
    pairs.push_back({{"left_rank", pair.left->coordinates().rank},
                     {"right_rank", pair.right->coordinates().rank},
                     {"differences", std::move(differences)}});
  }
  const auto ranks_of = [](const std::vector<const ParameterMap*>& maps) {
    Json ranks = Json::array();
    for (const auto* map : maps) ranks.push_back(map->coordinates().rank);
    return ranks;
  };
  return {{"pairs", std::move(pairs)},
          {"only_left", ranks_of(comparison.only_left)},
          {"only_right", ranks_of(comparison.only_right)}};
}

/// Both ranks of "A,B".
std::optional<std::pair<int, int>> rank_pair_from(std::string_view text) {
  const std::size_t comma = std::min(text.find(','), text.size());
  const auto first = integer_from(text.substr(0, comma));
  const auto second = integer_from(text.substr(std::min(comma + 1, text.size())));
  if (!first || !second) return std::nullopt;
  return std::pair(static_cast<int>(*first), static_cast<int>(*second));
}

int compare(const Arguments& given) {
  const auto directories = given.texts("DIR");
  const bool compares_ranks = given.has("--ranks");
  if (compares_ranks && directories.size() != 1) {
    throw UsageError("--ranks compares two ranks of one directory; give one directory, not " +
                     std::to_string(directories.size()));
  }
  if (!compares_ranks && directories.size() != 2) {
    throw UsageError("give two directories, or one and --ranks A,B");
  }
  const std::string& left_name = directories.front();
  const std::string& right_name = directories.back();
  const MapDirectory left = read_map_directory(left_name);
  const std::optional<MapDirectory> other =
      compares_ranks ? std::nullopt : std::optional(read_map_directory(right_name));
  Comparison comparison;
  if (other) {
    comparison = compare_runs(left, *other);
  } else {
    const auto ranks = *rank_pair_from(given.text("--ranks"));
    const auto& first = map_of_rank(left, left_name, ranks.first);
    const auto& second = map_of_rank(left, left_name, ranks.second);
    comparison.pairs.push_back({&first, &second, compare_maps(first, second)});
  }

  std::vector<std::string> notes;
  const auto add_notes = [&](const std::string& directory, const std::vector<std::string>& more) {
    for (const auto& note : more) notes.push_back(directory + ": " + note);
  };
  add_notes(left_name, left.notes);
  if (other) add_notes(right_name, other->notes);
  note_pairs_without_shapes(comparison, notes);

  if (given.has("--json")) {
    Json json = {{"version", kMapOutputVersion}, {"left", left_name}, {"right", right_name}};
    json.update(comparison_to_json(comparison));
    json["notes"] = notes;
    print_json(json);
  } else {
    print_notes(notes);
    print_comparison(comparison, left_name, right_name);
  }
  return comparison.is_clean() ? kClean : kFindings;
}

// --- options ------------------------------------------------------------------------------------

constexpr Option kDirectoryOfMaps = {
    .name = "DIR",
    .least = 1,
    .help = "Folder with param_manifest_*.json or param_id_name_map_*.json files"};

constexpr Option kShowMapOptions[] = {
    {.name = kDirectoryOfMaps.name,
     .default_value = "nanlocator_run",
     .help = "A run's folder, one of its attempts (a0), or one with maps copied together"},
    kJsonOption,
    {.name = "--rank", .value = "N", .type = Type::integer, .help = "Only this global rank"},
};

constexpr Option kFindMapOptions[] = {
    kDirectoryOfMaps,
    {.name = "PATTERN",
     .least = 1,
     .help =
         "An id, a part of a name, or a pattern with * and ? for a name or its end after a dot"},
    kJsonOption,
};

constexpr Option kDiffMapOptions[] = {
    {.name = kDirectoryOfMaps.name, .least = 1, .most = 2, .help = kDirectoryOfMaps.help},
    kJsonOption,
    {.name = "--ranks",
     .value = "A,B",
     .accepts = [](std::string_view text) { return rank_pair_from(text).has_value(); },
     .expected = "two ranks such as 0,4",
     .help = "Two global ranks of one DIR"},
};

constexpr Command kMapCommands[] = {
    {.name = "show",
     .summary = "List every rank's parameters",
     .options = kShowMapOptions,
     .examples = "nanlocator map show --rank 0",
     .run = show_maps},
    {.name = "find",
     .summary = "Show which ranks hold a parameter, and which part of it",
     .options = kFindMapOptions,
     .details =
         "A number is an id; to match it in names add a *. Quote patterns to protect them from "
         "the shell. Elements a..b of the flattened parameter begin with a and end before b.",
     .exit_codes = "0 found, 1 nothing was found, 2 wrong use or unreadable input",
     .examples = "nanlocator map find nanlocator_run 'layers.3.*layernorm*'",
     .run = find_in_maps},
    {.name = "diff",
     .summary = "Compare the maps of two runs, or of two ranks",
     .options = kDiffMapOptions,
     .details = "Two runs are compared rank by rank where tp, pp, dp and cp are the same. Raw "
                "names, buckets and shards are not compared: they differ by design.",
     .exit_codes = "0 no difference, 1 something differs, 2 wrong use or unreadable input",
     .examples = "nanlocator map diff run_of_monday/a0 run_of_tuesday/a0\n"
                 "nanlocator map diff nanlocator_run/a0 --ranks 0,4",
     .run = compare},
};

}  // namespace

Command map_command() {
  return {.name = "map",
          .summary = "Parameter ids, names and the ranks that hold them",
          .examples = "nanlocator map show --rank 0",
          .commands = kMapCommands};
}

}  // namespace nanlocator::command
