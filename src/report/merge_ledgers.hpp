// At most one ledger per rank, all of one job, from all files of a folder.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "nanlocator/record/ledger.hpp"
#include "report/ledger_files.hpp"

namespace nanlocator::inline report_room {

struct MergedLedgers {
  std::vector<Ledger> ledgers;  // by rank: the input of `locate`
  int world_size = 1;
};

/// `read`: the ledgers of one run and iteration. `paths`: their files, for the notes.
/// `described_world_size`: run.json's; 0: unknown. If a rank has two ledgers, the one with more
/// evidence counts. A ledger that contradicts the others is left out with a note, because a wrong
/// rank is worse than a silent one: its coordinates differ from its file's name, its parallel sizes
/// differ from most ledgers', or its rank does not fit its place in the order that the others keep.
[[nodiscard]] MergedLedgers merge_ledgers(std::vector<ReadLedger> read,
                                          const std::vector<std::filesystem::path>& paths,
                                          int described_world_size,
                                          std::vector<std::string>& notes);

}  // namespace nanlocator::inline report_room
