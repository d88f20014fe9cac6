/* Shared by the products of rows and repacked weights (repack_4_bit.cpp, repack_q4_k.cpp): the layout of the rows, and
 * the number of rows and columns that are multiplied at once.
 *
 * Each product defines:
 *   weights_t        a block of weights, eight columns side by side
 *   in_turns_t       a block of four interleaved rows
 *   apart_t          a block of one row
 *   row_sums<R>      sums over R rows of one block that every column needs, and how to add them up
 *   multiply<C, R>   R rows by 8 C columns
 *   ROWS_AT_ONCE     rows that it takes at once, if there are as many
 */
#pragma once

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"
#include "ggml-cpu/repack.h"
#include "ggml.h"
#include "relayline_hooks.h"

#include <immintrin.h>

#include <cstring>
#include <vector>

namespace {

/* AHEAD_BYTES: how early a block of weights is prefetched. NEAR_BYTES: the part of the L1 cache that one pass along n
 * values may touch. If it touches more, its rows come from the L2 cache, and PASSES_SIDE_BY_SIDE passes at once are
 * faster. With more than SIDE_ROWS_MAX rows, one pass at a time has enough work. */
constexpr int AHEAD_BYTES = 2304, NEAR_BYTES = 24 * 1024, PASSES_SIDE_BY_SIDE = 4, SIDE_ROWS_MAX = 4;

inline __m256i repeat(const void * eight_bytes) {
    int64_t value;
    memcpy(&value, eight_bytes, sizeof(value));
    return _mm256_set1_epi64x(value);
}

/* Sums of four neighbouring values, multiplied by `times`. */
inline __m256i sum_fours(const int8_t * values, int times) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *) values));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16((short) times));
}

/* Adds up one row's sums of four. The lower half of the result holds two sums: over even fours, and over odd ones. */
inline __m128i sum_row(__m256i fours) {
    const __m128i eights = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    return _mm_add_epi32(eights, _mm_shuffle_epi32(eights, 0x4E));
}

/* Sums of neighbours, for columns 0 1 4 5 2 3 6 7. (vphaddd does the same, a little slower.) */
inline __m256i add_neighbours(__m256i columns_0123, __m256i columns_4567) {
    const __m256 first = _mm256_castsi256_ps(columns_0123), last = _mm256_castsi256_ps(columns_4567);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0xDD));
    return _mm256_add_epi32(even, odd);
}

/* The half-precision values of eight columns as floats, in the column order of add_neighbours. */
inline __m256 neighbours_of(const ggml_half * d) {
    return _mm256_cvtph_ps(_mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) d), 0xD8));
}

/* From that order back to 0 1 2 3 4 5 6 7. */
inline __m256 in_order(__m256 neighbours) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(neighbours), 0xD8));
}

/* Prefetch a large block of weights. */
template <typename block_t> inline void ask_ahead(const block_t & w) {
    for (size_t i = 0; i < sizeof(block_t); i += 64) {
        _mm_prefetch((const char *) &w + AHEAD_BYTES + i, _MM_HINT_T0);
    }
}

/* Groups of four rows, n_blocks each. Within a group, the rows' values are interleaved by eights. */
template <typename block_t> struct rows_in_turns {
    const block_t * blocks;
    int             n_blocks;

    static constexpr size_t BYTES_PER_ROW_AND_BLOCK = sizeof(block_t) / 4;
    static constexpr int    TO_NEXT_EIGHT = 4 * 8;

    const block_t & block(int b, int r) const { return blocks[r / 4 * n_blocks + b]; }

    const int8_t * values(int b, int r) const { return block(b, r).qs + 8 * (r % 4); }
};

/* Rows one after another, n_blocks each. */
template <typename block_t> struct rows_apart {
    const block_t * blocks;
    int             n_blocks;

    static constexpr size_t BYTES_PER_ROW_AND_BLOCK = sizeof(block_t);
    static constexpr int    TO_NEXT_EIGHT = 8;

    const block_t & block(int b, int r) const { return blocks[r * n_blocks + b]; }

    const int8_t * values(int b, int r) const { return block(b, r).qs; }
};

