# Included by every build of ggml (CMAKE_PROJECT_ggml_INCLUDE) right after its project() call: what GCC must be told about
# two of its files. Set at the end of ggml's directory, since src/ must be known by then. A CMake that cannot do that
# (before 3.19) comes with a GCC that knows no AMX.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    # The AMX kernels get a header ahead of them, which says why.
    set(RELAYLINE_AMX_HEADER "${CMAKE_CURRENT_LIST_DIR}/amx_tile_config.h")
    cmake_language(DEFER CALL set_source_files_properties
        "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/mmq.cpp" DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src"
        PROPERTIES COMPILE_OPTIONS "-include;${RELAYLINE_AMX_HEADER}")
    # The kernels of repacked weights need more values at once than AVX2 has registers, and GCC spills them: scheduled
    # with an eye on registers they take 7 % (Q4_0) to 20 % (Q4_K) less time for four rows and more (measured with GCC
    # 12, see benches/RESULTS.md). AVX-512 has twice as many registers; nobody has measured there, so nothing is changed.
    execute_process(
        COMMAND "${CMAKE_CXX_COMPILER}" -march=native -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE RELAYLINE_MACROS ERROR_QUIET)
    if(RELAYLINE_MACROS MATCHES "__AVX2__" AND NOT RELAYLINE_MACROS MATCHES "__AVX512F__")
        cmake_language(DEFER CALL set_source_files_properties
            "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/arch/x86/repack.cpp" DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src"
            PROPERTIES COMPILE_OPTIONS "-fschedule-insns;-fsched-pressure")
    endif()
endif()
