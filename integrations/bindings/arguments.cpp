// Command lines of the Python programs, parsed with the tables of the C++ ones.
#include "command/arguments.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.hpp"
#include "command/check_checkpoint_options.hpp"
#include "command/doctor_options.hpp"
#include "command/netcheck_options.hpp"
#include "command/next_options.hpp"
#include "command/replay_options.hpp"
#include "files/printable.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using command::Arguments;
using command::Command;
using command::Option;
using command::Type;

/// Decodes as sys.argv does; words need not be UTF-8.
py::str text_of(const std::string& word) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(word.data(), static_cast<Py_ssize_t>(word.size())));
}

py::object value_of(const Arguments& given, const Option& option) {
  if (option.is_flag()) return py::bool_(given.has(option.name));
  if (option.type == Type::integer) return py::cast(given.integer(option.name));
  if (option.type == Type::number) return py::cast(given.number(option.name));
  if (option.most == 1) return text_of(given.text(option.name));
  py::list values;
  for (const auto& value : given.texts(option.name)) values.append(text_of(value));
  return values;
}

/// "--max-bytes" as max_bytes, "BUNDLE" as bundle, "SCRIPT.py" as script.
std::string attribute_of(const Option& option) {
  const std::string_view stem = option.name.substr(0, option.name.find('.'));
  std::string name(stem.substr(stem.find_first_not_of('-')));
  std::ranges::transform(name, name.begin(), [](unsigned char letter) {
    return letter == '-' ? '_' : static_cast<char>(std::tolower(letter));
  });
  return name;
}

[[noreturn]] void end_program(int code) {
  PyErr_SetObject(PyExc_SystemExit, py::int_(code).ptr());
  throw py::error_already_set();
}

/// The values, keyed by attribute_of. --help and wrong use end the program, as with argparse.
py::object parse_arguments(const Command& command,
                           const std::vector<std::filesystem::path>& words) {
  const std::string name = "nanlocator " + std::string(command.name);
  Arguments given;
  try {
    given = parse(command, name, std::vector<std::string>(words.begin(), words.end()));
  } catch (const UsageError& error) {
    py::print("nanlocator: " + printable(error.what()),
              "file"_a = py::module_::import("sys").attr("stderr"));
    end_program(2);
  }
  if (given.asks_for_help) {
    py::print(help_of(command, name, command::help_width()), "end"_a = "");
    end_program(0);
  }
  py::dict values;
  for (const Option& option : command.options) {
    values[py::str(attribute_of(option))] = value_of(given, option);
  }
  return py::module_::import("argparse").attr("Namespace")(**values);
}

}  // namespace

void bind_arguments(py::module_& m) {
  using Words = std::vector<std::filesystem::path>;
  m.def(
      "parse_check_checkpoint",
      [](const Words& words) { return parse_arguments(command::kCheckCheckpoint, words); },
      "words"_a);
  m.def(
      "parse_doctor", [](const Words& words) { return parse_arguments(command::kDoctor, words); },
      "words"_a);
  m.def(
      "parse_netcheck",
      [](const Words& words) { return parse_arguments(command::kNetcheck, words); }, "words"_a);
  m.def(
      "parse_next", [](const Words& words) { return parse_arguments(command::kNext, words); },
      "words"_a);
  m.def(
      "parse_replay", [](const Words& words) { return parse_arguments(command::kReplay, words); },
      "words"_a);
}

}  // namespace nanlocator
