// A kernel's replay as sentences and as JSON, outside a verdict.
#pragma once

#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline report_room {

/// The sentences that a verdict's evidence has for this replay of the kernel named `kernel`.
[[nodiscard]] std::vector<std::string> sentences_of(const KernelReplay& replay,
                                                    const std::string& kernel);
/// The JSON that a birth has for it (docs/formats.md).
[[nodiscard]] std::string to_json(const KernelReplay& replay);

}  // namespace nanlocator::inline report_room
