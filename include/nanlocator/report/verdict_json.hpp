// verdict.json: facts, and the sentences made from them (docs/formats.md).
#pragma once

#include <string>
#include <string_view>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// Writes version 3. Sentences ("evidence", "action", "refuted_by", "notes") keep their keys of
/// version 1; `evidence[i]` is the sentence of `facts[i]`.
[[nodiscard]] std::string to_json(const Verdict& verdict);

/// Reads versions 1 to 3. The facts count, and the sentences are made again from them; versions 1
/// and 2 have no decision, which is made from their facts; in version 1 each sentence becomes a
/// fact of kind `stated`. Throws FormatError, whose message calls the text `source`.
[[nodiscard]] Verdict verdict_from_json(std::string_view text, const std::string& source);

}  // namespace nanlocator::inline report_room
