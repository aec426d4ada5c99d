// The job as its scheduler and its folder of checkpoints know it, read when a verdict is made.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/step/locator_options.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline step_room {

/// Reads the clock, the environment of SLURM and torchrun, and the names in `checkpoint_dir` (if it
/// is empty, in the folder into which the process has saved last, or in the first step from which
/// it has loaded). `first`, `iteration`: the
/// first step of this process, and that of the finding. Never throws.
[[nodiscard]] Launch read_launch(const std::filesystem::path& checkpoint_dir, int attempt,
                                 std::int64_t first, std::int64_t iteration) noexcept;

/// The checkpoints in `folder` by their names, the newest first: Megatron's iter_0000900,
/// Transformers' checkpoint-900, DeepSpeed's global_step900, Lightning's epoch=1-step=900.ckpt, and
/// whatever else has "step" or "iter" before its number. Megatron's unfinished one is left out.
[[nodiscard]] std::vector<CheckpointFile> checkpoints_in(const std::filesystem::path& folder);

/// Launch::steps_before, for a process that counts its steps from `first` and has come to
/// `iteration`. `loaded`: the name of the checkpoint that it began from; "" if that is not known.
[[nodiscard]] std::optional<std::int64_t> steps_before(const std::vector<CheckpointFile>& found,
                                                       const std::string& loaded,
                                                       std::int64_t first, std::int64_t iteration);

/// Reads the checkpoints that the verdict's orders depend on, until one is finite: first the one
/// that the process has loaded, if a value that it may hold was bad, then the newest that may be
/// loaded. Returns whether any was read.
[[nodiscard]] bool read_checkpoints(Verdict& verdict, const LocatorOptions& options,
                                    std::chrono::milliseconds limit);

}  // namespace nanlocator::inline step_room
