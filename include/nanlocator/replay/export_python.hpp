// Exports a recorded operator or kernel call as a short Python script, for a bug report to its
// authors.
//
// In: a bundle with such a call. Out: for an operator, at most 20 lines that need only torch and
// safetensors; for a kernel, about 50 lines that also need its package or the source in the bundle.
#pragma once

#include <string>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator::inline replay_room {

/// The script reads the bundle's tensors.safetensors, by its absolute path or the one given as its
/// argument (for a kernel, the bundle's folder). Throws UsageError for a bundle without such a
/// call, UnsupportedError for values that could not be kept.
[[nodiscard]] std::string python_script(const OpenBundle& bundle);

}  // namespace nanlocator::inline replay_room
