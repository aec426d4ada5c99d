# Finds a CUDA compiler, also where nvcc is not on PATH, and says what a build without one means.

# nanlocator_find_nvcc(<result> <site-packages> <root>): the first nvcc of $CUDA_HOME, $CUDA_PATH, PATH, the Python
# packages (pip install nvidia-cuda-nvcc), and below <root> usr/local/cuda, the newest usr/local/cuda-* and opt/cuda.
# Empty where there is none.
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

# Sets CMAKE_CUDA_COMPILER to a compiler that works, or to a false value.
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

# The packages hold libcudart.so.13, but no libcudart.so, which is what find_package(CUDAToolkit) looks for.
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

# NANLOCATOR_NCCL_INCLUDE: the folder of nccl.h, in Torch's Python packages (nvidia-nccl) or the system; without it
# there is no flag over a raw NCCL communicator.
function(nanlocator_find_nccl)
  get_filename_component(site_packages ${TORCH_ROOT} DIRECTORY)
  find_path(NANLOCATOR_NCCL_INCLUDE nccl.h HINTS ${site_packages}/nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS}
            DOC "The folder of nccl.h")
  mark_as_advanced(NANLOCATOR_NCCL_INCLUDE)
endfunction()

# For a Torch with CUDA and a build without kernels that nobody asked for.
function(nanlocator_warn_of_slow_path)
  message(WARNING "Torch has CUDA, but no nvcc was found: GPU tensors will take the slow path. pip install "
                  "nvidia-cuda-nvcc or set CUDA_HOME and configure again, or choose it: -DNANLOCATOR_CUDA=OFF.")
endfunction()
