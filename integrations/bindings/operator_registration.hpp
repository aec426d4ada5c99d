// The code that registered a custom operator, written to and read from a bundle.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator {

/// Queries nanlocator.calls.operator_registration about the operator of `bundle`, if the bundle has
/// a call of a custom operator. Missing answers become a note of the bundle. Needs the GIL.
void add_registration(Bundle& bundle, BundleContents& contents);

}  // namespace nanlocator
