# Embeds the page's files into the core library. No tool but CMake is needed.
set(page_dir ${CMAKE_CURRENT_SOURCE_DIR}/report/page)
set(page_assets ${CMAKE_CURRENT_BINARY_DIR}/report/page_assets.cpp)
add_custom_command(
  OUTPUT ${page_assets}
  COMMAND ${CMAKE_COMMAND} -DPAGE=${page_dir} -DOUTPUT=${page_assets} -P ${page_dir}/embed.cmake
  DEPENDS ${page_dir}/page.html ${page_dir}/style.css ${page_dir}/script.js ${page_dir}/embed.cmake
  COMMENT "Embedding the page of the report" VERBATIM)
target_sources(nanlocator_room_report PRIVATE ${page_assets})
