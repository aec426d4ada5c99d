# Finds a CUDA compiler, even if nvcc is not on PATH, and reports the consequences of a build without one.

# nanlocator_find_nvcc(<result> <site-packages> <root>): the first nvcc of $CUDA_HOME, $CUDA_PATH, PATH, the Python
# packages (pip install nvidia-cuda-nvcc), and below <root> usr/local/cuda, the newest usr/local/cuda-* and opt/cuda.
# Empty if there is none.
function(nanlocator_find_nvcc result site_packages root)
  file(GLOB packages ${site_packages}/nvidia/cu[0-9]*)
  file(GLOB versions ${root}/usr/local/cuda-*)
  list(SORT packages COMPARE NATURAL ORDER DESCENDING)
  list(SORT versions COMPARE NATURAL ORDER DESCENDING)
  unset(nvcc)
  find_program(nvcc nvcc NO_CACHE NO_DEFAULT_PATH PATH_SUFFIXES bin PATHS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
  find_program(nvcc nvcc NO_CACHE NO_CMAKE_SYSTEM_PATH)
  find_program(nvcc nvcc NO_CACHE NO_DEFAULT_PATH PATH_SUFFIXES bin
               PATHS ${packages} ${root}/usr/local/cuda ${versions} ${root}/opt/cuda)
  if(NOT nvcc)
    set(nvcc "")
  endif()
  set(${result} "${nvcc}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_COMPILER to a working compiler, or to a false value.
macro(nanlocator_find_cuda_compiler)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # installed since the last configuration?
    if(NOT DEFINED ENV{CUDACXX})
      if(TORCH_ROOT)
        get_filename_component(site_packages ${TORCH_ROOT} DIRECTORY)
      else()
        find_package(Python3 COMPONENTS Interpreter QUIET)
        set(site_packages ${Python3_SITEARCH})
      endif()
      nanlocator_find_nvcc(nvcc "${site_packages}" "")
      if(nvcc)
        set(ENV{CUDACXX} ${nvcc})
      endif()
    endif()
    if(DEFINED ENV{CUDACXX})
      include(CheckLanguage)
      check_language(CUDA)
    endif()
  endif()
endmacro()

# The packages have libcudart.so.13 but no libcudart.so, which find_package(CUDAToolkit) looks for.
macro(nanlocator_help_to_find_cudart)
  get_filename_component(cuda_root ${CMAKE_CUDA_COMPILER} DIRECTORY)
  get_filename_component(cuda_root ${cuda_root} DIRECTORY)
  file(GLOB cudart ${cuda_root}/lib/libcudart.so.[0-9]*)
  if(cudart AND NOT EXISTS ${cuda_root}/lib/libcudart.so AND NOT EXISTS ${cuda_root}/lib64/libcudart.so)
    list(GET cudart 0 cudart)
    set(CUDA_CUDART ${cudart} CACHE FILEPATH "The CUDA runtime")
    set(CUDA_cudart_LIBRARY ${cudart} CACHE FILEPATH "The CUDA runtime")
  endif()
endmacro()

# NANLOCATOR_NCCL_INCLUDE: the folder of nccl.h, in Torch's Python packages (nvidia-nccl) or the system. Without it,
# flags cannot be reduced over a raw NCCL communicator.
function(nanlocator_find_nccl)
  get_filename_component(site_packages ${TORCH_ROOT} DIRECTORY)
  find_path(NANLOCATOR_NCCL_INCLUDE nccl.h HINTS ${site_packages}/nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS}
            DOC "The folder of nccl.h")
  mark_as_advanced(NANLOCATOR_NCCL_INCLUDE)
endfunction()

# nanlocator_find_cuda_misfit(<result> <libc10_cuda.so> <version>): the reason if kernels from CUDA's compiler of this
# version cannot run beside this Torch, else empty. Both must load the same CUDA runtime, whose library name has its
# major version.
function(nanlocator_find_cuda_misfit result library version)
  set(${result} "" PARENT_SCOPE)
  if(NOT library)
    set(${result} "this Torch has no CUDA" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${library} runtime REGEX "^libcudart\\.so\\.[0-9]+" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+" of_torch "${runtime}")
  string(REGEX MATCH "^[0-9]+" of_compiler ${version})
  if(of_torch AND NOT of_torch EQUAL of_compiler)
    set(${result} "this Torch is made with CUDA ${of_torch}, and the compiler is CUDA ${version}'s" PARENT_SCOPE)
  endif()
endfunction()

# Without usable CUDA, an explicit request is an error; otherwise the build has no kernels. Sets NANLOCATOR_CUDA.
macro(nanlocator_fit_cuda_to_torch was_left_to_us)
  set(cuda_misfit)
  if(NANLOCATOR_CUDA)
    nanlocator_find_cuda_misfit(cuda_misfit "${NANLOCATOR_LIB_c10_cuda}" ${CMAKE_CUDA_COMPILER_VERSION})
  endif()
  if(cuda_misfit AND NOT ${was_left_to_us})
    message(FATAL_ERROR "NANLOCATOR_CUDA=ON, but ${cuda_misfit}. Set CUDA_HOME to a toolkit that fits, or configure "
                        "with -DNANLOCATOR_CUDA=OFF.")
  elseif(cuda_misfit)
    set(NANLOCATOR_CUDA OFF)
  endif()
  if(${was_left_to_us} AND NOT NANLOCATOR_CUDA AND TARGET nanlocator::libtorch_cuda)
    if(NOT cuda_misfit)
      set(cuda_misfit "Torch has CUDA, and no nvcc was found")
    endif()
    message(WARNING "${cuda_misfit}: GPU tensors will take the slow path. Set CUDA_HOME to a toolkit that fits, or pip "
                    "install nvidia-cuda-nvcc (from CUDA 13 on), and configure again; or choose it: "
                    "-DNANLOCATOR_CUDA=OFF.")
  endif()
endmacro()
