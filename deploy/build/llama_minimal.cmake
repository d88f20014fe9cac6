# Included by the llama-cpp-python build (CMAKE_PROJECT_llama_cpp_INCLUDE) right after its project() call.
# The binding forces llama.cpp's `common` library on through the cache, though nothing in the Python package links
# it. A normal variable set here shadows that cache entry (policy CMP0126), which saves about a third of the build.
set(LLAMA_BUILD_COMMON OFF)
# libmtmd, which LLAVA_BUILD adds, encodes images; it reads films by starting ffmpeg, and none are served.
set(MTMD_VIDEO OFF CACHE BOOL "read films" FORCE)
# ggml's own project() call, further down, includes this.
set(CMAKE_PROJECT_ggml_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/../kernels/kernels.cmake")

# What the wheel was built with, for built_with.py: whether with relayline's kernels, and by which files.
if(SKBUILD_PLATLIB_DIR)
    include("${CMAKE_CURRENT_LIST_DIR}/../kernels/mode.cmake")
    relayline_mode(KERNELS)
    set(MARK "kernels ON\n")
    if(KERNELS STREQUAL "OFF")
        set(MARK "kernels OFF\n")
    endif()
    get_filename_component(DEPLOY "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
    file(GLOB TOLD RELATIVE "${DEPLOY}" "${DEPLOY}/build/*.cmake" "${DEPLOY}/kernels/*.cmake" "${DEPLOY}/kernels/*.cpp"
        "${DEPLOY}/kernels/*.h" "${DEPLOY}/kernels/*.patch")
    list(SORT TOLD)
    foreach(NAME ${TOLD})
        file(SHA256 "${DEPLOY}/${NAME}" DIGEST)
        string(APPEND MARK "${NAME} ${DIGEST}\n")
    endforeach()
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/relayline-build.txt" "${MARK}")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/relayline-build.txt" DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
endif()
