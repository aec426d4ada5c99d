// A recorded operator or kernel call as a short Python script, for a bug report to its authors.
//
// In: a bundle with such a call. Out: of an operator at most 20 lines that need torch and
// safetensors only; of a kernel some 50 that need its package, too, or the source in the bundle.
#pragma once

#include <string>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator::inline replay_room {

/// The script reads the bundle's tensors.safetensors, by its absolute path or the one given as its
/// argument (of a kernel the bundle's folder). Throws UsageError for a bundle without such a call,
/// UnsupportedError for values that could not be kept.
[[nodiscard]] std::string python_script(const OpenBundle& bundle);

}  // namespace nanlocator::inline replay_room
