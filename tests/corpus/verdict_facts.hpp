// What a verdict says, without a sentence: what tests/corpus/facts holds of each case.
#pragma once

#include <nlohmann/json.hpp>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::corpus {

/// What is empty or not known is left out. Facts are their kinds alone, sorted; of lists of names
/// that the ledgers give (parameters, notes, states) only the length is kept.
[[nodiscard]] nlohmann::ordered_json facts_of(const Verdict& verdict);

}  // namespace nanlocator::corpus
