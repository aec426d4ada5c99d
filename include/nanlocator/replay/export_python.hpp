// A recorded operator call as a short Python script, for a bug report to PyTorch.
//
// In: a bundle with an operator call. Out: at most 20 lines that need torch and safetensors only.
#pragma once

#include <string>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator {

/// The script reads the bundle's tensors.safetensors, by its absolute path or the one given as its
/// argument. Throws UsageError for a bundle without an operator call, UnsupportedError for values
/// that could not be kept.
[[nodiscard]] std::string python_script(const OpenBundle& bundle);

}  // namespace nanlocator
