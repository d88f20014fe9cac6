# Included by the llama-cpp-python build (CMAKE_PROJECT_llama_cpp_INCLUDE) right after its project() call.
# The binding forces llama.cpp's `common` library on through the cache, though nothing in the Python package links
# it. A normal variable set here shadows that cache entry (policy CMP0126), which saves about a third of the build.
set(LLAMA_BUILD_COMMON OFF)
# ggml's own project() call, further down, includes this.
set(CMAKE_PROJECT_ggml_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/ggml_gcc.cmake")

# What the wheel was built with, for built_with.py.
if(SKBUILD_PLATLIB_DIR)
    file(GLOB TOLD RELATIVE "${CMAKE_CURRENT_LIST_DIR}"
        "${CMAKE_CURRENT_LIST_DIR}/*.cmake" "${CMAKE_CURRENT_LIST_DIR}/*.cpp" "${CMAKE_CURRENT_LIST_DIR}/*.h")
    list(SORT TOLD)
    set(MARK "")
    foreach(NAME ${TOLD})
        file(SHA256 "${CMAKE_CURRENT_LIST_DIR}/${NAME}" DIGEST)
        string(APPEND MARK "${NAME} ${DIGEST}\n")
    endforeach()
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/relayline-build.txt" "${MARK}")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/relayline-build.txt" DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
endif()
