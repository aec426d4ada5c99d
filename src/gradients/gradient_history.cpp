#include "gradients/gradient_history.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace nanlocator::inline gradients_room {
namespace {

constexpr float kUnseen = std::numeric_limits<float>::quiet_NaN();

}  // namespace

float to_float(double number) noexcept {
  return static_cast<float>(std::min<double>(number, std::numeric_limits<float>::max()));
}

GradientHistory::GradientHistory(std::size_t parameters)
    : parameters_(parameters),
      iterations_(kHistorySteps),
      samples_(kHistorySteps * parameters, Sample{kUnseen, kUnseen, 0}) {}

bool GradientHistory::begin(Phase phase, std::int64_t iteration) {
  if (count_ > 0 && phase > phase_) return false;
  if (phase < phase_) count_ = 0;
  phase_ = phase;
  while (count_ > 0 && iterations_[place_of(count_ - 1)] >= iteration) --count_;
  if (count_ == kHistorySteps) {
    first_ = place_of(1);
    --count_;
  }
  const std::size_t place = place_of(count_++);
  iterations_[place] = iteration;
  std::fill_n(samples_.begin() + static_cast<std::ptrdiff_t>(place * parameters_), parameters_,
              Sample{kUnseen, kUnseen, 0});
  return true;
}

void GradientHistory::set(std::int64_t parameter, const TensorStats& stats,
                          double loss_scale) noexcept {
  auto& sample = samples_[place_of(count_ - 1) * parameters_ + static_cast<std::size_t>(parameter)];
  constexpr std::int64_t kMostCounted = std::numeric_limits<std::uint32_t>::max();
  sample.nonfinite = static_cast<std::uint32_t>(std::min(stats.nonfinite(), kMostCounted));
  if (!stats.has_finite()) {
    sample.norm = sample.absmax = kUnseen;
    return;
  }
  sample.norm = to_float(std::sqrt(stats.sum_of_squares) / loss_scale);
  sample.absmax = to_float(stats.absmax / loss_scale);
}

History GradientHistory::to_history(const ParameterMap& map) const {
  History history;
  history.phase = name_of(phase_);
  for (std::size_t row = 0; row < count_; ++row) {
    history.iterations.push_back(iterations_[place_of(row)]);
  }
  for (std::size_t parameter = 0; parameter < parameters_; ++parameter) {
    ParameterHistory samples;
    bool was_seen = false;
    for (std::size_t row = 0; row < count_; ++row) {
      const Sample& sample = at(row, parameter);
      samples.norm.push_back(sample.norm);
      samples.absmax.push_back(sample.absmax);
      samples.nonfinite.push_back(sample.nonfinite);
      was_seen = was_seen || sample.nonfinite > 0 || !std::isnan(sample.absmax);
    }
    if (!was_seen) continue;
    samples.id = static_cast<std::int64_t>(parameter);
    samples.name = map.at(samples.id).name;
    history.parameters.push_back(std::move(samples));
  }
  return history;
}

}  // namespace nanlocator::inline gradients_room
