// Runs the `nanlocator` command as from a shell.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "run_program.hpp"

namespace nanlocator::testing {

inline CommandResult run_command(std::vector<std::string> arguments,
                                 std::vector<std::string> environment = {},
                                 const std::string& stdout_path = {}) {
  return run_program(NANLOCATOR_COMMAND, std::move(arguments), std::move(environment), stdout_path);
}

/// The output of `--json`.
inline nlohmann::json json_of(const CommandResult& result) {
  return nlohmann::json::parse(result.out);
}

}  // namespace nanlocator::testing
