// A file of histories with any bytes: it is read, with notes of what cannot be, and each history is
// written again as it was read.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/error.hpp"
#include "nanlocator/record/history.hpp"

namespace nanlocator {
namespace {

namespace fs = std::filesystem;

std::vector<History> histories_of(std::string_view bytes) {
  static const fs::path folder =
      fs::temp_directory_path() / ("nanlocator-fuzz-" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream(folder / "history_tp0pp0dp0.jsonl", std::ios::binary | std::ios::trunc) << bytes;
  std::vector<std::string> notes;
  return read_histories(folder, -1, notes);
}

}  // namespace
}  // namespace nanlocator

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nanlocator;
  try {
    for (const History& each : histories_of({reinterpret_cast<const char*>(data), size})) {
      const std::string once = to_jsonl(each);
      const auto again = histories_of(once);
      if (again.size() != 1 || to_jsonl(again.front()) != once) std::abort();
      (void)summary_of(each);
    }
  } catch (const IoError&) {
  }
  return 0;
}
