# Included by relayline's build of ggml (CMAKE_PROJECT_ggml_INCLUDE) right after its project() call: our products and our
# attention, and what GCC is told about some files. Set at the end of ggml's directory, since src/ must be known by then.
# README.md says what each file is for.
set(RELAYLINE_KERNELS "" CACHE STRING
    "OFF: llama.cpp as it comes. REQUIRED: stop where the kernels cannot be compiled in. Else they are where they can be.")
include("${CMAKE_CURRENT_LIST_DIR}/mode.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/ggml_amx.cmake")

# Says why our kernels are not in this build, and stops it where it was told that it needs them (RELAYLINE_KERNELS=REQUIRED).
function(relayline_left_out REASON)
    set(TEXT "relayline's kernels are left out of this build of llama.cpp: ${REASON}")
    relayline_mode(MODE)
    if(MODE STREQUAL "REQUIRED")
        message(FATAL_ERROR "${TEXT}")
    endif()
    message(STATUS "${TEXT}")
endfunction()

# The same where something is wrong that a person should see to. A build for a GPU goes on: it needs no kernels.
function(relayline_unfit REASON)
    foreach(BACKEND CUDA HIP MUSA VULKAN METAL SYCL OPENCL CANN WEBGPU)
        if(GGML_${BACKEND})
            relayline_left_out("${REASON}")
            return()
        endif()
    endforeach()
    message(FATAL_ERROR "${REASON}. RELAYLINE_KERNELS=off builds without relayline's kernels")
endfunction()

# Has ggml-cpu's repack.cpp, ops.cpp and ggml-cpu.c compiled from copies with llama.cpp.patch in them. FAILED says why that
# cannot be, and is empty else. A patch with an offset is taken; one whose context has changed is not.
function(relayline_patch SOURCES FAILED)
    set(FILES repack.cpp ops.cpp ggml-cpu.c)
    set(COPIES "${CMAKE_CURRENT_BINARY_DIR}/relayline")
    set(PATCH_FILE "${OWN}/llama.cpp.patch")
    set(${FAILED} "" PARENT_SCOPE)
    file(REMOVE_RECURSE "${COPIES}")
    foreach(FILE ${FILES})
        file(COPY "${SOURCES}/${FILE}" DESTINATION "${COPIES}/ggml-cpu")
    endforeach()
    find_program(RELAYLINE_PATCH patch)
    find_program(RELAYLINE_GIT git)
    if(RELAYLINE_PATCH)
        set(APPLY "${RELAYLINE_PATCH}" --batch --forward --fuzz=0 --strip=1 "--input=${PATCH_FILE}")
    elseif(RELAYLINE_GIT)
        # Else git would look for a repository above, and pass over files that are outside of it.
        set(APPLY "${CMAKE_COMMAND}" -E env "GIT_CEILING_DIRECTORIES=${CMAKE_CURRENT_BINARY_DIR}"
            "${RELAYLINE_GIT}" apply "${PATCH_FILE}")
    else()
        set(${FAILED} "relayline's kernels need patch or git, and neither is installed" PARENT_SCOPE)
        return()
    endif()
    execute_process(COMMAND ${APPLY} WORKING_DIRECTORY "${COPIES}"
        OUTPUT_VARIABLE TROUBLE ERROR_VARIABLE TROUBLE RESULT_VARIABLE CODE)
    if(NOT CODE EQUAL 0)
        set(${FAILED} "llama.cpp.patch does not fit this llama.cpp: ${TROUBLE}" PARENT_SCOPE)
        return()
    endif()
    get_target_property(COMPILED ggml-cpu SOURCES)
    foreach(FILE ${FILES})
        set(COPY "${COPIES}/ggml-cpu/${FILE}")
        set_source_files_properties("${COPY}" DIRECTORY src PROPERTIES INCLUDE_DIRECTORIES "${SOURCES};${OWN}")
        string(REPLACE "." "\\." PATTERN "${FILE}")
        list(TRANSFORM COMPILED REPLACE "^(.*/)?ggml-cpu/${PATTERN}$" "${COPY}")
    endforeach()
    set_target_properties(ggml-cpu PROPERTIES SOURCES "${COMPILED}")
endfunction()

# Sets RESULT to what GCC defines where it compiles ggml-cpu's C++ files. The build says for which processors that is; the
# machine that builds may be another one.
function(relayline_macros RESULT)
    separate_arguments(FLAGS UNIX_COMMAND "${CMAKE_CXX_COMPILER_ARG1} ${CMAKE_CXX_FLAGS}")
    get_target_property(OPTIONS ggml-cpu COMPILE_OPTIONS)
    if(OPTIONS)
        string(GENEX_STRIP "${OPTIONS}" OPTIONS)  # warnings that are for one language
        list(APPEND FLAGS ${OPTIONS})
    endif()
    execute_process(
        COMMAND "${CMAKE_CXX_COMPILER}" ${FLAGS} -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE MACROS ERROR_VARIABLE TROUBLE RESULT_VARIABLE CODE)
    if(NOT CODE EQUAL 0)
        message(FATAL_ERROR "${CMAKE_CXX_COMPILER} cannot say what it compiles ggml-cpu for: ${TROUBLE}")
    endif()
    set(${RESULT} "${MACROS}" PARENT_SCOPE)
endfunction()

