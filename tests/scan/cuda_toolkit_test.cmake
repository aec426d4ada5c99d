# cmake -DSOURCE=<repository> -DWORK=<folder to use> -P cuda_toolkit_test.cmake
# Where cmake/CudaToolkit.cmake looks for nvcc, in which order, in planted trees; and which Torch it fits.
cmake_minimum_required(VERSION 3.25)
include(${SOURCE}/cmake/CudaToolkit.cmake)
file(REMOVE_RECURSE ${WORK})
unset(ENV{CUDA_PATH})
unset(ENV{CUDA_HOME})
set(ENV{PATH} ${WORK}/path)

# plant(<folder>): an nvcc in it.
function(plant folder)
  file(WRITE ${WORK}/${folder}/nvcc "#!/bin/sh\n")
  file(CHMOD ${WORK}/${folder}/nvcc PERMISSIONS OWNER_READ OWNER_EXECUTE)
endfunction()

# expect(<folder or nothing>)
function(expect folder)
  nanlocator_find_nvcc(found ${WORK}/site-packages ${WORK}/root)
  set(expected "")
  if(folder)
    set(expected ${WORK}/${folder}/nvcc)
  endif()
  if(NOT found STREQUAL expected)
    message(SEND_ERROR "found '${found}' instead of '${expected}'")
  endif()
endfunction()

expect("")
# Each is found before the ones above it.
foreach(folder root/opt/cuda/bin root/usr/local/cuda-9.2/bin root/usr/local/cuda-12.8/bin root/usr/local/cuda-13.0/bin
               root/usr/local/cuda/bin site-packages/nvidia/cu13/bin path)
  plant(${folder})
  expect(${folder})
endforeach()
plant(home/bin)
set(ENV{CUDA_PATH} ${WORK}/home)
expect(home/bin)
plant(other/bin)
set(ENV{CUDA_HOME} ${WORK}/other)
expect(other/bin)

# expect_misfit(<libc10_cuda.so> <version> <regular expression>)
function(expect_misfit library version expected)
  nanlocator_find_cuda_misfit(found "${library}" ${version})
  if(NOT found MATCHES "${expected}")
    message(SEND_ERROR "CUDA ${version} beside ${library}: '${found}' instead of '${expected}'")
  endif()
endfunction()

file(WRITE ${WORK}/libc10_cuda.so "\nlibcuda.so.1\nlibcudart.so.12\nlibc10.so\n")
expect_misfit("" 13.0.88 "no CUDA")
expect_misfit(${WORK}/libc10_cuda.so 12.8.93 "^$")
expect_misfit(${WORK}/libc10_cuda.so 13.0.88 "made with CUDA 12.*13\\.0\\.88")
file(WRITE ${WORK}/libc10_cuda.so "\nlibcuda.so.1\n")  # its runtime is linked into it
expect_misfit(${WORK}/libc10_cuda.so 13.0.88 "^$")
