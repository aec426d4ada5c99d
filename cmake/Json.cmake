# nlohmann_json::nlohmann_json, from the system or from the Python package `nlohmann_json` (headers only, without a
# CMake package) beside Torch.
find_package(nlohmann_json 3.10 CONFIG QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    include(${CMAKE_CURRENT_LIST_DIR}/PythonPackage.cmake)
    nanlocator_find_python_package(nlohmann_json json_package)
  endif()
  if(NOT json_package)
    message(FATAL_ERROR "nlohmann_json 3.10 or newer is missing: pip install nlohmann_json, or "
                        "apt-get install nlohmann-json3-dev.")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${json_package}/include)
endif()
