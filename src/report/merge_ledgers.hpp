// At most one ledger per rank, all of one job, out of whatever lay in the files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "nanlocator/record/ledger.hpp"
#include "report/ledger_files.hpp"

namespace nanlocator::inline report_room {

struct MergedLedgers {
  std::vector<Ledger> ledgers;  // by rank: what `locate` takes
  int world_size = 1;
};

/// `read`: of one run and iteration. `paths`: their files, for the notes. `described_world_size`:
/// run.json's; 0: there is none. Of two ledgers of one rank the one that saw more counts. Left out,
/// with a note, is what contradicts the rest, because a wrong rank is worse than a silent one: a
/// ledger whose coordinates are not those of its file's name, that states other parallel sizes than
/// most, or another rank than its place has in the order that the others keep.
[[nodiscard]] MergedLedgers merge_ledgers(std::vector<ReadLedger> read,
                                          const std::vector<std::filesystem::path>& paths,
                                          int described_world_size,
                                          std::vector<std::string>& notes);

}  // namespace nanlocator::inline report_room
