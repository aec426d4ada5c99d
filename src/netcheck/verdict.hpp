// In: the results of all ranks. Out: one verdict. No Torch, no process: JSON to JSON, so that the
// reporting rank, the tests and a person with a file can do the same.
//
// In:  {"world_size": 8, "backend": "gloo", "seconds": 6.1,
//       "differences": [{"what", "values": {text: [ranks]}, "seconds" (of clocks)}],
//       "ranks": [{"rank", "host", "local_rank", "answered", "process": "" | "ended" | "stopped",
//         "ended": "finished" | "deadline" | "error" | "signal" | "stopped" , "error",
//         "place": {"stage", "step", "group", "ranks", "sequence", "state", "launches"} | null,
//         "device_failures": [texts], "memory_tests_cut", "computes_with": "device, versions",
//         "fingerprints": {name: text}, "wrong": [...], "own_seconds", "edges": [...], "timings":
//         [...], "unsupported": [texts]}]}
// Out: docs/netcheck.md.
#pragma once

#include <string>
#include <string_view>

namespace nanlocator::netcheck {

/// Throws FormatError if `results` are not in the form above.
[[nodiscard]] std::string make_verdict(std::string_view results);

/// "hang: rank 5 on host a17 reached ...", for a verdict of make_verdict.
[[nodiscard]] std::string headline_of(std::string_view verdict);

}  // namespace nanlocator::netcheck
