// Derives what is wrong with an operator's result from the operator and its operands at the first
// bad element.
#pragma once

#include "nanlocator/record/birth.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// Detail::none if those operands were not recorded or explain nothing.
[[nodiscard]] Detail detail_of(const Birth& birth);

}  // namespace nanlocator::inline locate_room
