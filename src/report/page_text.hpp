// Makes text from other programs safe for the page's HTML and for its JSON element.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace nanlocator::inline report_room {

/// Printable (printable.hpp) and at most `most_bytes`, cut between characters and ending in "...".
[[nodiscard]] std::string page_text(std::string_view raw, std::size_t most_bytes = 600);

/// `text` escaped for the content of an element or for a quoted attribute.
[[nodiscard]] std::string html_escaped(std::string_view text);

/// JSON for a script element: '<', '>', '&' and JavaScript's line separators are escaped, so that
/// no text can end the element.
[[nodiscard]] std::string script_json(const nlohmann::ordered_json& json);

}  // namespace nanlocator::inline report_room
