#include "console.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "files/printable.hpp"

namespace nanlocator::command {
namespace {

/// Counts code points: names of parameters contain hardly any wide or combining characters.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; }));
}

/// The first `count` code points.
std::string_view head(std::string_view text, std::size_t count) {
  std::size_t bytes = 0;
  while (bytes < text.size() && count > 0) {
    ++bytes;
    while (bytes < text.size() && (text[bytes] & 0xc0) == 0x80) ++bytes;
    --count;
  }
  return text.substr(0, bytes);
}

/// `text` with a part replaced by an ellipsis. Keeps more of the end, in which parameters differ.
std::string shorten(std::string_view text, std::size_t width) {
  const std::size_t points = width_of(text);
  if (points <= width) return std::string(text);
  const std::size_t front = (width - 1) / 3;
  const std::size_t back = width - 1 - front;
  const std::string_view rest = text.substr(head(text, points - back).size());
  return std::string(head(text, front)) + "…" + std::string(rest);
}

}  // namespace

bool has_colour() {
  const auto is_set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0';
  };
  const char* const terminal = std::getenv("TERM");
  const bool is_dumb = terminal == nullptr || std::string_view(terminal) == "dumb";
  return ::isatty(STDOUT_FILENO) != 0 && !is_dumb && !is_set("NO_COLOR");  // no-color.org
}

std::optional<std::size_t> terminal_width() {
  if (::isatty(STDOUT_FILENO) == 0) return std::nullopt;
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

std::string bold(const std::string& text) {
  return has_colour() ? "\x1b[1m" + text + "\x1b[0m" : text;
}

void print_json(const nlohmann::ordered_json& json) {
  using Json = nlohmann::ordered_json;
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

void print_notes(const std::vector<std::string>& notes) {
  for (const auto& note : notes) std::cerr << "note: " << printable(note) << '\n';
}

Table::Table(std::vector<Column> columns, std::size_t elastic)
    : columns_(std::move(columns)), elastic_(elastic) {}

void Table::add_row(const std::vector<std::string>& cells) {
  auto& row = rows_.emplace_back();
  for (const auto& cell : cells) row.push_back(printable(cell));
}

void Table::print(std::ostream& out, std::optional<std::size_t> width) const {
  constexpr std::string_view kIndent = "  ";
  std::vector<std::size_t> widths;
  std::size_t total = 0;
  for (std::size_t column = 0; column < columns_.size(); ++column) {
    std::size_t widest = width_of(columns_[column].title);
    for (const auto& row : rows_) widest = std::max(widest, width_of(row[column]));
    widths.push_back(widest);
    total += kIndent.size() + widest;
  }
  if (width && total > *width) {
    constexpr std::size_t kShortest = 36;  // contains layer number and kind
    const std::size_t excess = total - *width;
    auto& elastic = widths[elastic_];
    elastic = std::max(elastic > excess ? elastic - excess : 0, std::min(elastic, kShortest));
  }

  const auto print_row = [&](const auto& text_of) {
    std::string line;
    for (std::size_t column = 0; column < columns_.size(); ++column) {
      const std::string cell = shorten(text_of(column), widths[column]);
      const std::string padding(widths[column] - width_of(cell), ' ');
      const bool is_right = columns_[column].alignment == Alignment::right;
      line += kIndent;
      line += is_right ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    return line;
  };
  out << bold(print_row([&](std::size_t column) -> const auto& { return columns_[column].title; }))
      << '\n';
  for (const auto& row : rows_) {
    out << print_row([&](std::size_t column) -> const auto& { return row[column]; }) << '\n';
  }
}

}  // namespace nanlocator::command
