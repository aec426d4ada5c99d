// Text from other programs made safe for the page: in HTML and in its JSON element.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace nanlocator::inline report_room {

/// Printable (printable.hpp) and at most `most_bytes`, cut between characters and ending in "...".
[[nodiscard]] std::string page_text(std::string_view raw, std::size_t most_bytes = 600);

/// `text` as the content of an element or of a quoted attribute.
[[nodiscard]] std::string html_escaped(std::string_view text);

/// JSON for a script element: without '<', '>', '&' and the line separators of JavaScript, so that
/// no text in it can end the element.
[[nodiscard]] std::string script_json(const nlohmann::ordered_json& json);

}  // namespace nanlocator::inline report_room
