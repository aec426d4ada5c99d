// `nanlocator explain`: what the code in the brackets of a verdict means.
#include <algorithm>
#include <iostream>
#include <string>

#include "command.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/report/narrative.hpp"

namespace nanlocator::command {
namespace {

int explain(const Arguments& given) {
  const std::string code = given.text("CODE");
  const auto codes = explained_codes();
  if (!code.empty()) {
    if (std::ranges::find(codes, code) == codes.end()) {
      throw UsageError("there is no code " + code + suggestion(code, codes) +
                       "; `nanlocator explain` lists them");
    }
    std::cout << explanation_of(code);
    return kClean;
  }
  for (const std::string& each : codes) std::cout << each << '\n';
  return kClean;
}

constexpr Option kOptionsOfExplain[] = {
    {.name = "CODE", .help = "The word in brackets after ERROR: div_zero; without one, all codes"},
};

}  // namespace

Command explain_command() {
  return {.name = "explain",
          .summary = "Explain a verdict's code: what it means, how to confirm and to mend it",
          .options = kOptionsOfExplain,
          .examples =
              "nanlocator explain div_zero\n"
              "nanlocator explain",
          .run = explain};
}

}  // namespace nanlocator::command
