# Included by every build of ggml (CMAKE_PROJECT_ggml_INCLUDE) right after its project() call: what GCC must be told about
# two of its files. Set at the end of ggml's directory, since src/ must be known by then. A CMake that cannot do that
# (before 3.19) comes with a GCC that knows no AMX.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    # The AMX kernels get a header ahead of them, which says why.
    set(RELAYLINE_AMX_HEADER "${CMAKE_CURRENT_LIST_DIR}/amx_tile_config.h")
    cmake_language(DEFER CALL set_source_files_properties
        "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/amx/mmq.cpp" DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src"
        PROPERTIES COMPILE_OPTIONS "-include;${RELAYLINE_AMX_HEADER}")
    # The kernels of repacked weights hold more values at once than there are registers, and GCC spills them: scheduled
    # with an eye on registers they take less time, with AVX2 7 % (Q4_0) to 20 % (Q4_K) for four rows and more, with
    # AVX-512, which has twice as many, 9 % (Q4_0, by the second of GCC's two ways to weigh registers; 4 % by the first)
    # and 16 % (Q4_K) for four and eight. Measured with GCC 12, see benches/RESULTS.md.
    execute_process(
        COMMAND "${CMAKE_CXX_COMPILER}" -march=native -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE RELAYLINE_MACROS ERROR_QUIET)
    set(RELAYLINE_SCHEDULING "-fschedule-insns;-fsched-pressure")
    if(RELAYLINE_MACROS MATCHES "__AVX512F__")
        list(APPEND RELAYLINE_SCHEDULING "--param=sched-pressure-algorithm=2")
    endif()
    if(RELAYLINE_MACROS MATCHES "__AVX2__")
        cmake_language(DEFER CALL set_source_files_properties
            "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu/arch/x86/repack.cpp" DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/src"
            PROPERTIES COMPILE_OPTIONS "${RELAYLINE_SCHEDULING}")
    endif()
endif()
