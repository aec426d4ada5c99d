# Installs the libraries so that other projects can find_package(nanlocator).
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nanlocator)
set(targets nanlocator_core)
if(NANLOCATOR_CUDA)
  list(APPEND targets nanlocator_cuda)
endif()
if(NANLOCATOR_TORCH)
  list(APPEND targets nanlocator_torch)
endif()
install(TARGETS ${targets} EXPORT nanlocatorTargets COMPONENT library
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/nanlocator DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(EXPORT nanlocatorTargets NAMESPACE nanlocator:: DESTINATION ${config_dir} COMPONENT library)
configure_package_config_file(cmake/nanlocatorConfig.cmake.in ${PROJECT_BINARY_DIR}/nanlocatorConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/nanlocatorConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/nanlocatorConfig.cmake
              ${PROJECT_BINARY_DIR}/nanlocatorConfigVersion.cmake cmake/TorchTargets.cmake cmake/PythonPackage.cmake
        DESTINATION ${config_dir} COMPONENT library)
