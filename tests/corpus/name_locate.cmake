# cmake -DNM=nm -DOBJECT=locate_symbol.cpp.o -DFOLDER=folder -P name_locate.cmake
# Writes the linker's name of locate() as a macro, and the linker option that redirects its calls to collect.cpp.
execute_process(COMMAND ${NM} --undefined-only --format=posix ${OBJECT} OUTPUT_VARIABLE symbols
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "_Z[A-Za-z0-9_]*locate[A-Za-z0-9_]*" names "${symbols}")
list(LENGTH names count)
if(NOT count EQUAL 1)
  message(FATAL_ERROR "${OBJECT} leaves undefined, where nanlocator::locate alone is expected:\n${symbols}")
endif()
file(WRITE ${FOLDER}/locate_symbol.hpp "#define NANLOCATOR_LOCATE_SYMBOL \"${names}\"\n")
file(WRITE ${FOLDER}/wrap_locate.rsp "--wrap=${names}\n")
