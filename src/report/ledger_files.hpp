// The ledger files of a folder: the steps that they cover, and the ledgers of one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "nanlocator/record/ledger.hpp"

namespace nanlocator::inline report_room {

/// One ledger in a file, found by its first line.
struct LedgerPlace {
  std::size_t file = 0;   // index into LedgerFiles::paths
  std::size_t begin = 0;  // bytes of the file
  std::size_t end = 0;
  std::size_t line = 1;  // line number at `begin`
  std::string run_id;
  std::int64_t iteration = 0;
  int rank = 0;
};

struct LedgerFiles {
  std::vector<std::filesystem::path> paths;  // ascending
  std::vector<LedgerPlace> places;           // in the order of the files
  std::vector<std::string> notes;            // unreadable files and first lines
};

/// "ledger_*.jsonl", also with a prefix ("a17-ledger_tp0pp0dp0.jsonl").
[[nodiscard]] bool is_ledger_file(const std::filesystem::path& path);

/// Finds every ledger of the folder, in parallel. Throws IoError if the folder cannot be read.
[[nodiscard]] LedgerFiles find_ledgers(const std::filesystem::path& directory);

struct ReadLedger {
  Ledger ledger;
  std::size_t file = 0;
};

/// The ledgers of one run's step, in the order of the files, read in parallel. Unreadable ones
/// become notes.
[[nodiscard]] std::vector<ReadLedger> read_ledgers(const LedgerFiles& files,
                                                   const std::string& run_id,
                                                   std::int64_t iteration,
                                                   std::vector<std::string>& notes);

}  // namespace nanlocator::inline report_room
