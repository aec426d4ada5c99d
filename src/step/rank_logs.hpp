// The files into which ranks write their stderr, and what they say of the ends of those that did
// not answer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "nanlocator/agree/rank_monitor.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline step_room {

/// Of this process; without a rank.
[[nodiscard]] RankLog own_log();
/// For the others, should this rank fall silent.
[[nodiscard]] RankPlace place_of_this_rank(const RankCoordinates& coordinates);

/// From now on the log is this attempt's: earlier attempts may have written to the same file.
void begin_log() noexcept;

/// What the log says of the ends of `ranks`, as far as this attempt has written it; at most its
/// last 16 MiB are read, and at most 16 files of other ranks, each once. Never throws.
[[nodiscard]] std::vector<RankEnding> read_endings(const Launch& launch,
                                                   std::span<const int> ranks) noexcept;

/// What has become known since the verdict of the ends of ranks that did not answer, by the log and
/// by the job's state as its scheduler names it ("OUT_OF_MEMORY"; "" if that is not known), and
/// what follows from it. `attempt`: the run's folder. Returns whether there is anything new.
bool add_later_endings(Verdict& verdict, const std::filesystem::path& attempt,
                       const std::string& job_state);

}  // namespace nanlocator::inline step_room
