// The command line of `nanlocator`, `nanlocator-replay` and their counterparts in Python. Each
// command has one table of options, for getopt_long and for --help.
//
// - Options may come before and after positional arguments; "--" ends them.
// - A value follows its option, or comes after "=": --step 3, --step=3. An optional value needs the
//   "=", so that `--html DIR` names the folder. So does a value that begins with "--", because more
//   often the value was forgotten.
// - Names must be complete. getopt_long would accept `--st` for --step, but only until another
//   option begins with it, which would break scripts. "_" may replace "-", as in torchrun.
// - If an option is given twice, the last one counts, unless it may be repeated.
//
// getopt_long keeps its state in globals: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nanlocator::command {

enum class Type { text, integer, number };

inline constexpr int kMany = 1 << 20;
inline constexpr double kLargestStep = 9e18;  // of 64 bits; other integers have 32

/// A row of a table: a positional argument (its name has no dashes), an option with a value, or a
/// flag.
struct Option {
  std::string_view name;        // "--step", "DIR"
  std::string_view value = {};  // its name in --help: "N"
  Type type = Type::text;
  /// Used if the option, or its optional value, is not given.
  std::string_view default_value = {};
  bool has_optional_value = false;
  int least = 0;  // how many of a positional argument are required; options are never required
  int most = 1;   // more: the option may be repeated
  double low = 0;
  double high = 2147483647;
  std::string_view choices = {};  // "absmax|norm": the only valid values
  /// Whether a value is valid. A repeated option also takes the following valid words: --rank 5 6.
  bool (*accepts)(std::string_view) = nullptr;
  std::string_view expected = {};  // "global ranks such as 3, 4-7 or 1,2", for messages
  std::string_view help = {};
  std::string_view heading = {};  // printed above this row in --help

  [[nodiscard]] constexpr bool is_positional() const { return !name.starts_with('-'); }
  [[nodiscard]] constexpr bool is_flag() const {
    return !is_positional() && value.empty() && choices.empty();
  }
};

inline constexpr Option kJsonOption = {.name = "--json", .help = "Print JSON (docs/formats.md)"};

struct Arguments;

/// A command that runs, or has commands below it.
struct Command {
  std::string_view name;          // "show"
  std::string_view summary = {};  // a sentence, without its full stop
  std::span<const Option> options = {};
  std::string_view details = {};  // more sentences
  std::string_view exit_codes = {};
  std::string_view examples = {};  // lines
  int (*run)(const Arguments&) = nullptr;
  const char* python_module = nullptr;  // that is the command, in place of `run`
  std::span<const Command> commands = {};
};

/// Command-line arguments, checked against the table. The accessors throw std::logic_error for a
/// name that is not in the table.
struct Arguments {
  struct Given {
    const Option* option;
    std::optional<std::string> value;
  };

  const Command* command = nullptr;
  std::string name;                // "nanlocator map show"
  std::vector<std::string> words;  // after the name
  std::vector<Given> given;
  bool asks_for_help = false;

  [[nodiscard]] bool has(std::string_view option) const;
  /// The last value, else the default, else "".
  [[nodiscard]] std::string text(std::string_view option) const;
  [[nodiscard]] std::vector<std::string> texts(std::string_view option) const;
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view option) const;
  [[nodiscard]] std::optional<double> number(std::string_view option) const;
};

/// Finds the command below `root` that `words` name, and reads its arguments. `name` is what a user
/// types for `root`. Throws UsageError, whose text ends with "; see NAME --help".
[[nodiscard]] Arguments parse(const Command& root, std::string name,
                              std::span<const std::string> words);

/// The columns of the terminal on stdout, at most 100.
[[nodiscard]] std::size_t help_width();
/// --help, in lines of `width` columns.
[[nodiscard]] std::string help_of(const Command& command, const std::string& name,
                                  std::size_t width);

/// " (did you mean --list?)"; "" if no name is close.
[[nodiscard]] std::string suggestion(std::string_view typed, const std::vector<std::string>& names);

/// The number that all of `text` spells.
[[nodiscard]] std::optional<std::int64_t> integer_from(std::string_view text);
[[nodiscard]] std::optional<double> number_from(std::string_view text);

}  // namespace nanlocator::command
