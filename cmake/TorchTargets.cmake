# Imported targets for the libtorch inside the pip Torch (or any libtorch: -DTORCH_ROOT=...).
#
# find_package(Torch) is not used: with the CUDA wheel it enables CUDA even for a C++-only project, stops without a
# toolkit, and fails in architecture detection on CMake 3.25.
#   nanlocator::libtorch       c10, torch_cpu, torch
#   nanlocator::libtorch_cuda  c10_cuda, torch_cuda (if the libtorch has them)
#   nanlocator::torch_python   the Python half, for extensions only
if(NOT TORCH_ROOT)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  include(${CMAKE_CURRENT_LIST_DIR}/PythonPackage.cmake)
  nanlocator_find_python_package(torch TORCH_ROOT)
  if(NOT TORCH_ROOT)
    message(FATAL_ERROR "No Torch in ${Python3_EXECUTABLE}. Activate the environment that has it, pass "
                        "-DPython3_EXECUTABLE=..., -DTORCH_ROOT=<libtorch>, or -DNANLOCATOR_TORCH=OFF.")
  endif()
  set(TORCH_ROOT ${TORCH_ROOT} CACHE PATH "The torch package or libtorch folder")
endif()
if(EXISTS ${TORCH_ROOT}/version.py)
  file(STRINGS ${TORCH_ROOT}/version.py torch_version_line REGEX "^__version__ = ")
  string(REGEX REPLACE ".*['\"]([^'\"]+)['\"].*" "\\1" NANLOCATOR_TORCH_VERSION "${torch_version_line}")
else()
  file(STRINGS ${TORCH_ROOT}/build-version NANLOCATOR_TORCH_VERSION LIMIT_COUNT 1)
endif()
message(STATUS "Torch ${NANLOCATOR_TORCH_VERSION} in ${TORCH_ROOT}")
if(NANLOCATOR_TORCH_VERSION VERSION_LESS 2.6 OR NANLOCATOR_TORCH_VERSION VERSION_GREATER_EQUAL 2.16)
  message(WARNING "nanlocator is made for Torch 2.6 to 2.15 (docs/support.md), not for "
                  "${NANLOCATOR_TORCH_VERSION}.")
endif()
# Some wheels up to 2.6 use libstdc++'s older std::string, and say so in their TorchConfig.cmake.
set(NANLOCATOR_TORCH_CXX11_ABI 1)
set(torch_config ${TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake)
if(EXISTS ${torch_config})
  file(STRINGS ${torch_config} torch_old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(torch_old_abi)
    set(NANLOCATOR_TORCH_CXX11_ABI 0)
  endif()
endif()

function(nanlocator_import_torch_library name)
  find_library(NANLOCATOR_LIB_${name} ${name} PATHS ${TORCH_ROOT}/lib NO_DEFAULT_PATH)
  mark_as_advanced(NANLOCATOR_LIB_${name})
  if(NANLOCATOR_LIB_${name} AND NOT TARGET nanlocator::${name}_library)
    add_library(nanlocator::${name}_library SHARED IMPORTED GLOBAL)
    set_target_properties(nanlocator::${name}_library PROPERTIES
      IMPORTED_LOCATION ${NANLOCATOR_LIB_${name}}
      INTERFACE_INCLUDE_DIRECTORIES "${TORCH_ROOT}/include;${TORCH_ROOT}/include/torch/csrc/api/include"
      INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO")
  endif()
endfunction()
foreach(name c10 torch_cpu torch torch_python c10_cuda torch_cuda)
  nanlocator_import_torch_library(${name})
endforeach()
foreach(name c10 torch_cpu torch)
  if(NOT TARGET nanlocator::${name}_library)
    message(FATAL_ERROR "lib${name}.so is not in ${TORCH_ROOT}/lib: is TORCH_ROOT a libtorch?")
  endif()
endforeach()

add_library(nanlocator::libtorch INTERFACE IMPORTED GLOBAL)
# libtorch.so and libtorch_cpu.so of the wheel export parts of an older std::filesystem (64 and 142 symbols in torch
# 2.11). If they are found before libstdc++'s, two implementations mix and remove_all crashes. The loader searches in
# link order, so libstdc++ comes first.
if(UNIX AND NOT APPLE)
  set(standard_library stdc++)
endif()
target_link_libraries(nanlocator::libtorch INTERFACE
  ${standard_library} nanlocator::torch_library nanlocator::torch_cpu_library nanlocator::c10_library)
if(TARGET nanlocator::torch_cuda_library)
  add_library(nanlocator::libtorch_cuda INTERFACE IMPORTED GLOBAL)
  target_link_libraries(nanlocator::libtorch_cuda INTERFACE
    nanlocator::torch_cuda_library nanlocator::c10_cuda_library)
endif()
if(TARGET nanlocator::torch_python_library)
  add_library(nanlocator::torch_python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(nanlocator::torch_python INTERFACE nanlocator::torch_python_library)
  # The pybind11 of Torch up to 2.8 shares types only between extensions whose compilers give the same ABI number; with
  # another number, ProcessGroup and Store are unknown classes. Torch's number is used, as in torch.utils.cpp_extension.
  file(STRINGS ${NANLOCATOR_LIB_torch_python} pybind11_internals LIMIT_COUNT 1
       REGEX "__pybind11_internals_v[0-9]+_gcc_libstdcpp_cxxabi[0-9]+")
  if(pybind11_internals MATCHES "_cxxabi[0-9]+")
    target_compile_definitions(nanlocator::torch_python INTERFACE "PYBIND11_BUILD_ABI=\"${CMAKE_MATCH_0}\"")
  endif()
endif()
