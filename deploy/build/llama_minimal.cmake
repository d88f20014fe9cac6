# Included by the llama-cpp-python build (CMAKE_PROJECT_llama_cpp_INCLUDE) right after its project() call.
# The binding forces llama.cpp's `common` library on through the cache, though nothing in the Python package links
# it. A normal variable set here shadows that cache entry (policy CMP0126), which saves about a third of the build.
set(LLAMA_BUILD_COMMON OFF)
# ggml's own project() call, further down, includes this.
set(CMAKE_PROJECT_ggml_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/ggml_gcc.cmake")
