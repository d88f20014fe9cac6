/* Shared by the products of rows and weights in their stored layout (stored_products.cpp and the files it names). */
#pragma once

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"
#include "ggml.h"

#include <immintrin.h>

namespace {

inline float single(ggml_half half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* The sum of eight floats, added in llama.cpp's order. */
inline float sum(__m256 eight) {
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

} // namespace

/* A product of rows, which lie one after another, and rows of weights, which lie `weights_bytes` apart. Rows of the
 * result lie `out_floats` apart. */
template <typename row_block> struct product_of_all {
    int               n_blocks, n_rows, n_weights;
    const row_block * rows;
    const char *      weights;
    size_t            weights_bytes;
    float *           out;
    size_t            out_floats;
};

/* stored_k_quants.cpp: the largest number of rows for which its products are faster (0: never), and the products. */
int relayline_k_quants_rows_max(ggml_type type);
void relayline_multiply_k_quants(ggml_type type, const product_of_all<block_q8_K> & all);

/* stored_q8_0.cpp: the same for Q8_0. */
extern const int relayline_q8_0_rows_max;
void relayline_multiply_q8_0(const product_of_all<block_q8_0> & all);
