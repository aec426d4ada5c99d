// A verdict without its sentences, as tests/corpus/facts stores it for each case.
#pragma once

#include <nlohmann/json.hpp>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::corpus {

/// Leaves out empty and unknown values. Facts are reduced to their kinds, sorted; lists of names
/// from the ledgers (parameters, notes, states) to their lengths.
[[nodiscard]] nlohmann::ordered_json facts_of(const Verdict& verdict);

}  // namespace nanlocator::corpus
