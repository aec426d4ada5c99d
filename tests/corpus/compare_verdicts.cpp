// Locates stored ledgers and writes the verdicts as facts, which tools/corpus compares.
//
//   xzcat tests/corpus/cases/locate/*.xz | nanlocator_corpus
//
// In: {"case": id, "ranks": n, ...} on a line, then the ledgers of that case, as in a ledger file.
// Out: {"case": id, "facts": {...}} or {"case": id, "error": text}, one line per case, in the same
// order.
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "corpus/verdict_facts.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/ledger.hpp"

namespace {

using nlohmann::ordered_json;

struct Case {
  std::string id;
  int ranks = 0;
  std::string ledgers;  // JSON lines
};

std::vector<nanlocator::Ledger> ledgers_of(const Case& each) {
  if (each.ledgers.empty()) return {};
  auto ledgers = nanlocator::ledgers_from_jsonl(each.ledgers, "case " + each.id);
  for (nanlocator::Ledger& ledger : ledgers) {
    // A ledger that was cut off before it was stored has a note about it; the reader adds another.
    if (!ledger.is_complete) ledger.notes.pop_back();
  }
  return ledgers;
}

void judge(const Case& each) {
  ordered_json line = {{"case", each.id}};
  try {
    line["facts"] = nanlocator::corpus::facts_of(locate(ledgers_of(each), each.ranks));
  } catch (const std::exception& error) {
    line["error"] = error.what();
  }
  std::cout << line.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << '\n';
}

Case case_from(const std::string& header) {
  const auto json = nlohmann::json::parse(header);
  return {json.at("case").get<std::string>(), json.at("ranks").get<int>(), {}};
}

}  // namespace

int main() try {
  std::ios::sync_with_stdio(false);
  Case current;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.starts_with(R"({"case":)")) {
      if (!current.id.empty()) judge(current);
      current = case_from(line);
    } else {
      current.ledgers += line + '\n';
    }
  }
  if (!current.id.empty()) judge(current);
  return std::cout.flush() ? 0 : 2;
} catch (const std::exception& error) {
  std::cerr << "nanlocator_corpus: " << error.what() << '\n';
  return 2;
}
