// The options of the doctor, for `nanlocator doctor` and, through the extension, for
// `python -m nanlocator.doctor` (integrations/nanlocator/doctor.py).
#pragma once

#include "arguments.hpp"

namespace nanlocator::command {

inline constexpr Option kDoctorOptions[] = {
    {.name = "SCRIPT.py", .help = "Say what would attach to it; it is read, not run"},
    {.name = "--verbose", .help = "Print every point, not only those that are lost"},
    {.name = "--json", .help = "Print one JSON object"},
};

inline constexpr Command kDoctor = {
    .name = "doctor",
    .summary =
        "Check this environment: versions, the points that nanlocator patches, disk, a self-test",
    .options = kDoctorOptions,
    .details = "It needs the Python package nanlocator, and Torch.",
    .exit_codes = "0 all is well, 1 something is wrong, 2 wrong use",
    .examples =
        "nanlocator doctor\n"
        "nanlocator doctor train.py\n"
        "nanlocator doctor --json > here.json    (for a bug report)\n"
        "python -m nanlocator.doctor             (the same)",
    .python_module = "nanlocator.doctor"};

}  // namespace nanlocator::command
