// A place in a pipelined step: of a computation or of a crossing between ranks.
#pragma once

#include <compare>
#include <optional>
#include <string>
#include <utility>

#include "nanlocator/record/sighting.hpp"

namespace nanlocator::pipeline {

struct Block {
  int layer = 0;  // in the stage
  bool is_mlp = false;
  friend auto operator<=>(const Block&, const Block&) = default;
};

struct Place {
  Phase phase = Phase::forward;
  int microbatch = 0;
  int stage = 0;
  std::optional<Block> block = std::nullopt;  // empty: before or after the stage's blocks
  std::string module = {};

  [[nodiscard]] bool is_backward() const { return phase == Phase::backward; }
  [[nodiscard]] Place in(const Block& its_block, std::string its_module) const {
    return {phase, microbatch, stage, its_block, std::move(its_module)};
  }
  [[nodiscard]] Place in(std::string its_module) const {
    return {phase, microbatch, stage, std::nullopt, std::move(its_module)};
  }
};

}  // namespace nanlocator::pipeline
