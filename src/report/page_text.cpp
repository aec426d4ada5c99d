#include "report/page_text.hpp"

#include <algorithm>

#include "files/printable.hpp"

namespace nanlocator::inline report_room {

std::string page_text(std::string_view raw, std::size_t most_bytes) {
  // Escapes only lengthen the text, by at most six bytes for one; bytes beyond these would be cut
  // anyway.
  std::string text = printable(raw.substr(0, std::min(raw.size(), most_bytes + 4)));
  if (raw.size() <= most_bytes && text.size() <= most_bytes) return text;
  std::size_t end = std::min(text.size(), most_bytes - 3);
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

std::string html_escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string script_json(const nlohmann::ordered_json& json) {
  const std::string plain =
      json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::string out;
  out.reserve(plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const std::string_view rest = std::string_view(plain).substr(i);
    if (rest.starts_with("\xe2\x80\xa8") || rest.starts_with("\xe2\x80\xa9")) {
      out += rest[2] == '\xa8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else if (rest[0] == '<') {
      out += "\\u003c";
    } else if (rest[0] == '>') {
      out += "\\u003e";
    } else if (rest[0] == '&') {
      out += "\\u0026";
    } else {
      out += rest[0];
    }
  }
  return out;
}

}  // namespace nanlocator::inline report_room
