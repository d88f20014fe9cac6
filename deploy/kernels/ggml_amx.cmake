# What every build of ggml by GCC needs where the processor has AMX, to live through its first step and to compute products
# of several matrices: its AMX kernels get headers ahead of them, which say why. Nothing else of llama.cpp is changed.
# Included like kernels.cmake, or by it. A CMake that cannot defer (before 3.19) comes with a GCC that knows no AMX.
function(relayline_amx)
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/mmq.cpp" DIRECTORY src
        PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_batches.h")
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    cmake_language(DEFER CALL relayline_amx)
endif()
