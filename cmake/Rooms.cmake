# The rooms and their permitted includes, read from the table in docs/concepts.md, so that the documented map is the
# enforced one.
#
#   nanlocator_add_room(<room> [ONLY_ON_FINDINGS] [SOURCES <file>...] [LIBRARIES <target>...])
#     nanlocator_room_<room>: the objects of src/<room>, compiled only after the room's includes have been checked
#     against the table. Without SOURCES: all of src/<room>/*.cpp. ONLY_ON_FINDINGS: nothing
#     of it runs in a healthy step, so it is compiled quickly rather than well.
#   nanlocator_link_room(<target> <room>)
#     Links the room and the rooms below it, and no other.
set(rooms_table ${PROJECT_SOURCE_DIR}/docs/concepts.md)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${rooms_table})
file(STRINGS ${rooms_table} room_rows REGEX "^\\| (room|`[a-z]+`) \\|.*\\|.*\\|$")
set(is_in_table OFF)
foreach(row IN LISTS room_rows)
  if(row MATCHES "^\\| room ")  # other tables precede this header
    set(is_in_table ON)
    continue()
  elseif(NOT is_in_table)
    continue()
  endif()
  # | `room` | question | rooms that it may include, or nothing |
  string(REGEX REPLACE "^\\| `([a-z]+)` \\|.*$" "\\1" room "${row}")
  string(REGEX REPLACE "^.*\\|([^|]*)\\|$" "\\1" below "${row}")
  string(REGEX MATCHALL "[a-z]+" below "${below}")
  list(REMOVE_ITEM below nothing)
  foreach(other IN LISTS below)
    if(NOT other IN_LIST NANLOCATOR_ROOMS)  # rows are ordered from the ground up, so that no dependency points up
      message(FATAL_ERROR "docs/concepts.md: the room ${room} depends on ${other}, which has no row above it.")
    endif()
  endforeach()
  list(APPEND NANLOCATOR_ROOMS ${room})
  set(NANLOCATOR_BELOW_${room} ${below})
endforeach()
if(NOT NANLOCATOR_ROOMS)
  message(FATAL_ERROR "docs/concepts.md has no table of rooms.")
endif()

function(nanlocator_add_room room)
  cmake_parse_arguments(arg "ONLY_ON_FINDINGS" "" "SOURCES;LIBRARIES" ${ARGN})
  if(NOT room IN_LIST NANLOCATOR_ROOMS)
    message(FATAL_ERROR "The room ${room} is not in the table of docs/concepts.md.")
  endif()
  if(NOT arg_SOURCES)
    file(GLOB arg_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*.cpp)
  endif()
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/*.[ch]* ${PROJECT_SOURCE_DIR}/src/${room}/*.inc
       ${PROJECT_SOURCE_DIR}/include/nanlocator/${room}/*.hpp)
  list(FILTER files INCLUDE REGEX "\\.(hpp|cpp|cu|inc)$")
  set(stamp ${PROJECT_BINARY_DIR}/rooms/${room}.checked)
  string(REPLACE ";" "," below "${NANLOCATOR_BELOW_${room}}")
  add_custom_command(
    OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DROOM=${room} -DBELOW=${below} -DSOURCE=${PROJECT_SOURCE_DIR} -DSTAMP=${stamp}
            -P ${PROJECT_SOURCE_DIR}/cmake/CheckRoom.cmake
    DEPENDS ${files} ${rooms_table} ${PROJECT_SOURCE_DIR}/cmake/CheckRoom.cmake
    COMMENT "Includes of the room ${room}" VERBATIM)
  add_custom_target(nanlocator_room_${room}_includes DEPENDS ${stamp})
  add_library(nanlocator_room_${room} OBJECT ${arg_SOURCES})
  add_dependencies(nanlocator_room_${room} nanlocator_room_${room}_includes)
  target_compile_features(nanlocator_room_${room} PUBLIC cxx_std_20)
  target_compile_options(nanlocator_room_${room} PRIVATE -Wall -Wextra -Wshadow -Wno-unknown-pragmas)
  target_compile_options(nanlocator_room_${room} PRIVATE
                         $<$<CONFIG:Release>:$<IF:$<BOOL:${arg_ONLY_ON_FINDINGS}>,-O1,-O2>>)
  target_compile_definitions(nanlocator_room_${room} PRIVATE NANLOCATOR_VERSION="${PROJECT_VERSION}")
  target_include_directories(nanlocator_room_${room} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(nanlocator_room_${room} PRIVATE nlohmann_json::nlohmann_json ${arg_LIBRARIES})
endfunction()

function(nanlocator_link_room target room)
  set(needed ${room})
  set(downwards ${NANLOCATOR_ROOMS})
  list(REVERSE downwards)  # the linker takes from an archive only what earlier ones need
  foreach(each IN LISTS downwards)
    if(NOT each IN_LIST needed)
      continue()
    endif()
    list(APPEND needed ${NANLOCATOR_BELOW_${each}})
    if(NOT TARGET nanlocator_archive_${each})
      add_library(nanlocator_archive_${each} STATIC EXCLUDE_FROM_ALL $<TARGET_OBJECTS:nanlocator_room_${each}>)
      set_target_properties(nanlocator_archive_${each} PROPERTIES LINKER_LANGUAGE CXX)
    endif()
    target_link_libraries(${target} PRIVATE nanlocator_archive_${each})
  endforeach()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include)
endfunction()
