# What every build of ggml by GCC needs where the processor has AMX: to live through its first step, and to compute all
# products. Headers ahead of its files for AMX say why. Nothing else of llama.cpp is changed. Included like kernels.cmake,
# or by it. A CMake that cannot defer (before 3.19) comes with a GCC that knows no AMX.
function(relayline_header FILE HEADER)
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/${FILE}" DIRECTORY src
        PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${HEADER}")
endfunction()

function(relayline_amx)
    relayline_header(mmq.cpp amx_batches.h)
    relayline_header(amx.cpp amx_operands.h)
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    cmake_language(DEFER CALL relayline_amx)
endif()
