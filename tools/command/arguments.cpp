#include "arguments.hpp"

#include <getopt.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

constexpr int kFirstOption = 256;  // getopt_long's codes below are characters
constexpr int kPositional = 1;

template <typename Number>
std::optional<Number> whole(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (text.empty() || error != std::errc() || stop != end) return std::nullopt;
  return number;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts(1);
  for (const char byte : text) {
    if (byte == separator) {
      parts.emplace_back();
    } else {
      parts.back() += byte;
    }
  }
  return parts;
}

std::string joined(const std::vector<std::string>& parts, std::string_view last_separator) {
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? last_separator : ", ";
    text += parts[i];
  }
  return text;
}

// --- errors -------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& name, const std::string& message) {
  throw UsageError(message + "; see " + name + " --help");
}

/// Letters to add, remove, replace or swap with their neighbour (optimal string alignment).
std::size_t edits_between(std::string_view from, std::string_view to) {
  std::vector<std::size_t> before;
  std::vector<std::size_t> last(to.size() + 1);
  std::iota(last.begin(), last.end(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::vector<std::size_t> row = {i + 1};
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t replaced = last[j] + (from[i] == to[j] ? 0 : 1);
      std::size_t edits = std::min({replaced, last[j + 1] + 1, row[j] + 1});
      if (i > 0 && j > 0 && from[i] == to[j - 1] && from[i - 1] == to[j]) {
        edits = std::min(edits, before[j - 1] + 1);
      }
      row.push_back(edits);
    }
    before = std::exchange(last, std::move(row));
  }
  return last.back();
}

void check_value(const std::string& name, const Option& option, const std::string& value) {
  const auto is_within = [&](const auto& number) {
    return number && *number >= option.low && *number <= option.high;
  };
  const auto choices = split(option.choices, '|');
  bool is_good = true;
  if (option.type == Type::integer) is_good = is_within(integer_from(value));
  if (option.type == Type::number) is_good = is_within(number_from(value));
  if (option.accepts != nullptr) is_good = option.accepts(value);
  if (!option.choices.empty()) is_good = std::ranges::count(choices, value) > 0;
  if (is_good) return;
  std::string expected(option.expected);
  if (option.type == Type::integer) {
    expected = "a whole number of at least " + std::to_string(static_cast<int>(option.low));
  } else if (!option.choices.empty()) {
    expected = joined(choices, " or ");
  }
  refuse(name, std::string(option.name) + (option.has_optional_value ? "=" : " ") + value +
                   ": expected " + expected + suggestion(value, choices));
}

// --- reading ------------------------------------------------------------------------------------

class Reader {
 public:
  explicit Reader(Arguments& arguments)
      : arguments_(arguments), rows_(arguments.command->options) {}

  void read() {
    std::vector<std::string> words = arguments_.words;
    words.insert(words.begin(), arguments_.name);
    for (auto word = words.begin() + 1; word != words.end() && *word != "--"; ++word) {
      if (!word->starts_with("--")) continue;
      std::replace(word->begin(), std::ranges::find(*word, '='), '_', '-');
    }
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    const auto long_options = take_names();
    ::optind = 0;  // restart
    ::opterr = 0;  // print nothing
    while (!arguments_.asks_for_help) {
      const auto at = static_cast<std::size_t>(std::max(::optind, 1));
      // "-": positional arguments are returned in order; ":": distinguishes a missing value from an
      // unknown option.
      const int code = ::getopt_long(static_cast<int>(words.size()), pointers.data(), "-:h",
                                     long_options.data(), nullptr);
      if (code == -1) break;
      if (code == kPositional) {
        take_word(::optarg);
      } else {
        take_option(code, words[at]);
      }
    }
    positionals_.insert(positionals_.end(), words.begin() + ::optind, words.end());
    if (!arguments_.asks_for_help) place_positionals();
  }

