# Included by every build of ggml (CMAKE_PROJECT_ggml_INCLUDE) right after its project() call: with GCC one file gets a
# header ahead of it, which says why. Set at the end of ggml's directory, since src/ must be known by then. A CMake that
# cannot do that (before 3.19) comes with a GCC that knows no AMX.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    set(RELAYLINE_AMX_HEADER "${CMAKE_CURRENT_LIST_DIR}/amx_tile_config.h")
    cmake_language(DEFER CALL set_source_files_properties
        "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/mmq.cpp" DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src"
        PROPERTIES COMPILE_OPTIONS "-include;${RELAYLINE_AMX_HEADER}")
endif()
