// read_map_directory: every rank's manifest or, without one, the recipe's id-name file.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "files/text.hpp"
#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/map/parameter_map.hpp"

namespace nanlocator::inline map_room {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIdNamePrefix = "param_id_name_map_";
constexpr std::string_view kManifestPrefix = "param_manifest_";

/// 100 000 parameters take about 40 MB; a larger file is not a map.
constexpr std::uint64_t kLargestMapFile = std::uint64_t{256} << 20;

/// The coordinates in a file's name: "tp1pp0dp1" or "tp1pp0dp1cp0".
struct FilePlace {
  int tp = 0;
  int pp = 0;
  int dp = 0;
  std::optional<int> cp;
  // Ordered as Megatron numbers global ranks: tp varies fastest, pp slowest.
  friend bool operator<(const FilePlace& a, const FilePlace& b) {
    return std::tuple(a.pp, a.dp, a.cp, a.tp) < std::tuple(b.pp, b.dp, b.cp, b.tp);
  }
};

struct FilesOfOneRank {
  std::optional<fs::path> manifest;
  std::optional<fs::path> id_name;
};

/// More ranks than any cluster has: keeps sums and products of numbers from files within 64 bits.
constexpr int kLargestAxis = 1 << 20;
constexpr std::int64_t kTooLarge = 1 << 24;

/// Removes "tp12" from `text` and returns 12. Accepts neither a sign nor leading zeros, and only
/// numbers below kLargestAxis.
std::optional<int> take_axis(std::string_view& text, std::string_view name) {
  if (!text.starts_with(name)) return std::nullopt;
  std::string_view digits = text.substr(name.size());
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const auto length = static_cast<std::size_t>(end - digits.data());
  const bool has_leading_zero = length > 1 && digits[0] == '0';
  if (error != std::errc() || number < 0 || number >= kLargestAxis || has_leading_zero) {
    return std::nullopt;
  }
  text = digits.substr(length);
  return number;
}

std::optional<FilePlace> place_from_suffix(std::string_view suffix) {
  const auto tp = take_axis(suffix, "tp");
  const auto pp = take_axis(suffix, "pp");
  const auto dp = take_axis(suffix, "dp");
  if (!tp || !pp || !dp) return std::nullopt;
  FilePlace place{.tp = *tp, .pp = *pp, .dp = *dp, .cp = take_axis(suffix, "cp")};
  if (suffix != ".json") return std::nullopt;
  return place;
}

/// Reads one directory; the steps below fill the members in order.
class DirectoryReader {
 public:
  explicit DirectoryReader(const fs::path& directory) : directory_(directory) {}

  MapDirectory read() {
    list_files();
    if (files_.empty()) throw_no_map();
    for (const auto& [place, files] : files_) read_rank(place, files);
    place_ranks_without_manifest();
    if (maps_.empty()) throw_no_map();
    note_what_does_not_fit_together();
    MapDirectory result;
    for (auto& [rank, map] : maps_) result.maps.push_back(std::move(map.map));
    result.notes = std::move(notes_);
    return result;
  }

 private:
  struct NamedMap {
    ParameterMap map;
    std::string file;
  };
  struct NamesOfPlace {
    FilePlace place;
    std::string file;
    std::vector<std::string> names;
  };

  void list_files() {
    std::error_code error;
    fs::directory_iterator entries(directory_, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      const fs::path path = entries->path();
      const std::string name = path.filename().string();
      const std::string_view view = name;
      const bool is_manifest = view.starts_with(kManifestPrefix);
      if (!is_manifest && !view.starts_with(kIdNamePrefix)) continue;
      const auto prefix = is_manifest ? kManifestPrefix : kIdNamePrefix;
      const auto place = place_from_suffix(view.substr(prefix.size()));
      if (!place) {
        notes_.push_back(name + " was not read: expected a name such as " + std::string(prefix) +
                         "tp0pp0dp0.json");
        continue;
      }
      auto& files = files_[*place];
      (is_manifest ? files.manifest : files.id_name) = path;
    }
    if (error) {
      throw IoError("cannot read the directory " + directory_.string() + ": " + error.message());
    }
    std::ranges::sort(notes_);  // the order of a directory's entries is not fixed
  }

  [[noreturn]] void throw_no_map() const {
    std::string message = directory_.string() + " holds no parameter map that can be read; " +
                          "expected files such as param_manifest_tp0pp0dp0.json";
    for (const auto& note : notes_) message += "; " + note;
    if (const auto attempts = attempt_folders(); !attempts.empty()) {
      message += "; maps are in the folder of an attempt, here " + attempts;
    }
    throw FormatError(message);
  }

  /// "a0, a1": a run directory has one folder per restart, which holds the maps.
  std::string attempt_folders() const {
    std::string found;
    for (int attempt = 0; attempt < 1000; ++attempt) {
      std::error_code ignored;
      const std::string name = std::string("a").append(std::to_string(attempt));
      if (!fs::is_directory(directory_ / name, ignored)) break;
      append_item(found, name);
    }
    return found;
  }