 private:
  std::vector<::option> take_names() {
    std::vector<::option> long_options = {{"help", no_argument, nullptr, 'h'}};
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      if (rows_[i].is_positional()) continue;
      const int takes = rows_[i].is_flag()            ? no_argument
                        : rows_[i].has_optional_value ? optional_argument
                                                      : required_argument;
      const int code = kFirstOption + static_cast<int>(i);
      long_options.push_back({rows_[i].name.data() + 2, takes, nullptr, code});
      names_.emplace_back(rows_[i].name);
    }
    long_options.push_back({});
    return long_options;
  }

  /// A positional argument, or another value of the preceding option.
  void take_word(const std::string& word) {
    const Option* const owner = std::exchange(before_, nullptr);
    if (owner != nullptr && owner->most > 1 && owner->accepts != nullptr && owner->accepts(word)) {
      arguments_.given.push_back({owner, word});
      before_ = owner;
      return;
    }
    if (owner != nullptr && owner->has_optional_value && !arguments_.given.back().value) {
      meant_ = " (did you mean " + std::string(owner->name) + "=" + word + "?)";
      if (owner->type == Type::number && number_from(word)) refuse_word(word);
    }
    positionals_.push_back(word);
  }

  void take_option(int code, const std::string& word) {
    const std::string typed = word.substr(0, word.find('='));
    arguments_.asks_for_help = code == 'h' && (typed == "-h" || typed == "--help");
    if (arguments_.asks_for_help) return;
    if (std::ranges::count(names_, typed) == 0) {
      refuse(arguments_.name, "unknown option " + typed + suggestion(typed, names_));
    }
    if (code == '?') refuse(arguments_.name, typed + " takes no value");
    before_ = &rows_[static_cast<std::size_t>((code == ':' ? ::optopt : code) - kFirstOption)];
    const std::optional<std::string> value =
        ::optarg == nullptr ? std::nullopt : std::optional<std::string>(::optarg);
    if (code == ':' || (value && word == typed && value->starts_with("--"))) {
      refuse(arguments_.name,
             typed + " needs a value: " + typed + " " + std::string(before_->value));
    }
    const bool is_left_out = !value || (before_->has_optional_value && value->empty());
    if (!is_left_out) check_value(arguments_.name, *before_, *value);
    arguments_.given.push_back({before_, is_left_out ? std::nullopt : value});
  }

  void place_positionals() {
    std::size_t next = 0;
    for (const Option& row : rows_) {
      if (!row.is_positional()) continue;
      int count = 0;
      for (; count < row.most && next < positionals_.size(); ++count) {
        arguments_.given.push_back({&row, positionals_[next++]});
      }
      if (count >= row.least) continue;
      const std::string times = row.least == 1 ? "" : " " + std::to_string(row.least) + " times";
      refuse(arguments_.name, std::string(row.name) + " is required" + times);
    }
    if (next < positionals_.size()) refuse_word(positionals_[next]);
  }

  [[noreturn]] void refuse_word(const std::string& word) {
    refuse(arguments_.name, "unexpected argument \"" + word + "\"" + meant_);
  }

  Arguments& arguments_;
  std::span<const Option> rows_;
  std::vector<std::string> names_ = {"--help"};  // of options
  std::vector<std::string> positionals_;
  const Option* before_ = nullptr;  // the option to which the previous word belongs
  std::string meant_;               // what a word after an optional value may have meant
};

// --- help ---------------------------------------------------------------------------------------

/// Appends `text` and a line break. The current line already has `indent` columns; further lines
/// are indented by as much.
void append_wrapped(std::string& out, std::string_view text, std::size_t indent,
                    std::size_t width) {
  std::size_t column = indent;
  for (const auto& word : split(text, ' ')) {
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  out += '\n';
}

/// A name and its explanation; a heading has none.
using Entry = std::pair<std::string, std::string>;

void append_entries(std::string& out, const std::vector<Entry>& entries, std::size_t width) {
  constexpr std::size_t kWidestLabel = 26;
  std::size_t column = 0;
  for (const auto& [label, text] : entries) {
    if (!text.empty() && label.size() <= kWidestLabel) column = std::max(column, label.size() + 4);
  }
  for (const auto& [label, text] : entries) {
    if (text.empty()) {
      out.append("\n").append(label).append(":\n");
      continue;
    }
    out += "  " + label;
    const bool is_wide = label.size() + 4 > column;
    out += is_wide ? '\n' + std::string(column, ' ') : std::string(column - 2 - label.size(), ' ');
    append_wrapped(out, text, column, width);
  }
}

/// "DIR", "--step N", "--html[=FILE]", "--rank N...".
Entry entry_of(const Option& option) {
  std::string label(option.name);
  const std::string value(option.choices.empty() ? option.value : option.choices);
  if (option.has_optional_value) {
    label += "[=" + value + "]";
  } else if (!value.empty()) {
    label += " " + value + (option.accepts != nullptr && option.most > 1 ? "..." : "");
  }
  std::string text(option.help);
  if (!option.default_value.empty()) text.append(" (default: ").append(option.default_value) += ')';
  return {label, text};
}

/// " DIR", " [DIR]", " BUNDLE BUNDLE", " BUNDLE...".
std::string usage_of(const Option& positional) {
  const std::string name(positional.name);
  if (positional.most == kMany) return " " + name + "...";
  std::string text;
  for (int i = 0; i < positional.most; ++i) {
    text += i < positional.least ? " " + name : " [" + name + "]";
  }
  return text;
}

}  // namespace