function(relayline_compile)
    set(SOURCES "${CMAKE_CURRENT_SOURCE_DIR}/src/ggml-cpu")
    set(OWN "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
    if(NOT TARGET ggml-cpu)
        relayline_left_out("it has several libraries for processors (GGML_CPU_ALL_VARIANTS), and they know one")
        return()
    endif()
    relayline_macros(MACROS)
    if(NOT MACROS MATCHES "__AVX2__")
        relayline_left_out("it is for processors without AVX2")
        return()
    endif()
    # The kernels of repacked weights hold more values at once than there are registers, and GCC spills them: scheduled
    # with an eye on registers they take less time, with AVX2 7 % (Q4_0) to 20 % (Q4_K) for four rows and more, with
    # AVX-512, which has twice as many, 9 % (Q4_0, by the second of GCC's two ways to weigh registers; 4 % by the first)
    # and 16 % (Q4_K) for four and eight. Measured with GCC 12, see docs/results/kernels.md.
    set(SCHEDULING "-fschedule-insns;-fsched-pressure")
    if(MACROS MATCHES "__AVX512F__")
        list(APPEND SCHEDULING "--param=sched-pressure-algorithm=2")
    endif()
    set(REPACKED "${SOURCES}/arch/x86/repack.cpp")
    set(RENAMED)
    set(OWN_PRODUCTS)
    set(NAMES)

    # Q4_0, MXFP4 and Q4_K have products that take half to nine tenths of the time of llama.cpp's, Q5_K, Q6_K and Q8_0
    # those of several rows; the files say how.
    if(NOT (MACROS MATCHES "__FMA__" AND MACROS MATCHES "__F16C__"))
        relayline_left_out("it is for processors without FMA or F16C")
    else()
        relayline_patch("${SOURCES}" FAILED)
        if(FAILED)
            relayline_unfit("${FAILED}")
            return()
        endif()
        list(APPEND NAMES q4_0 mxfp4 q4_K q5_K q6_K)
        if(MACROS MATCHES "__AVXVNNI__" OR (MACROS MATCHES "__AVX512VNNI__" AND MACROS MATCHES "__AVX512VL__"))
            list(APPEND NAMES q8_0)
        endif()
        list(APPEND NAMES attention)
        foreach(PRODUCT q4_0_8x8_q8_0 mxfp4_8x8_q8_0 q4_K_8x8_q8_K)
            list(APPEND RENAMED "ggml_gemm_${PRODUCT}=ggml_gemm_${PRODUCT}_llama")
            list(APPEND RENAMED "ggml_gemv_${PRODUCT}=ggml_gemv_${PRODUCT}_llama")
        endforeach()
        list(APPEND OWN_PRODUCTS "${OWN}/repack_4_bit.cpp")
        target_sources(ggml-cpu PRIVATE "${OWN}/repack_q4_k.cpp" "${OWN}/stored_products.cpp"
            "${OWN}/stored_k_quants.cpp" "${OWN}/stored_q8_0.cpp" "${OWN}/attend_own_cells.cpp"
            "${OWN}/cell_order.cpp")
    endif()
    # Zen 4, which computes 512 bits in two halves, has better kernels for few rows; the file says more. (Zen 5, with
    # halves or without, has AVX-VNNI beside AVX-512; it was not measured, and neither were Intel's processors.)
    if(MACROS MATCHES "__AVX512BW__" AND MACROS MATCHES "__znver" AND NOT MACROS MATCHES "__AVXVNNI__")
        foreach(PRODUCT iq4_nl_8x8_q8_0 q2_K_8x8_q8_K)
            list(APPEND RENAMED "ggml_gemm_${PRODUCT}=ggml_gemm_${PRODUCT}_wide")
        endforeach()
        list(APPEND OWN_PRODUCTS "${OWN}/repack_few_rows.cpp")
        list(APPEND NAMES iq4_nl q2_K)
    endif()
    if(MACROS MATCHES "__AMX_INT8__" AND MACROS MATCHES "__AVX512VNNI__")
        set_source_files_properties("${SOURCES}/amx/mmq.cpp" DIRECTORY src PROPERTIES
            COMPILE_DEFINITIONS "RELAYLINE_AMX_FEW_ROWS")
        list(APPEND NAMES amx)
    endif()
    set_source_files_properties("${REPACKED}" ${OWN_PRODUCTS} DIRECTORY src PROPERTIES COMPILE_OPTIONS "${SCHEDULING}")
    set_source_files_properties("${REPACKED}" DIRECTORY src PROPERTIES COMPILE_DEFINITIONS "${RENAMED}")
    if(NAMES)
        string(REPLACE ";" " " NAMES "${NAMES}")
        target_sources(ggml-cpu PRIVATE ${OWN_PRODUCTS} "${OWN}/switch.cpp")
        set_source_files_properties("${OWN}/switch.cpp" DIRECTORY src PROPERTIES
            COMPILE_DEFINITIONS "RELAYLINE_KERNELS_IN=\"${NAMES}\"")
        message(STATUS "relayline's kernels in this build of llama.cpp: ${NAMES}")
    endif()
endfunction()

relayline_mode(RELAYLINE_MODE)
if(RELAYLINE_MODE STREQUAL "OFF")
    message(STATUS "relayline's kernels are left out of this build of llama.cpp: RELAYLINE_KERNELS=off")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    cmake_language(DEFER CALL relayline_compile)
else()
    relayline_left_out("they need GCC and CMake 3.19")
endif()
