// Keeps the ledgers of every verdict of a program, in which CMakeLists.txt links it in front of
// locate().
//
// If the environment variable VERDICT_CORPUS names a folder, each set of ledgers is written to a
// file there, named after its content: a line {"test", "ranks", "facts"}, then the ledgers in
// ascending order of rank. tools/corpus makes cases from them.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "corpus/locate_symbol.hpp"
#include "corpus/verdict_facts.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::corpus {

Verdict locate_itself(std::span<const Ledger>, int) __asm__("__real_" NANLOCATOR_LOCATE_SYMBOL);
Verdict locate_and_keep(std::span<const Ledger>, int) __asm__("__wrap_" NANLOCATOR_LOCATE_SYMBOL);

namespace {

/// Ledgers of the simulators' jobs of hundreds of ranks take megabytes, and no rule is specific to
/// them.
constexpr std::size_t kLongest = 1'000'000;

/// The running test: of gtest (collect_tests.cpp) or of pytest. Its child processes inherit it.
std::string current_test() {
  for (const char* name : {"VERDICT_CORPUS_TEST", "PYTEST_CURRENT_TEST"}) {
    if (const char* const test = std::getenv(name)) return test;
  }
  return "";
}

/// Stops when the text exceeds kLongest.
std::string text_of(std::span<const Ledger> ledgers) {
  std::vector<const Ledger*> in_order;
  for (const Ledger& ledger : ledgers) in_order.push_back(&ledger);
  std::ranges::sort(in_order, {}, [](const Ledger* each) { return each->coordinates.rank; });
  std::string text;
  for (const Ledger* const ledger : in_order) {
    if (text.size() <= kLongest) text += to_jsonl(*ledger);
  }
  return text;
}

void keep(std::span<const Ledger> ledgers, int world_size, const Verdict& verdict,
          const std::filesystem::path& folder) {
  const std::string text = text_of(ledgers);
  if (text.size() > kLongest) return;
  const std::size_t content = std::hash<std::string>()(text + std::to_string(world_size));
  const std::filesystem::path path = folder / std::to_string(content);
  if (std::filesystem::exists(path)) return;
  const nlohmann::ordered_json header = {
      {"test", current_test()}, {"ranks", world_size}, {"facts", facts_of(verdict)}};
  // Ranks and threads may write the same set concurrently.
  static std::atomic<int> files = 0;
  const std::filesystem::path partial =
      folder / (".partial-" + std::to_string(getpid()) + "-" + std::to_string(files++));
  std::ofstream file(partial, std::ios::binary);
  file << header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n'
       << text;
  file.close();
  if (file) std::filesystem::rename(partial, path);  // fails in tests that limit the size of files
}

}  // namespace

Verdict locate_and_keep(std::span<const Ledger> ledgers, int world_size) {
  Verdict verdict = locate_itself(ledgers, world_size);
  if (const char* const folder = std::getenv("VERDICT_CORPUS")) {
    try {
      keep(ledgers, world_size, verdict, folder);
    } catch (const std::exception& error) {
      std::cerr << "nanlocator: a case of the corpus is not kept: " << error.what() << '\n';
    }
  }
  return verdict;
}

}  // namespace nanlocator::corpus
