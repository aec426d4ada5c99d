// Any text: either a FormatError, or ledgers that are written again as they were read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "nanlocator/error.hpp"
#include "nanlocator/record/ledger.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nanlocator;
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    for (const Ledger& ledger : ledgers_from_jsonl(text, "fuzzed.jsonl")) {
      const std::string once = to_jsonl(ledger);
      const auto again = ledgers_from_jsonl(once, "fuzzed.jsonl");
      if (again.size() != 1 || again.front().is_complete != ledger.is_complete) std::abort();
      // One that was cut off gains a note that says so.
      if (ledger.is_complete && to_jsonl(again.front()) != once) std::abort();
    }
  } catch (const FormatError&) {
  }
  return 0;
}
