// The words of the block and of `nanlocator explain`, which are in phrasebook.txt: one section for
// each code. Threads: read once, then constant.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace nanlocator::inline report_room {

using Fillings = std::map<std::string_view, std::string>;

/// The sentence `field` ("what") of `code`'s section. Throws UsageError for one that is not there.
[[nodiscard]] std::string_view phrase(std::string_view code, std::string_view field);
/// The phrase with its names in braces filled in; a name without a filling stays as it is.
[[nodiscard]] std::string filled_phrase(std::string_view code, std::string_view field,
                                        const Fillings& fillings);
/// In the order of the file.
[[nodiscard]] const std::vector<std::string>& codes();

}  // namespace nanlocator::inline report_room
