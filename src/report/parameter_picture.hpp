// The model's parameters in backward order with their state in each phase: the page's list.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "report/rank_picture.hpp"

namespace nanlocator::inline report_room {

/// The phases in which parameters or their gradients are scanned.
inline constexpr std::array kParameterPhases = {Phase::params_before, Phase::grad_local,
                                                Phase::grad_reduced, Phase::grad_norm,
                                                Phase::params_after};

struct PageParameter {
  std::string name;
  int stage = 0;  // pipeline rank
  int chunk = 0;
  std::vector<std::int64_t> shape;                 // on the lowest rank that has it
  std::array<int, kParameterPhases.size()> bad{};  // number of ranks
  std::array<int, kParameterPhases.size()>
      covered{};  // number of ranks that scanned it, bad ones included
  [[nodiscard]] bool is_bad() const {
    for (const int ranks : bad) {
      if (ranks > 0) return true;
    }
    return false;
  }
};

struct ParameterPicture {
  std::vector<PageParameter> parameters;  // of the whole model, in backward order
  bool is_order_observed = true;          // on every rank
};

[[nodiscard]] ParameterPicture picture_parameters(std::span<const PageRank> ranks);

}  // namespace nanlocator::inline report_room
