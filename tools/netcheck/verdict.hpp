// What all ranks saw in, one verdict out. No Torch, no process: JSON to JSON, so that the reporting
// rank, the tests and a person with a file can do the same.
//
// In:  {"world_size": 8, "backend": "gloo", "seconds": 6.1, "differences": [...],
//       "ranks": [{"rank", "host", "local_rank", "answered", "process": "" | "ended" | "stopped",
//         "ended": "finished" | "deadline" | "error" | "signal" | "stopped" , "error",
//         "place": {"stage", "step", "group", "ranks", "sequence", "state", "launches"} | null,
//         "device_failures": [texts], "wrong": [...], "own_seconds", "edges": [...],
//         "timings": [...], "unsupported": [texts]}]}
// Out: docs/netcheck.md.
#pragma once

#include <string>
#include <string_view>

namespace nanlocator::netcheck {

/// Throws FormatError where `results` are not in the form above.
[[nodiscard]] std::string make_verdict(std::string_view results);

}  // namespace nanlocator::netcheck