std::size_t help_width() {
  constexpr std::size_t kWidest = 100;
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kWidest;
  return std::min<std::size_t>(size.ws_col, kWidest);
}

std::string help_of(const Command& command, const std::string& name, std::size_t width) {
  std::string out = "Usage: " + name;
  std::vector<Entry> entries;
  if (!command.commands.empty()) entries.emplace_back("Commands", "");
  for (const Command& each : command.commands) entries.emplace_back(each.name, each.summary);
  if (std::ranges::any_of(command.options, &Option::is_positional))
    entries.emplace_back("Arguments", "");
  for (const Option& option : command.options) {
    if (!option.is_positional()) continue;
    out += usage_of(option);
    entries.push_back(entry_of(option));
  }
  entries.emplace_back("Options", "");
  entries.emplace_back("-h, --help", "Print this help");
  for (const Option& option : command.options) {
    if (option.is_positional()) continue;
    if (!option.heading.empty()) entries.emplace_back(option.heading, "");
    entries.push_back(entry_of(option));
  }
  out += command.commands.empty() ? " [options]\n\n" : " COMMAND\n\n";
  append_wrapped(out, command.summary, 0, width);
  append_entries(out, entries, width);
  if (!command.details.empty()) append_wrapped(out += '\n', command.details, 0, width);
  if (!command.exit_codes.empty()) {
    append_wrapped(out += '\n', "Exit codes: " + std::string(command.exit_codes) + ".", 0, width);
  }
  out += "\nExamples:\n";
  for (const auto& line : split(command.examples, '\n')) out += "  " + line + '\n';
  return out;
}

std::optional<std::int64_t> integer_from(std::string_view text) {
  return whole<std::int64_t>(text);
}

std::optional<double> number_from(std::string_view text) {
  return whole<double>(text);
}

bool Arguments::has(std::string_view option) const {
  if (std::ranges::count(command->options, option, &Option::name) == 0) {
    throw std::logic_error(name + " has no " + std::string(option));
  }
  return std::ranges::any_of(given, [&](const Given& each) { return each.option->name == option; });
}

std::vector<std::string> Arguments::texts(std::string_view option) const {
  std::vector<std::string> values;
  if (!has(option)) return values;
  for (const auto& [row, value] : given) {
    if (row->name == option && value) values.push_back(*value);
  }
  return values;
}

std::string Arguments::text(std::string_view option) const {
  const auto values = texts(option);
  if (!values.empty()) return values.back();
  return std::string(std::ranges::find(command->options, option, &Option::name)->default_value);
}

std::optional<std::int64_t> Arguments::integer(std::string_view option) const {
  return integer_from(text(option));
}

std::optional<double> Arguments::number(std::string_view option) const {
  return number_from(text(option));
}

Arguments parse(const Command& root, std::string name, std::span<const std::string> words) {
  Arguments arguments;
  arguments.command = &root;
  arguments.name = std::move(name);
  while (!arguments.command->commands.empty()) {
    const auto below = arguments.command->commands;
    std::vector<std::string> names;
    for (const Command& each : below) names.emplace_back(each.name);
    if (words.empty()) {
      refuse(arguments.name, "a command is required: " + joined(names, " or "));
    }
    const std::string& word = words.front();
    if (word == "--help" || word == "-h") {
      arguments.asks_for_help = true;
      return arguments;
    }
    const auto found = std::ranges::find(below, word, &Command::name);
    if (found == below.end()) {
      const std::size_t dashes = std::min(word.find_first_not_of('-'), word.size());
      refuse(arguments.name,
             "unknown command \"" + word + "\"" + suggestion(word.substr(dashes), names));
    }
    arguments.command = &*found;
    arguments.name += " " + word;
    words = words.subspan(1);
  }
  arguments.words.assign(words.begin(), words.end());
  Reader(arguments).read();
  return arguments;
}

std::string suggestion(std::string_view typed, const std::vector<std::string>& names) {
  std::size_t fewest = (typed.size() + 2) / 3 + 1;  // at most a third of its letters may differ
  std::string nearest;
  for (const auto& name : names) {
    const bool is_abbreviation = !typed.empty() && name.starts_with(typed);
    const std::size_t edits = is_abbreviation ? 1 : edits_between(typed, name);
    if (edits < fewest) nearest = name;
    fewest = std::min(fewest, edits);
  }
  return nearest.empty() ? "" : " (did you mean " + nearest + "?)";
}

}  // namespace nanlocator::command
