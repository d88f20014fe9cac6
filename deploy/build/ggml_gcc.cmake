# Included by relayline's build of ggml (CMAKE_PROJECT_ggml_INCLUDE) right after its project() call: our products and our
# attention, and what GCC is told about some files. Set at the end of ggml's directory, since src/ must be known by then.
set(RELAYLINE_KERNELS "" CACHE STRING "REQUIRED: stop where our products and our attention cannot be compiled in")
include("${CMAKE_CURRENT_LIST_DIR}/ggml_amx.cmake")

# Has FILE of ggml-cpu, in SOURCES, compiled from a copy that begins with HEAD and has other text in some places, of which
# each must occur once: the names of variables in turns, OLD NEW OLD NEW.
function(relayline_edit SOURCES FILE HEAD)
    file(READ "${SOURCES}/${FILE}" TEXT)
    while(ARGN)
        list(POP_FRONT ARGN OLD NEW)
        string(FIND "${TEXT}" "${${OLD}}" FIRST)
        string(FIND "${TEXT}" "${${OLD}}" LAST REVERSE)
        if(FIRST EQUAL -1 OR NOT FIRST EQUAL LAST)
            message(FATAL_ERROR "llama.cpp's ${FILE} is not the one that ggml_gcc.cmake knows: no single \"${${OLD}}\"")
        endif()
        string(REPLACE "${${OLD}}" "${${NEW}}" TEXT "${TEXT}")
    endwhile()
    set(COPY "${CMAKE_CURRENT_BINARY_DIR}/relayline/${FILE}")
    file(WRITE "${COPY}" "${HEAD}\n${TEXT}")
    set_source_files_properties("${COPY}" DIRECTORY src PROPERTIES INCLUDE_DIRECTORIES "${SOURCES}")
    get_target_property(FILES ggml-cpu SOURCES)
    string(REPLACE "." "\\." PATTERN "${FILE}")
    list(TRANSFORM FILES REPLACE "^(.*/)?ggml-cpu/${PATTERN}$" "${COPY}")
    set_target_properties(ggml-cpu PROPERTIES SOURCES "${FILES}")
endfunction()

