// Parameter id -> name, shape and placement, for one rank; and its two files.
//
// Id = position in the optimizer's concatenated parameter groups as they are built over the whole
// model part of this rank (the published Megatron recipe), before a distributed optimizer shards
// them. Name = the unwrapped model's `named_parameters()` name with global layer and expert
// numbers. See docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/map/rank_list.hpp"

namespace nanlocator::inline map_room {

/// The elements [begin, end) of a flattened parameter or, for a shard of columns, of each of its
/// rows.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Elements of a row. 0: no rows; the range applies once.
  std::int64_t row = 0;

  [[nodiscard]] bool contains(std::int64_t element) const noexcept {
    const auto place = row > 0 ? element % row : element;
    return element >= 0 && begin <= place && place < end;
  }
  /// The index in the flattened parameter of the shard's element `index`. The range must not be
  /// empty.
  [[nodiscard]] std::int64_t element_at(std::int64_t index) const noexcept {
    return row > 0 ? index / (end - begin) * row + begin + index % (end - begin) : begin + index;
  }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

struct ParameterInfo {
  std::int64_t id = 0;
  std::string name;      // unique across pipeline stages and chunks
  std::string raw_name;  // from named_parameters() of the wrapped chunk
  std::vector<std::int64_t> shape;
  /// "bfloat16", see DType; the parameter's, not the gradient's. Empty: only id and name are known,
  /// and all other members have their defaults (the map was read from the recipe's file alone).
  std::string dtype;
  std::optional<int> layer;                   // global, counted from 0
  int chunk = 0;                              // virtual-pipeline model chunk
  std::optional<int> bucket;                  // gradient bucket, if there are buckets
  std::optional<std::int64_t> bucket_offset;  // first element within the bucket's buffer
  /// The part whose reduced gradient and optimizer state this rank owns (distributed optimizer).
  /// Empty optional: all of it; begin == end: none of it.
  std::optional<ElementRange> shard;
  /// The ranks that shard the weight itself and gather it for each use (FSDP, ZeRO-3). Empty: each
  /// rank has the whole weight.
  RankList shard_group;
  /// In which the ranks' gradients are summed, where that is another one: "float16"; else "".
  std::string reduce_dtype;
  /// The placement of a DTensor in each dimension of its mesh: "dp: Shard(0)".
  std::vector<std::string> placements;
  bool is_expert = false;
  bool is_shared = false;  // one tensor under several names on this rank
  bool is_tp_duplicate =
      false;             // replicated over tensor-parallel ranks (left out of the norm on tp > 0)
  bool is_tied = false;  // shared with another pipeline stage (tied embeddings)
  /// A healthy batch may leave it without a gradient, or touch only some rows (embeddings, experts,
  /// routers), so a clean gradient here proves nothing about what flowed through it.
  bool may_be_untouched = false;

  /// The product of the shape's sizes: 1 for a scalar, at most 2^63 - 1.
  [[nodiscard]] std::int64_t numel() const noexcept;

  friend bool operator==(const ParameterInfo&, const ParameterInfo&) = default;
};

/// The parameters of one rank in id order: `parameters()[i].id == i`.
class ParameterMap {
 public:
  ParameterMap() = default;
  /// Throws UsageError if ids are not 0..n-1 in order, a name is empty or repeated, a rank, a size,
  /// a shape or a range is out of bounds, or a string is not UTF-8.
  ParameterMap(RankCoordinates coordinates, std::vector<ParameterInfo> parameters,
               std::string run_id = {});

  [[nodiscard]] const RankCoordinates& coordinates() const noexcept { return coordinates_; }
  [[nodiscard]] const std::vector<ParameterInfo>& parameters() const noexcept {
    return parameters_;
  }
  [[nodiscard]] const std::string& run_id() const noexcept { return run_id_; }
  [[nodiscard]] std::size_t size() const noexcept { return parameters_.size(); }
  /// Throws UsageError for an unknown id.
  [[nodiscard]] const ParameterInfo& at(std::int64_t id) const;
  /// nullptr if no parameter has that name. The pointer is valid while this map lives.
  [[nodiscard]] const ParameterInfo* find(std::string_view name) const noexcept;

  /// `{"0": "decoder...weight", "1": ...}`, byte for byte what Python's json.dumps writes (ASCII
  /// only, no newline at the end).
  [[nodiscard]] std::string to_id_name_json() const;
  /// The manifest (version 1), one parameter per line.
  [[nodiscard]] std::string to_manifest_json() const;
  /// Reads a manifest back; errors call the text `source`. Throws FormatError.
  [[nodiscard]] static ParameterMap from_manifest_json(std::string_view text,
                                                       const std::string& source);

  /// Writes param_id_name_map_*.json and param_manifest_*.json atomically. Throws IoError.
  void write(const std::filesystem::path& directory) const;

 private:
  RankCoordinates coordinates_;
  std::vector<ParameterInfo> parameters_;
  std::vector<std::size_t> by_name_;  // positions in parameters_, ordered by name
  std::string run_id_;
};

/// All manifests of a run directory, and problems with the others. A rank that left only the
/// recipe's param_id_name_map file has a map with ids and names alone; its coordinates come from
/// the file's name and its global rank is inferred in Megatron's default order (tp, cp, dp, pp).
struct MapDirectory {
  std::vector<ParameterMap> maps;  // ordered by global rank
  std::vector<std::string> notes;  // missing ranks, mixed runs, unreadable files: one sentence each
};

/// Reads `directory`. Throws IoError if it cannot be read, FormatError if it holds no map at all; a
/// single bad file only gives a note.
[[nodiscard]] MapDirectory read_map_directory(const std::filesystem::path& directory);

}  // namespace nanlocator::inline map_room
