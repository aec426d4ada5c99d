# Embeds the phrasebook and the page's files into the core library. No tool but CMake is needed.
set(report_dir ${CMAKE_CURRENT_SOURCE_DIR}/report)
set(report_assets ${CMAKE_CURRENT_BINARY_DIR}/report/assets.cpp)
add_custom_command(
  OUTPUT ${report_assets}
  COMMAND ${CMAKE_COMMAND} -DREPORT=${report_dir} -DOUTPUT=${report_assets} -P ${report_dir}/embed.cmake
  DEPENDS ${report_dir}/phrasebook.txt ${report_dir}/page/page.html ${report_dir}/page/style.css
          ${report_dir}/page/script.js ${report_dir}/embed.cmake
  COMMENT "Embedding the words and the page of the report" VERBATIM)
target_sources(nanlocator_room_report PRIVATE ${report_assets})