  void read_rank(const FilePlace& place, const FilesOfOneRank& files) {
    std::optional<std::vector<std::string>> names;
    std::string id_name_file;
    if (files.id_name) {
      id_name_file = files.id_name->filename().string();
      names = try_to_read(id_name_file, [&] {
        return names_from_id_name_json(read_file(*files.id_name, kLargestMapFile), id_name_file);
      });
    }
    if (files.manifest) {
      const std::string file = files.manifest->filename().string();
      auto map = try_to_read(file, [&] {
        auto read =
            ParameterMap::from_manifest_json(read_file(*files.manifest, kLargestMapFile), file);
        const std::string expected =
            std::string(kManifestPrefix) + read.coordinates().file_suffix() + ".json";
        if (file != expected) {
          throw FormatError(file + ": its coordinates belong in " + expected +
                            "; it was renamed or copied from another rank");
        }
        return read;
      });
      if (map) {
        note_disagreement(*map, file, names, id_name_file);
        add(std::move(*map), file);
        return;
      }
    }
    if (names) without_manifest_.push_back({place, id_name_file, std::move(*names)});
  }

  /// The result of `read`; if it throws, the reason becomes a note.
  template <typename Read>
  auto try_to_read(const std::string& file, const Read& read) -> std::optional<decltype(read())> {
    try {
      return read();
    } catch (const FormatError& error) {
      notes_.push_back(error.what());
    } catch (const Error& error) {
      notes_.push_back(file + ": " + error.what());
    }
    return std::nullopt;
  }

  void note_disagreement(const ParameterMap& map, const std::string& file,
                         const std::optional<std::vector<std::string>>& names,
                         const std::string& id_name_file) {
    if (id_name_file.empty()) {
      notes_.push_back(file + " has no " + std::string(kIdNamePrefix) +
                       map.coordinates().file_suffix() + ".json beside it");
    }
    if (!names) return;
    if (names->size() != map.size()) {
      notes_.push_back(file + " has " + std::to_string(map.size()) + " parameters, " +
                       id_name_file + " has " + std::to_string(names->size()) +
                       "; the manifest is used");
      return;
    }
    for (const auto& parameter : map.parameters()) {
      const auto& name = (*names)[static_cast<std::size_t>(parameter.id)];
      if (name == parameter.name) continue;
      notes_.push_back(file + " calls parameter " + std::to_string(parameter.id) + " " +
                       parameter.name + ", " + id_name_file + " calls it " + name +
                       "; the manifest is used");
      return;
    }
  }

  /// False, with a note, if another file has the same rank.
  bool add(ParameterMap map, const std::string& file) {
    const int rank = map.coordinates().rank;
    const auto [entry, is_new] = maps_.try_emplace(rank, NamedMap{std::move(map), file});
    if (!is_new) {
      notes_.push_back(file + " was skipped: it claims to be rank " + std::to_string(rank) +
                       ", and so does " + entry->second.file);
    }
    return is_new;
  }

  /// Sizes come from a manifest, or else are one more than the largest rank seen.
  void place_ranks_without_manifest() {
    if (without_manifest_.empty()) return;
    RankCoordinates sizes;
    if (!maps_.empty()) sizes = maps_.begin()->second.map.coordinates();
    const bool sizes_are_stated = !maps_.empty();
    for (const auto& [place, file, names] : without_manifest_) {
      sizes.tp.size = std::max(sizes.tp.size, place.tp + 1);
      sizes.pp.size = std::max(sizes.pp.size, place.pp + 1);
      sizes.dp.size = std::max(sizes.dp.size, place.dp + 1);
      // The suffix has a cp only if there are several.
      if (place.cp) sizes.cp.size = std::max({sizes.cp.size, *place.cp + 1, 2});
    }
    const std::int64_t world = product_of_sizes(sizes);
    if (!sizes_are_stated) {
      notes_.push_back(
          "there are no manifests, only the recipe's param_id_name_map files: shapes, dtypes and "
          "flags are not known, and global ranks are inferred from the files' names in Megatron's "
          "default order (tp, cp, dp, pp)");
      sizes.world_size = static_cast<int>(world);
    }
    if (world >= kTooLarge) {
      notes_.push_back("the files' names imply " + std::to_string(kTooLarge) +
                       " ranks or more; files without a manifest were skipped");
      return;
    }
    for (auto& [place, file, names] : without_manifest_) {
      // Megatron-Core, parallel_state.py, order "tp-cp-ep-dp-pp".
      const auto rank = place.tp + std::int64_t{sizes.tp.size} *
                                       (place.cp.value_or(0) +
                                        std::int64_t{sizes.cp.size} *
                                            (place.dp + std::int64_t{sizes.dp.size} * place.pp));
      if (rank >= sizes.world_size) {
        notes_.push_back(file + " was skipped: its coordinates are outside the " +
                         std::to_string(sizes.world_size) + " ranks of this run");
        continue;
      }
      const bool is_added = add_names(place, file, std::move(names), sizes, static_cast<int>(rank));
      if (is_added && sizes_are_stated) {
        notes_.push_back(file + " has no readable manifest beside it; for rank " +
                         std::to_string(rank) +
                         " (inferred from the name), only ids and names are known");
      }
    }
  }

