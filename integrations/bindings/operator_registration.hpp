// What registered a custom operator, on its way into a bundle and out of it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "nanlocator/record/bundle.hpp"

namespace nanlocator {

/// Asks nanlocator.calls.operator_registration what registered the operator of `bundle`, where it
/// has the call of one that is not Torch's own. What it cannot say is a note of the bundle. Needs
/// the GIL.
void add_registration(Bundle& bundle, BundleContents& contents);

}  // namespace nanlocator
