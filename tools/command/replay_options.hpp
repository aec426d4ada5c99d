// The options of `nanlocator replay`, for the program `nanlocator-replay` and, through the
// extension, for `python -m nanlocator.replay`.
#pragma once

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr Option kReplayOptions[] = {
    {.name = "BUNDLE", .least = 1, .help = "The bundle's folder, or the bundle.json in it"},
    {.name = "--device",
     .value = "D",
     .help = "Device for the execution: cpu, cuda, cuda:1 (default: the recorded type of device)"},
    {.name = "--repeats",
     .value = "N",
     .type = Type::integer,
     .default_value = "3",
     .low = 1,
     .help = "Number of executions as recorded"},
    {.name = "--this-device-only", .help = "Do not compare an operator with the CPU's kernel"},
    {.name = "--load",
     .value = "FILE.so",
     .most = kMany,
     .help = "A shared library that registers operators; may be repeated"},
    {.name = "--json", .help = "Print JSON"},
    {.name = "--export-python",
     .value = "FILE",
     .help = "Execute nothing; write a short Python script for it to FILE, or to standard output "
             "for -"},

    {.name = "--reference",
     .value = "MODULE:FUNCTION",
     .help = "Computes the kernel's expected results from its arguments in float64",
     .heading =
         "A kernel or custom operator, whose module Python imports by its name in the bundle"},
    {.name = "--trust",
     .help = "Load files and execute source that the bundle names: only if you trust where it is "
             "from"},
};

inline constexpr Command kReplay = {
    .name = "replay",
    .summary = "Execute a bundle's operator or kernel call again: does the fault occur again?",
    .options = kReplayOptions,
    .exit_codes = "0 not bad this time, 1 bad again, 2 wrong use or a call that cannot be executed",
    .examples =
        "nanlocator replay nanlocator_run/a0/bundles/step12-backward-rank0-layers.3\n"
        "nanlocator replay BUNDLE --repeats 20 --json\n"
        "nanlocator replay BUNDLE --export-python bug.py"};

/// Only Python implements these options. Returns the first that was given, or "".
inline std::string_view python_option(const Arguments& given) {
  for (const std::string_view option : {"--reference", "--trust"}) {
    if (given.has(option)) return option;
  }
  return {};
}

}  // namespace nanlocator::command
