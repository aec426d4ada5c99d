// An operand of which nothing is known but its element at the first bad one.
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
