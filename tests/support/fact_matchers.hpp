// Matchers for a verdict's facts, by kind and arguments.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "nanlocator/verdict/fact.hpp"

namespace nanlocator {

/// EXPECT_THAT(origin.facts, HasFact(FactKind::same_in_microbatches, Field(&Fact::count, 3)))
template <typename... Arguments>
auto HasFact(FactKind kind, Arguments... arguments) {
  return ::testing::Contains(::testing::AllOf(::testing::Field(&Fact::kind, kind), arguments...));
}

inline auto OnRanks(std::vector<int> ranks) {
  return ::testing::Field(&Fact::ranks, ranks);
}
inline auto Counts(std::int64_t count) {
  return ::testing::Field(&Fact::count, ::testing::Optional(count));
}
/// To six digits, because maxima are kept as float.
inline auto Near(double value) {
  return ::testing::Optional(::testing::DoubleNear(value, 1e-6 * value));
}

}  // namespace nanlocator
