// The job as its scheduler and its folder of checkpoints know it, read when a verdict is made.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "nanlocator/locate/verdict.hpp"

namespace nanlocator::inline step_room {

/// Reads the clock, the environment of SLURM and torchrun, and the names in `checkpoint_dir` ("" if
/// it is not known). `iteration`: the step of the finding. Never throws.
[[nodiscard]] Launch read_launch(const std::filesystem::path& checkpoint_dir, int attempt,
                                 std::int64_t iteration) noexcept;

/// The checkpoints in `folder` by their names, the newest first: Megatron's iter_0000900,
/// Transformers' checkpoint-900, DeepSpeed's global_step900, Lightning's epoch=1-step=900.ckpt, and
/// whatever else has "step" or "iter" before its number. Megatron's unfinished one is left out.
/// None if one is beyond `iteration`: then another attempt wrote them, or the numbers do not count
/// the same steps.
[[nodiscard]] std::vector<CheckpointFile> checkpoints_in(const std::filesystem::path& folder,
                                                         std::int64_t iteration);

}  // namespace nanlocator::inline step_room
