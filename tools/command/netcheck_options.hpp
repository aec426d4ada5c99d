// The options of the network check, for `nanlocator netcheck` and, through the extension, for
// `python -m nanlocator.netcheck` (integrations/nanlocator/netcheck/options.py).
#pragma once

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr Option kNetcheckOptions[] = {
    {.name = "--quick", .help = "Small messages, two dtypes, a short memory test"},
    {.name = "--tp",
     .value = "N",
     .type = Type::integer,
     .default_value = "1",
     .low = 1,
     .help = "Tensor-parallel size; its groups are checked, too"},
    {.name = "--pp",
     .value = "N",
     .type = Type::integer,
     .default_value = "1",
     .low = 1,
     .help = "Pipeline-parallel size"},
    {.name = "--cp",
     .value = "N",
     .type = Type::integer,
     .default_value = "1",
     .low = 1,
     .help = "Context-parallel size"},
    {.name = "--ep",
     .value = "N",
     .type = Type::integer,
     .default_value = "1",
     .low = 1,
     .help = "Expert-parallel size"},
    {.name = "--max-bytes",
     .value = "SIZE",
     .help = "Largest message, such as 512, 64K or 16M (default: 64M, with --quick 64K)"},
    {.name = "--dtypes",
     .value = "LIST",
     .help = "Some of fp32,bf16,fp16,int64 (default: all, with --quick the first two)"},
    {.name = "--pairs", .help = "Exchange between every pair of ranks, not only neighbours"},
    {.name = "--deadline",
     .value = "SECONDS",
     .type = Type::number,
     .default_value = "30",
     .low = 1,
     .high = 3600,
     .expected = "seconds from 1 to 3600",
     .help = "Time limit of each step"},
    {.name = "--memory-fraction",
     .value = "PART",
     .type = Type::number,
     .default_value = "0",
     .high = 0.95,
     .expected = "a part from 0 to 0.95",
     .help = "Part of the free device memory to test, 0 to 0.95; 0 is a small part"},
    {.name = "--backend",
     .value = "NAME",
     .help = "gloo or nccl (default: nccl if there are GPUs)"},
    {.name = "--json", .help = "Print one JSON object"},
    {.name = "--output", .value = "FILE", .help = "Also write the JSON to this file"},
    {.name = "--slurm-template", .help = "Print a job script for SLURM and exit"},

    {.name = "--nproc-per-node",
     .value = "N",
     .help = "Ranks on this host: one for each GPU (or auto, gpu, cpu)",
     .heading = "Starting the ranks without torchrun (its options)"},
    {.name = "--nnodes", .value = "N", .help = "Hosts (default: 1)"},
    {.name = "--node-rank", .value = "R", .help = "Number of this host"},
    {.name = "--rdzv-backend", .value = "NAME", .help = "Rendezvous backend: c10d"},
    {.name = "--rdzv-endpoint", .value = "HOST:PORT", .help = "Address of the rendezvous"},
    {.name = "--rdzv-id", .value = "ID", .help = "Id of the job, the same on each host"},
    {.name = "--rdzv-conf", .value = "LIST", .help = "Further settings of the rendezvous"},
    {.name = "--master-addr", .value = "HOST", .help = "Address of the first host"},
    {.name = "--master-port", .value = "PORT", .help = "Its port"},
    {.name = "--local-addr", .value = "HOST", .help = "Address of this host"},

    {.name = "--inject",
     .choices = "corrupt|slow|hang|stop|skew|die",
     .help = "A wrong element, a pause before each launch, a thread that sleeps forever, SIGSTOP, "
             "another torch version, SIGKILL",
     .heading = "Drill: plant a fault and see it found"},
    {.name = "--rank", .value = "R", .type = Type::integer, .help = "The rank with the fault"},
    {.name = "--at",
     .value = "NAME",
     .help = "A stage (device, groups, barrier, collectives, timing), a collective (all_gather) or "
             "a group (tp[2,3])"},
    {.name = "--moment",
     .default_value = "before",
     .choices = "before|inside|after",
     .help = "For hang, stop, die: when, relative to that step"},
    {.name = "--in-contribution",
     .help = "For corrupt: change the data sent, not the data received"},
};

inline constexpr Command kNetcheck = {
    .name = "netcheck",
    .summary = "Is it the machine? Check what every rank computes and communicates",
    .options = kNetcheckOptions,
    .details = "It needs the Python package nanlocator, and Torch.",
    .exit_codes = "0 healthy, 1 findings, 2 wrong use (torchrun itself exits with 1 for both)",
    .examples =
        "nanlocator netcheck --nproc-per-node 8\n"
        "nanlocator netcheck --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint "
        "HOST:29400 --tp 4\n"
        "nanlocator netcheck --nproc-per-node 8 --quick --inject corrupt --rank 5      (a drill)\n"
        "nanlocator netcheck --slurm-template --tp 4 > netcheck.sbatch\n"
        "torchrun --nproc-per-node 8 -m nanlocator.netcheck --json"};

}  // namespace nanlocator::command
