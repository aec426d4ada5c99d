// The options of the plan, for `nanlocator next` and, through the extension, for
// `python -m nanlocator.next_steps` (integrations/nanlocator/next_steps/program.py).
#pragma once

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr Option kNextOptions[] = {
    {.name = "RUN",
     .least = 1,
     .help = "A run's folder (its latest attempt with a verdict), an attempt's, or a verdict.json"},
    {.name = "--deadline",
     .value = "SECONDS",
     .type = Type::number,
     .high = 1e9,
     .expected = "seconds",
     .help = "Stop reading checkpoints after this time (default: 60); 0 reads none"},
    kJsonOption,
};

inline constexpr Command kNext = {
    .name = "next",
    .summary =
        "What is still to do after a verdict, as of now: job, checkpoints, hosts; it changes "
        "nothing",
    .options = kNextOptions,
    .details =
        "It asks SLURM, if its commands are on PATH, looks into the folder of checkpoints and "
        "reads "
        "those that would be loaded, and prints the steps that are left, each with its command. It "
        "needs the Python package nanlocator, with Torch.",
    .exit_codes = "0 nothing is left to do, 1 steps are left, 2 wrong use or nothing to plan by",
    .examples =
        "nanlocator next nanlocator_run\n"
        "nanlocator next /scratch/job17/nanlocator_run/a0 --json\n"
        "python -m nanlocator.next_steps nanlocator_run    (the same)",
    .python_module = "nanlocator.next_steps"};

}  // namespace nanlocator::command
