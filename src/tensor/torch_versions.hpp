// NANLOCATOR_TORCH_BEFORE(2, 13): whether this is compiled against a Torch older than 2.13.
//
// Features that an older Torch lacks or names differently are in the torch_versions.hpp of the room
// that uses them, under one name for all versions; no other code checks the version.
#pragma once

#include <torch/version.h>

#define NANLOCATOR_TORCH_BEFORE(major, minor) \
  (TORCH_VERSION_MAJOR < (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR < (minor)))
