// The position of a process in the parallel layout, and its machine.
#pragma once

#include <string>
#include <vector>

namespace nanlocator::inline map_room {

/// One axis of the parallel layout: this process's rank on it and its number of ranks.
struct AxisCoordinate {
  int rank = 0;
  int size = 1;
  friend bool operator==(const AxisCoordinate&, const AxisCoordinate&) = default;
};

/// The coordinates of one process. `dp` does not count context-parallel ranks (Megatron's
/// get_data_parallel_rank(with_context_parallel=False)); expert parallelism divides dp x cp.
struct RankCoordinates {
  int rank = 0;  // global rank
  int world_size = 1;
  AxisCoordinate tp;  // tensor parallel
  AxisCoordinate pp;  // pipeline parallel
  AxisCoordinate dp;  // data parallel
  AxisCoordinate cp;  // context parallel
  AxisCoordinate ep;  // expert parallel
  std::string host;   // host name
  int local_rank = 0;
  std::string device;  // "cpu", or on CUDA "cuda:3 GPU-6f2e... 0000:1b:00.0" (UUID and PCI address)

  /// The suffix of this rank's files: "tp1pp0dp1", followed by "cp{cp}" if cp.size > 1.
  [[nodiscard]] std::string file_suffix() const;
  /// Readable: "rank 5 (tp1 pp0 dp1, host a17, cuda:3 ...)"; without axes of size 1.
  [[nodiscard]] std::string describe() const;
  /// "tp1 pp0 dp0": the axes that have more than one rank.
  [[nodiscard]] std::string describe_axes() const;

  friend bool operator==(const RankCoordinates&, const RankCoordinates&) = default;
};

/// The coordinates of this process in a plain data-parallel job: host name, local rank from the
/// environment variable LOCAL_RANK (torchrun's; 0 if unset), device "cpu". Throws UsageError for a
/// rank outside 0..world_size-1 or an invalid LOCAL_RANK.
[[nodiscard]] RankCoordinates data_parallel_coordinates(int rank, int world_size);

/// "0-3, 7": ascending, without repetitions, runs folded.
[[nodiscard]] std::string describe_ranks(std::vector<int> ranks);
/// "rank 7", "ranks 0-3, 7".
[[nodiscard]] std::string ranks_text(const std::vector<int>& ranks);

}  // namespace nanlocator::inline map_room
