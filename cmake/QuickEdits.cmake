# NANLOCATOR_QUICK_EDITS, which the preset dev sets: Torch's headers, most of what a file of a room with Torch costs,
# are precompiled once, and mold or lld links where one is installed.
#
#   nanlocator_precompile_torch(<target>)
#     Gives <target>, a room or its tests, the precompiled headers of Torch. Does nothing without the option.
if(NANLOCATOR_QUICK_EDITS)
  find_program(NANLOCATOR_MOLD mold)
  find_program(NANLOCATOR_LLD ld.lld)
  mark_as_advanced(NANLOCATOR_MOLD NANLOCATOR_LLD)
  if(NANLOCATOR_MOLD)
    add_link_options(-fuse-ld=mold)
  elseif(NANLOCATOR_LLD)
    add_link_options(-fuse-ld=lld)
  endif()
endif()

function(nanlocator_precompile_torch target)
  if(NOT NANLOCATOR_QUICK_EDITS)
    return()
  endif()
  if(NOT TARGET nanlocator_torch_headers)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_headers.cpp CONTENT "")
    add_library(nanlocator_torch_headers OBJECT ${PROJECT_BINARY_DIR}/torch_headers.cpp)
    target_compile_definitions(nanlocator_torch_headers PRIVATE NDEBUG)
    target_link_libraries(nanlocator_torch_headers PRIVATE nanlocator::libtorch)
    target_precompile_headers(nanlocator_torch_headers PRIVATE
      <ATen/Context.h> <ATen/core/Tensor.h> <ATen/core/dispatch/Dispatcher.h> <ATen/record_function.h>
      <torch/csrc/autograd/function.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>
      <algorithm> <functional> <map> <memory> <mutex> <optional> <span> <string> <unordered_map> <vector>)
  endif()
  target_precompile_headers(${target} REUSE_FROM nanlocator_torch_headers)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")  # whose -fPIE does not fit these headers
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
endfunction()
