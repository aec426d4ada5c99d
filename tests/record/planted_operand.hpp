// An operand of which only the element at the first bad one is known.
#pragma once

#include <string>
#include <utility>

#include "nanlocator/record/birth.hpp"

namespace nanlocator {

inline Operand operand_at_first_bad(std::string name, double value) {
  Operand operand;
  operand.name = std::move(name);
  operand.at_first_bad = value;
  return operand;
}

}  // namespace nanlocator
