# cmake -DSOURCE=<repository> -DWORK=<folder to use> -P rooms_test.cmake
# The build fails where an include points up (cmake/CheckRoom.cmake) or the table of rooms does (cmake/Rooms.cmake),
# and the table has a row for each room. Plants small trees and runs both as the build does.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})

# plant(<line> [<line of a header>]): a room `record` beside `files` below it and `report` above it.
function(plant line)
  file(WRITE ${WORK}/src/files/text.hpp "")
  file(WRITE ${WORK}/src/report/page.hpp "")
  file(WRITE ${WORK}/src/record/ledger.cpp "#include <vector>\n${line}\n")
  file(WRITE ${WORK}/include/nanlocator/record/ledger.hpp "${ARGV1}\n")
endfunction()

# expect(<OK or a pattern> <arguments of cmake...>)
function(expect outcome)
  execute_process(COMMAND ${CMAKE_COMMAND} ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE out)
  string(REGEX REPLACE "[ \n]+" " " out "${out}")  # CMake wraps its messages
  if(outcome STREQUAL "OK" AND NOT code EQUAL 0)
    message(SEND_ERROR "should pass, but:\n${out}")
  elseif(NOT outcome STREQUAL "OK" AND (code EQUAL 0 OR NOT out MATCHES "${outcome}"))
    message(SEND_ERROR "should fail with '${outcome}'; exit status ${code}:\n${out}")
  endif()
endfunction()

set(check_record -DROOM=record -DBELOW=files -DSOURCE=${WORK} -DSTAMP=${WORK}/stamp
    -P ${SOURCE}/cmake/CheckRoom.cmake)
plant("#include \"files/text.hpp\"" "#include \"nanlocator/record/ledger.hpp\"")
expect(OK ${check_record})
foreach(way "#include \"report/page.hpp\"" "#include \"nanlocator/report/page.hpp\"" "#include <report/page.hpp>"
            "  #  include \"report/page.hpp\"" "#include \"../report/page.hpp\"")
  plant("${way}")
  expect("src/record/ledger\\.cpp: *#.*report/page\\.hpp" ${check_record})
endforeach()
plant("" "#include \"nanlocator/report/page.hpp\"")
expect("include/nanlocator/record/ledger\\.hpp: #include" ${check_record})

# A room's names are in its own namespace.
foreach(way "namespace nanlocator::inline record_room {" "namespace nanlocator::record {"
            "namespace nanlocator {\ninline namespace record_room {")
  plant("${way}")
  expect(OK ${check_record})
endforeach()
foreach(way "namespace nanlocator {" "namespace nanlocator {\ninline namespace files_room {")
  plant("${way}")
  expect("record_room.*src/record/ledger\\.cpp" ${check_record})
endforeach()

# plant_table(<rows>): a table of rooms.
function(plant_table rows)
  file(WRITE ${WORK}/docs/concepts.md "| room | question | may include |\n|---|---|---|\n${rows}")
endfunction()
file(WRITE ${WORK}/read_table.cmake "cmake_minimum_required(VERSION 3.25)\ninclude(\"${SOURCE}/cmake/Rooms.cmake\")\n")
set(read_table -DPROJECT_SOURCE_DIR=${WORK} -P ${WORK}/read_table.cmake)
plant_table("| `files` | ? | nothing |\n| `record` | ? | files |\n")
expect(OK ${read_table})
plant_table("| `record` | ? | report |\n| `report` | ? | nothing |\n")
expect("record depends on report, which has no row above it" ${read_table})

# The table of the repository has a row for each room on disk.
set(PROJECT_SOURCE_DIR ${SOURCE})
include("${SOURCE}/cmake/Rooms.cmake")
file(GLOB folders RELATIVE ${SOURCE}/src ${SOURCE}/src/*)
file(GLOB public_folders RELATIVE ${SOURCE}/include/nanlocator ${SOURCE}/include/nanlocator/*)
foreach(folder IN LISTS folders public_folders)
  if(NOT folder MATCHES "\\." AND NOT folder IN_LIST NANLOCATOR_ROOMS)
    message(SEND_ERROR "docs/concepts.md has no row for the room ${folder}.")
  endif()
endforeach()
foreach(room IN LISTS NANLOCATOR_ROOMS)
  if(NOT IS_DIRECTORY ${SOURCE}/src/${room} OR NOT IS_DIRECTORY ${SOURCE}/tests/${room})
    message(SEND_ERROR "docs/concepts.md has a row for ${room}, but src/${room} or tests/${room} is missing.")
  endif()
endforeach()
