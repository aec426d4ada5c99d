// NANLOCATOR_TORCH_BEFORE(2, 13): whether this is compiled against a Torch older than 2.13.
//
// What an older Torch lacks or names otherwise stands in the torch_versions.hpp of the room that
// uses it, under one name for all versions; no other code asks for the version.
#pragma once

#include <torch/version.h>

#define NANLOCATOR_TORCH_BEFORE(major, minor) \
  (TORCH_VERSION_MAJOR < (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR < (minor)))
