// A run folder of any files: either an Error, or a report whose text has no control character,
// whose verdict is written again as it was read, and whose page ends its scripts itself.
//
// The input: files, each after a line "%%FILE name"; one verdict.json, or ledgers, histories and
// maps.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "nanlocator/error.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/report/html.hpp"
#include "nanlocator/report/read_run.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace nanlocator {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = "\n%%FILE ";

/// In memory, where there is such a folder.
const fs::path& scratch() {
  static const fs::path folder = [] {
    const fs::path shared = "/dev/shm";
    return (fs::is_directory(shared) ? shared : fs::temp_directory_path()) /
           ("nanlocator-fuzz-" + std::to_string(::getpid()));
  }();
  return folder;
}

bool is_plain_name(std::string_view name) {
  constexpr std::string_view kForbidden("/\0", 2);
  return !name.empty() && name.size() < 100 && name.front() != '.' &&
         name.find_first_of(kForbidden) == name.npos;
}

void write_files(std::string_view text) {
  fs::remove_all(scratch());
  fs::create_directories(scratch());
  std::size_t at = text.find(kMark);
  while (at != text.npos) {
    text.remove_prefix(at + kMark.size());
    const std::size_t end = text.find('\n');
    if (end == text.npos) return;
    const std::string_view name = text.substr(0, end);
    text.remove_prefix(end);
    at = text.find(kMark);
    if (is_plain_name(name))
      std::ofstream(scratch() / name, std::ios::binary) << text.substr(0, at);
  }
}

void check_text(std::string_view text) {
  for (const unsigned char c : text) {
    if ((c < 0x20 && c != '\n') || c == 0x7f) std::abort();
  }
}

void read_report() {
  const RunReport report = read_run(scratch());
  check_text(format_verdict(report.verdict, {.run_dir = report.run_dir}));
  check_text(format_evidence(report.verdict));
  const std::string once = to_json(report.verdict);
  if (to_json(verdict_from_json(once, "verdict.json")) != once) std::abort();
  const std::string page = format_html(report);
  if (page.find("</script><img") != page.npos) std::abort();  // as a name in the seeds would do it
}

template <typename Read>
void refused_or(const Read& read) {
  try {
    (void)read();
  } catch (const Error&) {
  }
}

}  // namespace
}  // namespace nanlocator

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nanlocator;
  write_files({reinterpret_cast<const char*>(data), size});
  refused_or([] { return read_report(), 0; });
  refused_or([] { return read_verdicts(scratch()); });
  refused_or([] { return read_map_directory(scratch()); });
  return 0;
}
