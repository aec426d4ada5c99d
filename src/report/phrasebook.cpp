#include "report/phrasebook.hpp"

#include <algorithm>
#include <utility>

#include "nanlocator/error.hpp"
#include "report/assets.hpp"

namespace nanlocator::inline report_room {
namespace {

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

struct Phrasebook {
  std::vector<std::string> codes;
  std::map<std::pair<std::string_view, std::string_view>, std::string_view> phrases;

  explicit Phrasebook(std::string_view text) {
    std::string_view code;
    while (!text.empty()) {
      const std::string_view line = trimmed(text.substr(0, text.find('\n')));
      text.remove_prefix(std::min(text.size(), text.find('\n') + 1));
      if (line.empty() || line.front() == '#') continue;
      if (line.front() == '[') {
        code = line.substr(1, line.find(']') - 1);
        codes.emplace_back(code);
        continue;
      }
      const std::size_t equals = line.find('=');
      phrases[{code, trimmed(line.substr(0, equals))}] = trimmed(line.substr(equals + 1));
    }
  }
};

const Phrasebook& book() {
  static const Phrasebook read(assets::kPhrasebook);
  return read;
}

}  // namespace

std::string_view phrase(std::string_view code, std::string_view field) {
  const auto found = book().phrases.find({code, field});
  if (found != book().phrases.end()) return found->second;
  throw UsageError("there is no code " + std::string(code) + " with a phrase " +
                   std::string(field));
}

std::string filled_phrase(std::string_view code, std::string_view field, const Fillings& fillings) {
  std::string text;
  for (std::string_view rest = phrase(code, field); !rest.empty();) {
    const std::size_t open = rest.find('{');
    const std::size_t close = open == rest.npos ? rest.npos : rest.find('}', open);
    text += rest.substr(0, close == rest.npos ? rest.npos : open);
    if (close == rest.npos) break;
    const auto filling = fillings.find(rest.substr(open + 1, close - open - 1));
    text += filling == fillings.end() ? rest.substr(open, close - open + 1) : filling->second;
    rest.remove_prefix(close + 1);
  }
  return text;
}

const std::vector<std::string>& codes() {
  return book().codes;
}

}  // namespace nanlocator::inline report_room