# llama.cpp multiplies what rows in fours leave over one by one; our products take them at once.
function(relayline_rest_at_once SOURCES)
    set(LOOP "iter < nrows; iter++) {")
    set(LOOP_AT_ONCE "iter < nrows;) {
            constexpr bool AT_ONCE = INTER_SIZE == 8 && NB_COLS == 8 &&
                (std::is_same_v<BLOC_TYPE, block_q4_0> || std::is_same_v<BLOC_TYPE, block_mxfp4> ||
                 std::is_same_v<BLOC_TYPE, block_q4_K>);
            const int n = AT_ONCE ? nrows - iter : 1;")
    set(ONE_ROW "ne01, src0_ptr + src0_start * nb01,
                                                             src1_ptr + (src1_col_stride * iter), 1 /* nrows */, ncols);")
    set(ALL_ROWS "AT_ONCE ? nb1 / nb0 : ne01, src0_ptr + src0_start * nb01,
                                                             src1_ptr + (src1_col_stride * iter), n, ncols);
            iter += n;")
    relayline_edit("${SOURCES}" repack.cpp "#include <type_traits>" LOOP LOOP_AT_ONCE ONE_ROW ALL_ROWS)
endfunction()

# attend_own_cells.cpp is asked first.
function(relayline_own_cells SOURCES)
    set(CHOICE "    if (use_split_kv_path) {")
    set(ASK_FIRST "    if (relayline_attend(params, dst)) {
        return;
    }
${CHOICE}")
    set(DECLARED "struct ggml_compute_params;\nstruct ggml_tensor;
bool relayline_attend(const ggml_compute_params * params, const ggml_tensor * dst);")
    relayline_edit("${SOURCES}" ops.cpp "${DECLARED}" CHOICE ASK_FIRST)
endfunction()

# stored_products.cpp takes what it multiplies, ahead of tiles, of sgemm and of single rows. (What it is called by is
# declared without headers, since the file asks for things of the system before it includes any.)
function(relayline_stored_products SOURCES)
    set(DECLARED "struct ggml_tensor;
_Bool relayline_multiplies(const struct ggml_tensor * dst);
void relayline_multiply(const struct ggml_tensor * dst, const void * rows, long first_column, long end_column,
                        long first_row, long end_row);")
    set(TILES "if (ggml_compute_forward_mul_mat_tiled(params, dst)) {")
    set(TILES_OF_OTHERS "if (!relayline_multiplies(dst) && ggml_compute_forward_mul_mat_tiled(params, dst)) {")
    set(SGEMM "    if (src1->type != vec_dot_type) {\n        const void* wdata")
    set(SGEMM_OF_OTHERS "    if (src1->type != vec_dot_type && !relayline_multiplies(dst)) {\n        const void* wdata")
    set(CHUNK "    // attempt to reduce false-sharing (does not seem to make a difference)")
    set(ASK_FIRST "    if (!params->use_ref && relayline_multiplies(dst)) {
        relayline_multiply(dst, wdata, ir0_start, ir0_end, ir1_start, ir1_end);
        return;
    }
${CHUNK}")
    relayline_edit("${SOURCES}" ggml-cpu.c "${DECLARED}" TILES TILES_OF_OTHERS SGEMM SGEMM_OF_OTHERS CHUNK ASK_FIRST)
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

# Says why our kernels are not in this build, and stops it where it was told that it needs them (RELAYLINE_KERNELS=REQUIRED).
function(relayline_left_out REASON)
    set(TEXT "relayline's kernels are left out of this build of llama.cpp: ${REASON}")
    if("${RELAYLINE_KERNELS}" STREQUAL "REQUIRED")
        message(FATAL_ERROR "${TEXT}")
    endif()
    message(STATUS "${TEXT}")
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
    # and 16 % (Q4_K) for four and eight. Measured with GCC 12, see benches/RESULTS.md.
    set(SCHEDULING "-fschedule-insns;-fsched-pressure")
    if(MACROS MATCHES "__AVX512F__")
        list(APPEND SCHEDULING "--param=sched-pressure-algorithm=2")
    endif()
    set(REPACKED "${SOURCES}/arch/x86/repack.cpp")
    set(RENAMED)
    set(OWN_PRODUCTS)

    # Q4_0, MXFP4 and Q4_K have products that take half to nine tenths of the time of llama.cpp's, Q5_K, Q6_K and Q8_0
    # those of several rows; the files say how.
    if(NOT (MACROS MATCHES "__FMA__" AND MACROS MATCHES "__F16C__"))
        relayline_left_out("it is for processors without FMA or F16C")
    else()
        foreach(PRODUCT q4_0_8x8_q8_0 mxfp4_8x8_q8_0 q4_K_8x8_q8_K)
            list(APPEND RENAMED "ggml_gemm_${PRODUCT}=ggml_gemm_${PRODUCT}_llama")
            list(APPEND RENAMED "ggml_gemv_${PRODUCT}=ggml_gemv_${PRODUCT}_llama")
        endforeach()
        list(APPEND OWN_PRODUCTS "${OWN}/repack_4_bit.cpp")
        relayline_rest_at_once("${SOURCES}")
        target_sources(ggml-cpu PRIVATE "${OWN}/repack_q4_k.cpp" "${OWN}/stored_products.cpp"
            "${OWN}/stored_k_quants.cpp" "${OWN}/stored_q8_0.cpp" "${OWN}/attend_own_cells.cpp")
        relayline_own_cells("${SOURCES}")
        relayline_stored_products("${SOURCES}")
    endif()
    # Zen 4, which computes 512 bits in two halves, has better kernels for few rows; the file says more. (Zen 5, with
    # halves or without, has AVX-VNNI beside AVX-512; it was not measured, and neither were Intel's processors.)
    if(MACROS MATCHES "__AVX512BW__" AND MACROS MATCHES "__znver" AND NOT MACROS MATCHES "__AVXVNNI__")
        foreach(PRODUCT iq4_nl_8x8_q8_0 q2_K_8x8_q8_K)
            list(APPEND RENAMED "ggml_gemm_${PRODUCT}=ggml_gemm_${PRODUCT}_wide")
        endforeach()
        list(APPEND OWN_PRODUCTS "${OWN}/repack_few_rows.cpp")
    endif()
    set_source_files_properties("${REPACKED}" ${OWN_PRODUCTS} DIRECTORY src PROPERTIES COMPILE_OPTIONS "${SCHEDULING}")
    set_source_files_properties("${REPACKED}" DIRECTORY src PROPERTIES COMPILE_DEFINITIONS "${RENAMED}")
    if(OWN_PRODUCTS)
        target_sources(ggml-cpu PRIVATE ${OWN_PRODUCTS})
    endif()
endfunction()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_VERSION VERSION_LESS 3.19)
    cmake_language(DEFER CALL relayline_compile)
else()
    relayline_left_out("they need GCC and CMake 3.19")
endif()
