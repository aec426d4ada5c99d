// verdict.json: facts beside the sentences that are made of them (docs/formats.md).
#pragma once

#include <string>
#include <string_view>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline report_room {

/// Version 2. Sentences ("evidence", "action", "refuted_by", "notes") stand under the keys that
/// they had in version 1, `evidence[i]` being that of `facts[i]`.
[[nodiscard]] std::string to_json(const Verdict& verdict);

/// Reads versions 1 and 2. Of version 2 the facts count and the sentences are made again; the
/// sentences of version 1 become facts of kind `stated`. Throws FormatError; `source` is what the
/// message calls the text.
[[nodiscard]] Verdict verdict_from_json(std::string_view text, const std::string& source);

}  // namespace nanlocator::inline report_room
