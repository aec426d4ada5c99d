# Installs the libraries into a prefix of their own, then builds and runs examples/cpp_training against
# them as a stranger would: nothing of the build tree is in reach.
#     cmake -DBUILD=<build dir> -DSOURCE=<repository> -DTORCH_ROOT=... -DCXX=... -DLAUNCHER=... -P this
set(scratch ${BUILD}/tests/cpp_training)
file(REMOVE_RECURSE ${scratch})

function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${scratch} COMMAND_ECHO STDOUT
                  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  message("${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "exit status ${status}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY ${scratch})
run(${CMAKE_COMMAND} --install ${BUILD} --component library --prefix ${scratch}/prefix)
run(${CMAKE_COMMAND} -S ${SOURCE}/examples/cpp_training -B ${scratch}/build -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${scratch}/prefix -DTORCH_ROOT=${TORCH_ROOT} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
run(${CMAKE_COMMAND} --build ${scratch}/build)
run(${scratch}/build/cpp_training)
foreach(expected "step 6 " "hidden.weight" "[20, 3]")
  string(FIND "${output}" "${expected}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "the program's output does not hold '${expected}'")
  endif()
endforeach()
string(FIND "${output}" "step 7  loss" place)
if(NOT place EQUAL -1)
  message(FATAL_ERROR "step 7 was taken though its gradient was bad")
endif()
if(NOT EXISTS ${scratch}/nanlocator_run/a0/verdict.json)
  message(FATAL_ERROR "no verdict.json was written")
endif()
