// The latest steps of every gradient or weight: a ring that is filled without waiting and read at a
// finding.
//
// 12 bytes per parameter and step, allocated once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline gradients_room {

/// Clamps numbers beyond a float's range, which sums of squares in fp64 reach, to its largest.
[[nodiscard]] float to_float(double number) noexcept;

class GradientHistory {
 public:
  /// `parameters`: an upper bound of the ids.
  explicit GradientHistory(std::size_t parameters);

  /// Adds an empty row for `iteration`, replacing that of kHistorySteps before. Also removes rows
  /// of this and later iterations (the step is executed again), and rows of a later phase than
  /// `phase`, that of the gradients. False, without a row, if the rows have an earlier phase: the
  /// numbers would not compare.
  bool begin(Phase phase, std::int64_t iteration);
  /// In the latest row. `loss_scale`: the factor of the gradient.
  void set(std::int64_t parameter, const TensorStats& stats, double loss_scale) noexcept;

  /// Without run and coordinates, and without parameters that were never seen.
  [[nodiscard]] History to_history(const ParameterMap& map) const;

 private:
  struct Sample {
    float norm;
    float absmax;
    std::uint32_t nonfinite;
  };

  /// Row 0 is the oldest.
  [[nodiscard]] std::size_t place_of(std::size_t row) const noexcept {
    return (first_ + row) % kHistorySteps;
  }
  [[nodiscard]] const Sample& at(std::size_t row, std::size_t parameter) const noexcept {
    return samples_[place_of(row) * parameters_ + parameter];
  }

  std::size_t parameters_;
  Phase phase_ = Phase::grad_norm;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::vector<std::int64_t> iterations_;  // by position in the ring
  std::vector<Sample> samples_;           // one position after another
};

}  // namespace nanlocator::inline gradients_room
