// The latest steps of every gradient, or weight: a ring of facts, filled without a wait and read at
// a finding.
//
// 12 bytes a parameter and step, allocated once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline gradients_room {

/// What no float can hold is the largest one: sums of squares in fp64 reach beyond.
[[nodiscard]] float to_float(double number) noexcept;

class GradientHistory {
 public:
  /// `parameters`: ids are below it.
  explicit GradientHistory(std::size_t parameters);

  /// A row for `iteration`, of which nothing was seen yet; that of kHistorySteps before goes. Rows
  /// of this iteration and later ones go too: the step is executed again. The gradients are those
  /// of `phase`; where that comes before the phase of the rows so far, these go, too. False, and no
  /// row, where it comes after: the numbers would not compare.
  bool begin(Phase phase, std::int64_t iteration);
  /// Of the latest row. `loss_scale`: what the gradient was multiplied by.
  void set(std::int64_t parameter, const TensorStats& stats, double loss_scale) noexcept;

  /// Without run and coordinates. Without parameters that were never seen.
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
  std::vector<std::int64_t> iterations_;  // by place
  std::vector<Sample> samples_;           // place by place
};

}  // namespace nanlocator::inline gradients_room
