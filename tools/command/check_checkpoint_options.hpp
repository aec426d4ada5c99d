// The options of the check of a checkpoint, for `nanlocator check-checkpoint` and, through the
// extension, for `python -m nanlocator.check_checkpoint`
// (integrations/nanlocator/check_checkpoint/program.py).
#pragma once

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr Option kCheckCheckpointOptions[] = {
    {.name = "PATH",
     .least = 1,
     .help = "A file, a checkpoint's folder, or a run's folder with several checkpoints: of those "
             "the one that a resume would load"},
    {.name = "--all", .help = "Check every checkpoint of the run's folder, newest first"},
    {.name = "--parameter",
     .value = "NAME",
     .most = kMany,
     .help = "Print the statistics of the tensors with this name, such as '*layers.3.*norm*'; may "
             "be repeated"},
    {.name = "--compare",
     .value = "OTHER",
     .help = "Compare magnitudes with this checkpoint (default: the one before, if PATH's run has "
             "it)"},
    {.name = "--alone", .help = "Do not read another checkpoint to compare magnitudes"},
    {.name = "--deadline",
     .value = "SECONDS",
     .type = Type::number,
     .high = 1e9,
     .expected = "seconds",
     .help = "Stop after this time and say what was not read"},
    kJsonOption,
};

inline constexpr Command kCheckCheckpoint = {
    .name = "check-checkpoint",
    .summary =
        "Is it safe to load? Find NaN, Inf and absurd magnitudes in a checkpoint's weights and "
        "optimizer states",
    .options = kCheckCheckpointOptions,
    .details =
        "It reads safetensors, torch.save, torch.distributed.checkpoint, and the folders of "
        "Megatron-Core, DeepSpeed, the Trainer, accelerate and Lightning, and executes nothing of "
        "them. It needs the Python package nanlocator, with Torch.",
    .exit_codes =
        "0 finite, 1 findings, 2 wrong use, 3 something could not be read (and no "
        "findings in the rest)",
    .examples =
        "nanlocator check-checkpoint /scratch/run17/checkpoints\n"
        "nanlocator check-checkpoint checkpoints/iter_0001250 --compare checkpoints/iter_0001000\n"
        "nanlocator check-checkpoint checkpoints --all --json\n"
        "nanlocator check-checkpoint model.safetensors --parameter '*.q_proj.weight'\n"
        "python -m nanlocator.check_checkpoint last.ckpt    (the same)",
    .python_module = "nanlocator.check_checkpoint"};

}  // namespace nanlocator::command
