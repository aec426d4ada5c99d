// `nanlocator version`
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.hpp"

namespace nanlocator::command {

void add_version_command(CLI::App& app, Action& action) {
  CLI::App* const version = app.add_subcommand("version", "Print the version of this program");
  version->footer("Example:\n  nanlocator version --json");
  const auto as_json = std::make_shared<bool>(false);
  version->add_flag("--json", *as_json, "Print JSON");
  version->callback([&action, as_json] {
    action = [as_json] {
      if (*as_json) {
        std::cout << nlohmann::ordered_json{{"version", NANLOCATOR_VERSION}}.dump() << '\n';
      } else {
        std::cout << "nanlocator " << NANLOCATOR_VERSION << '\n';
      }
      return kClean;
    };
  });
}

}  // namespace nanlocator::command
