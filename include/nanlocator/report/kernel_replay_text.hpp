// A kernel's replay for people and for programs, where no verdict is around it.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline report_room {

/// As the evidence of a verdict has them; `kernel`: its name.
[[nodiscard]] std::vector<std::string> sentences_of(const KernelReplay& replay,
                                                    const std::string& kernel);
/// As a birth has it (docs/formats.md).
[[nodiscard]] std::string to_json(const KernelReplay& replay);

}  // namespace nanlocator::inline report_room