/* R rows by n_columns columns. */
template <typename product, int R, typename rows_t>
void multiply_all(int n_blocks, float * s, size_t bs, const typename product::weights_t * weights, const rows_t & rows,
                  int n_columns) {
    using sums_t = typename product::template row_sums<R>;
    static thread_local std::vector<sums_t> sums;
    sums.resize(n_blocks);
    for (int b = 0; b < n_blocks; b++) {
        product::sum(rows, b, sums[b]);
    }
    int x = 0;
    const size_t touched_bytes =
        n_blocks * (sizeof(typename product::weights_t) + R * rows_t::BYTES_PER_ROW_AND_BLOCK + sizeof(sums_t));
    if (R > 1 && R <= SIDE_ROWS_MAX && touched_bytes > NEAR_BYTES) {
        for (constexpr int C = PASSES_SIDE_BY_SIDE; x + 8 * C <= n_columns; x += 8 * C) {
            product::template multiply<C, R>(n_blocks, s + x, bs, weights + (int64_t) x / 8 * n_blocks, rows, sums.data());
        }
    }
    for (; x < n_columns; x += 8) {
        product::template multiply<1, R>(n_blocks, s + x, bs, weights + (int64_t) x / 8 * n_blocks, rows, sums.data());
    }
}

/* Arguments as in llama.cpp. vy: nr rows of n_blocks; nr is a multiple of four. vx: nc columns of weights; nc is a multiple
 * of eight. s: the result; its rows are bs apart. */
template <typename product>
void multiply_fours(int n_blocks, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    const auto * weights = (const typename product::weights_t *) vx;
    const auto * rows = (const typename product::in_turns_t *) vy;
    constexpr int MOST = product::ROWS_AT_ONCE;
    int y = 0;
    for (; y + MOST <= nr; y += MOST) {
        const rows_in_turns<typename product::in_turns_t> many = { rows + (int64_t) y / 4 * n_blocks, n_blocks };
        multiply_all<product, MOST>(n_blocks, s + (int64_t) y * bs, bs, weights, many, nc);
    }
    for (; y < nr; y += 4) {
        const rows_in_turns<typename product::in_turns_t> four = { rows + (int64_t) y / 4 * n_blocks, n_blocks };
        multiply_all<product, 4>(n_blocks, s + (int64_t) y * bs, bs, weights, four, nc);
    }
}

/* The same for one to three rows. */
template <typename product>
void multiply_rest(int n_blocks, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    const auto * weights = (const typename product::weights_t *) vx;
    const rows_apart<typename product::apart_t> rows = { (const typename product::apart_t *) vy, n_blocks };
    switch (nr) {
        case 1: return multiply_all<product, 1>(n_blocks, s, bs, weights, rows, nc);
        case 2: return multiply_all<product, 2>(n_blocks, s, bs, weights, rows, nc);
        case 3: return multiply_all<product, 3>(n_blocks, s, bs, weights, rows, nc);
        default: GGML_ABORT("%d rows are no rest of fours", nr);
    }
}

} // namespace

/* Defines llama.cpp's functions for one product, given the values of a block. With the kernels off they call llama.cpp's
 * own functions, which take the rows beyond a multiple of four one by one. */
#define PRODUCTS(name, product, values)                                                                                \
    extern "C" void ggml_gemm_##name##_llama(int, float *, size_t, const void *, const void *, int, int);              \
    extern "C" void ggml_gemv_##name##_llama(int, float *, size_t, const void *, const void *, int, int);              \
    extern "C" void ggml_gemm_##name(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {  \
        if (!relayline_kernels_on()) {                                                                                 \
            return ggml_gemm_##name##_llama(n, s, bs, vx, vy, nr, nc);                                                 \
        }                                                                                                              \
        multiply_fours<product>(n / values, s, bs, vx, vy, nr, nc);                                                    \
    }                                                                                                                  \
    extern "C" void ggml_gemv_##name(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {  \
        if (!relayline_kernels_on()) {                                                                                 \
            const auto * rows = (const product::apart_t *) vy;                                                         \
            for (int y = 0; y < nr; y++) {                                                                             \
                ggml_gemv_##name##_llama(n, s + (int64_t) y * bs, bs, vx, rows + (int64_t) y * (n / values), 1, nc);   \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        multiply_rest<product>(n / values, s, bs, vx, vy, nr, nc);                                                     \
    }