  bool add_names(const FilePlace& place, const std::string& file, std::vector<std::string> names,
                 const RankCoordinates& sizes, int rank) {
    RankCoordinates coordinates;
    coordinates.rank = rank;
    coordinates.world_size = sizes.world_size;
    coordinates.tp = {.rank = place.tp, .size = sizes.tp.size};
    coordinates.pp = {.rank = place.pp, .size = sizes.pp.size};
    coordinates.dp = {.rank = place.dp, .size = sizes.dp.size};
    coordinates.cp = {.rank = place.cp.value_or(0), .size = sizes.cp.size};
    std::vector<ParameterInfo> parameters(names.size());
    for (std::size_t id = 0; id < names.size(); ++id) {
      parameters[id].id = static_cast<std::int64_t>(id);
      parameters[id].name = std::move(names[id]);
    }
    try {
      return add(ParameterMap(std::move(coordinates), std::move(parameters)), file);
    } catch (const UsageError& error) {
      notes_.push_back(file + ": " + error.what());
      return false;
    }
  }

  void note_what_does_not_fit_together() {
    const auto& first = maps_.begin()->second;
    const auto& expected = first.map.coordinates();
    note_missing_ranks(expected.world_size);
    note_other_sizes(first);
    if (product_of_sizes(expected) != std::min<std::int64_t>(expected.world_size, kTooLarge)) {
      notes_.push_back(first.file + ": the sizes (" + describe_sizes(expected) +
                       ") do not multiply to the number of ranks");
    }
    std::map<std::string, std::vector<int>> ranks_of_run;
    for (const auto& [rank, named] : maps_) {
      if (!named.map.run_id().empty()) ranks_of_run[named.map.run_id()].push_back(rank);
    }
    if (ranks_of_run.size() > 1) {
      std::string runs;
      for (const auto& [run, ranks] : ranks_of_run) {
        append_item(runs, run + " (rank " + describe_ranks(ranks) + ")", "; ");
      }
      notes_.push_back("the files are from different runs: " + runs);
    }
  }

  /// Works on runs of ranks, because a file may claim two thousand million ranks.
  void note_missing_ranks(int world_size) {
    std::string missing;
    const auto add_gap = [&](std::int64_t begin, std::int64_t end) {
      if (begin >= end) return;
      append_item(missing, std::to_string(begin));
      if (end - begin > 1) missing.append("-").append(std::to_string(end - 1));
    };
    std::int64_t next = 0;
    for (const auto& [rank, named] : maps_) {
      add_gap(next, rank);
      next = std::int64_t{rank} + 1;
    }
    add_gap(next, world_size);
    if (missing.empty()) return;
    notes_.push_back("no readable map from these of the " + std::to_string(world_size) +
                     " ranks: " + missing);
  }

  void note_other_sizes(const NamedMap& first) {
    const auto& expected = first.map.coordinates();
    const auto is_other = [&](const auto& entry) {
      return !sizes_agree(expected, entry.second.map.coordinates());
    };
    const auto count = std::ranges::count_if(maps_, is_other);
    if (count == 0) return;
    const auto& other = std::ranges::find_if(maps_, is_other)->second;
    notes_.push_back(std::to_string(count) + " of " + std::to_string(maps_.size()) +
                     " files state other sizes than " + first.file + " (" +
                     describe_sizes(expected) + "), first " + other.file + " (" +
                     describe_sizes(other.map.coordinates()) +
                     "); they are from different runs or attempts");
  }

  /// tp x pp x dp x cp (expert parallelism divides dp x cp), capped at kTooLarge.
  static std::int64_t product_of_sizes(const RankCoordinates& sizes) {
    std::int64_t product = 1;
    for (const int size : {sizes.tp.size, sizes.pp.size, sizes.dp.size, sizes.cp.size}) {
      product = std::min(product * size, kTooLarge);
    }
    return product;
  }

  static bool sizes_agree(const RankCoordinates& a, const RankCoordinates& b) {
    return a.world_size == b.world_size && a.tp.size == b.tp.size && a.pp.size == b.pp.size &&
           a.dp.size == b.dp.size && a.cp.size == b.cp.size;
  }

  static std::string describe_sizes(const RankCoordinates& sizes) {
    return std::to_string(sizes.world_size) + " ranks: tp " + std::to_string(sizes.tp.size) +
           ", pp " + std::to_string(sizes.pp.size) + ", dp " + std::to_string(sizes.dp.size) +
           ", cp " + std::to_string(sizes.cp.size);
  }

  const fs::path& directory_;
  std::map<FilePlace, FilesOfOneRank> files_;
  std::map<int, NamedMap> maps_;  // by global rank
  std::vector<NamesOfPlace> without_manifest_;
  std::vector<std::string> notes_;
};

}  // namespace

MapDirectory read_map_directory(const std::filesystem::path& directory) {
  return DirectoryReader(directory).read();
}

}  // namespace nanlocator::inline map_room
