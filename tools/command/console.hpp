// Output of the subcommands: tables that fit a terminal, colours only on a terminal, and nothing
// that lets a file's content control the terminal.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace nanlocator::command {

/// The columns of the terminal on stdout; empty if stdout is a pipe or a file.
[[nodiscard]] std::optional<std::size_t> terminal_width();

/// True if stdout is a terminal with colours and NO_COLOR is not set.
[[nodiscard]] bool has_colour();

/// `text` in bold if colours are available.
[[nodiscard]] std::string bold(const std::string& text);

/// Columns of wrapped text if stdout is not a terminal: a job log.
inline constexpr std::size_t kLogWidth = 110;

/// Indented, on stdout. Paths and patterns come from the command line and need not be UTF-8.
void print_json(const nlohmann::ordered_json& json);

/// One line on stderr: "note: ...".
void print_notes(const std::vector<std::string>& notes);

enum class Alignment { left, right };

struct Column {
  std::string title;
  Alignment alignment = Alignment::left;
};

/// Rows under titles, columns as wide as their widest cell. On a terminal that is too narrow, cells
/// of the column `elastic` lose their middle; in a pipe nothing is cut.
class Table {
 public:
  Table(std::vector<Column> columns, std::size_t elastic);

  /// As many cells as columns; makes them printable.
  void add_row(const std::vector<std::string>& cells);
  void print(std::ostream& out, std::optional<std::size_t> width = terminal_width()) const;

 private:
  std::vector<Column> columns_;
  std::size_t elastic_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace nanlocator::command
