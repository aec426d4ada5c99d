// Of a weight that was bad before the step: what its copies on other ranks are like.
#pragma once

#include <vector>

#include "locate/findings.hpp"

namespace nanlocator {

/// Adds to each origin that is a bad weight whether the copies (data-parallel ones, tensor-parallel
/// duplicates, tied embeddings) are clean, bad or not scanned; nothing where that is known already.
void judge_copies(const Findings& findings, std::vector<Origin>& origins);

}  // namespace nanlocator
