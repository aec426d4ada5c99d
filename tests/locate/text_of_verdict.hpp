// The text of a verdict in a failed expectation.
#pragma once

#include <string>

#include "nanlocator/locate/locate.hpp"

namespace nanlocator {

inline std::string text_of(const Verdict& verdict) {
  std::string text = "\nverdict " + std::string(name_of(verdict.status));
  for (const Origin& origin : verdict.origins) {
    text += "\n  " + std::string(name_of(origin.phase)) + " " + std::string(name_of(origin.cause)) +
            " " + std::string(name_of(origin.place_confidence)) + " mb " +
            std::to_string(origin.microbatch.value_or(-1)) + " " + origin.module + " " +
            origin.parameter + " ranks " + describe_ranks(origin.candidates);
    for (const Fact& fact : origin.facts) text += "\n    " + std::string(name_of(fact.kind));
  }
  return text + "\n";
}

}  // namespace nanlocator
