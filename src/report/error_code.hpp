// The stable code of an origin: the name of its section in phrasebook.txt.
#pragma once

#include <string>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

[[nodiscard]] std::string error_code_of(const Origin& origin);

}  // namespace nanlocator::inline report_room
