/* Products of rows by Q4_0 and MXFP4 weights as llama.cpp repacks them (eight columns side by side), in place of its own.
 *
 * What a step of several rows costs beside one of a single row is what batching pays, and that is these functions.
 * llama.cpp's kernels for AVX2 and AVX-512 read the weights' nibbles as signed bytes, of which no instruction makes dot
 * products, so that each takes two; they also shuffle rows and weights into one another. Here nibbles are read as
 * unsigned bytes, too large by a constant, eight values of a row are repeated along a register as they are loaded, and
 * that constant times a row's sums is taken off where its dot products begin. Sums of integers are exact and what follows
 * them is llama.cpp's, in its order: the products are the same to the bit in half the time (benches/RESULTS.md,
 * "Products of four bits"). ggml_gcc.cmake adds this file where the processor has AVX2, and gives llama.cpp's functions
 * other names.
 */
#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"
#include "ggml-cpu/repack.h"
#include "ggml.h"

#include <immintrin.h>

#include <cstring>
#include <vector>

namespace {

/* How far ahead of its use a block of weights is asked for, and how much of the first cache what one pass along n values
 * touches may fill before that pays and several passes side by side do: beyond, rows come from the second cache. */
constexpr int AHEAD_BYTES = 2304, NEAR_BYTES = 24 * 1024, PASSES_SIDE_BY_SIDE = 4;

/* How a type's nibbles become bytes of at most 24 that are too large by TOO_LARGE, and what its eight scales are, in the
 * order in which sums of neighbours come: columns 0 1 4 5 2 3 6 7. */
template <typename block_t> struct weights_of;

template <> struct weights_of<block_q4_0x8> {
    static constexpr int TOO_LARGE = 8;

    static __m256i low_nibbles(__m256i q) { // repacking turned them into signed ones; this turns them back
        return _mm256_and_si256(_mm256_xor_si256(q, _mm256_set1_epi8((char) 0x88)), _mm256_set1_epi8(15));
    }

    static __m256i high_nibbles(__m256i q) {
        const __m256i as_they_were = _mm256_xor_si256(q, _mm256_set1_epi8((char) 0x88));
        return _mm256_and_si256(_mm256_srli_epi16(as_they_were, 4), _mm256_set1_epi8(15));
    }

    static __m256 scales(const block_q4_0x8 & w) {
        return _mm256_cvtph_ps(_mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) w.d), 0xD8));
    }
};

template <> struct weights_of<block_mxfp4x8> {
    static constexpr int TOO_LARGE = 12;

    static __m256i bytes(__m256i nibbles) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) kvalues_mxfp4));
        const __m256i table = _mm256_add_epi8(values, _mm256_set1_epi8(TOO_LARGE));
        return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
    }

    static __m256i low_nibbles(__m256i q) { return bytes(q); }

    static __m256i high_nibbles(__m256i q) { return bytes(_mm256_srli_epi16(q, 4)); }

    static __m256 scales(const block_mxfp4x8 & w) { // halves of powers of two, as ggml_e8m0_to_fp32_half has them
        const __m256i in_order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) w.e));
        const __m256i e = _mm256_permute4x64_epi64(in_order, 0xD8);
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
    }
};

/* What all columns need of R rows of one block beside their values: the sums of those whose place divided by four is
 * even, and odd, as dot products add them up, times what is to be taken off; and the scales. */
template <int R> struct row_sums {
    int32_t taken_off[R][2];
    float   d[R];
};

inline __m256i repeat(const void * eight_bytes) {
    int64_t value;
    memcpy(&value, eight_bytes, sizeof(value));
    return _mm256_set1_epi64x(value);
}

/* start + products of unsigned by signed bytes, summed in fours. The bytes are at most 24 and 128, so that four pairs
 * of products fit in 16 bits. */
inline __m256i dot(__m256i start, const __m256i (&w)[4], const __m256i (&x)[4]) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    for (int i = 0; i < 4; i++) {
        start = _mm256_dpbusd_epi32(start, w[i], x[i]);
    }
    return start;
#elif defined(__AVXVNNI__)
    for (int i = 0; i < 4; i++) {
        start = _mm256_dpbusd_avx_epi32(start, w[i], x[i]);
    }
    return start;
#else
    const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x[0]), _mm256_maddubs_epi16(w[1], x[1]));
    const __m256i last = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], x[2]), _mm256_maddubs_epi16(w[3], x[3]));
    return _mm256_add_epi32(start, _mm256_madd_epi16(_mm256_add_epi16(first, last), _mm256_set1_epi16(1)));
#endif
}

/* `times` the sums of values in fours. */
inline __m256i sum_fours(const int8_t * values, int times) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *) values));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16((short) times));
}

/* Four rows in llama.cpp's block_q8_0x4, where eights of values of each row lie in turns. */
struct rows_in_turns {
    const block_q8_0x4 * blocks;

    static constexpr size_t BYTES_PER_ROW_AND_BLOCK = sizeof(block_q8_0x4) / 4;
    static constexpr int    TO_NEXT_EIGHT = 4 * 8;

    const int8_t * values(int b, int r) const { return blocks[b].qs + 8 * r; }

    void sum(int b, int times, row_sums<4> & sums) const {
        const int8_t * qs = blocks[b].qs;
        const __m256i first = _mm256_add_epi32(sum_fours(qs, times), sum_fours(qs + 32, times));
        const __m256i last = _mm256_add_epi32(sum_fours(qs + 64, times), sum_fours(qs + 96, times));
        _mm256_storeu_si256((__m256i *) sums.taken_off, _mm256_add_epi32(first, last));
        _mm_storeu_ps(sums.d, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) blocks[b].d)));
    }
};

/* One row after another, of n_blocks each. */
struct rows_apart {
    const block_q8_0 * blocks;
    int                n_blocks;

    static constexpr size_t BYTES_PER_ROW_AND_BLOCK = sizeof(block_q8_0);
    static constexpr int    TO_NEXT_EIGHT = 8;

    const int8_t * values(int b, int r) const { return blocks[r * n_blocks + b].qs; }

    template <int R> void sum(int b, int times, row_sums<R> & sums) const {
        for (int r = 0; r < R; r++) {
            const __m256i fours = sum_fours(values(b, r), times);
            const __m128i eights = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
            const __m128i all = _mm_add_epi32(eights, _mm_shuffle_epi32(eights, 0x4E));
            _mm_storel_epi64((__m128i *) sums.taken_off[r], all);
            sums.d[r] = _cvtsh_ss(blocks[r * n_blocks + b].d);
        }
    }
};

/* Sums of neighbours: of columns 0 1 4 5 2 3 6 7. (vphaddd does the same, a little slower.) */
inline __m256i add_neighbours(__m256i columns_0123, __m256i columns_4567) {
    const __m256 first = _mm256_castsi256_ps(columns_0123), last = _mm256_castsi256_ps(columns_4567);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, last, 0xDD));
    return _mm256_add_epi32(even, odd);
}

/* R rows by 8 C columns, whose first products go to s; rows of s are bs apart. */
template <int C, int R, typename block_t, typename rows_t>
inline void multiply(int n_blocks, float * s, size_t bs, const block_t * weights, const rows_t & rows,
                     const row_sums<R> * sums) {
    using type = weights_of<block_t>;
    __m256 acc[C][R];
    for (int c = 0; c < C; c++) {
        for (int r = 0; r < R; r++) {
            acc[c][r] = _mm256_setzero_ps();
        }
    }
    for (int b = 0; b < n_blocks; b++) {
#pragma GCC unroll 4 // or the sums would lie in memory by a computed place
        for (int c = 0; c < C; c++) {
            const block_t & w = weights[c * n_blocks + b];
            if (C > 1) {
                for (int line = 0; line < (b % 4 == 0 ? 3 : 2); line++) { // four blocks are nine lines
                    _mm_prefetch((const char *) &w + AHEAD_BYTES + 64 * line, _MM_HINT_T0);
                }
            }
            __m256i columns_0123[4], columns_4567[4]; // eights of values, in turns
            for (int i = 0; i < 2; i++) {
                const __m256i q_0123 = _mm256_loadu_si256((const __m256i *) w.qs + 2 * i);
                const __m256i q_4567 = _mm256_loadu_si256((const __m256i *) w.qs + 2 * i + 1);
                columns_0123[i] = type::low_nibbles(q_0123);
                columns_4567[i] = type::low_nibbles(q_4567);
                columns_0123[i + 2] = type::high_nibbles(q_0123);
                columns_4567[i + 2] = type::high_nibbles(q_4567);
            }
            const __m256 d = type::scales(w);
            for (int r = 0; r < R; r++) {
                const int8_t * x = rows.values(b, r);
                const __m256i values[] = { repeat(x), repeat(x + rows_t::TO_NEXT_EIGHT),
                                           repeat(x + 2 * rows_t::TO_NEXT_EIGHT), repeat(x + 3 * rows_t::TO_NEXT_EIGHT) };
                const __m256i start = repeat(sums[b].taken_off[r]);
                const __m256i sum = add_neighbours(dot(start, columns_0123, values), dot(start, columns_4567, values));
                const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(sums[b].d[r]));
                acc[c][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[c][r]);
            }
        }
    }
    for (int c = 0; c < C; c++) {
        for (int r = 0; r < R; r++) {
            const __m256d in_order = _mm256_permute4x64_pd(_mm256_castps_pd(acc[c][r]), 0xD8);
            _mm256_storeu_ps(s + r * bs + 8 * c, _mm256_castpd_ps(in_order));
        }
    }
}

/* R rows by n_columns columns. */
template <int R, typename block_t, typename rows_t>
void multiply_all(int n_blocks, float * s, size_t bs, const block_t * weights, const rows_t & rows, int n_columns) {
    static thread_local std::vector<row_sums<R>> sums;
    sums.resize(n_blocks);
    for (int b = 0; b < n_blocks; b++) {
        rows.sum(b, -weights_of<block_t>::TOO_LARGE, sums[b]);
    }
    int x = 0;
    const size_t touched_bytes = n_blocks * (sizeof(block_t) + R * rows_t::BYTES_PER_ROW_AND_BLOCK + sizeof(row_sums<R>));
    if (R > 1 && touched_bytes > NEAR_BYTES) {
        for (constexpr int C = PASSES_SIDE_BY_SIDE; x + 8 * C <= n_columns; x += 8 * C) {
            multiply<C, R>(n_blocks, s + x, bs, weights + (int64_t) x / 8 * n_blocks, rows, sums.data());
        }
    }
    for (; x < n_columns; x += 8) {
        multiply<1, R>(n_blocks, s + x, bs, weights + (int64_t) x / 8 * n_blocks, rows, sums.data());
    }
}

template <typename block_t>
void multiply_fours(int n_blocks, float * s, size_t bs, const block_t * weights, const block_q8_0x4 * rows, int nr, int nc) {
    for (int y = 0; y < nr; y += 4) {
        const rows_in_turns four = { rows + (int64_t) y / 4 * n_blocks };
        multiply_all<4>(n_blocks, s + (int64_t) y * bs, bs, weights, four, nc);
    }
}

template <typename block_t>
void multiply_rest(int n_blocks, float * s, size_t bs, const block_t * weights, const block_q8_0 * blocks, int nr, int nc) {
    const rows_apart rows = { blocks, n_blocks };
    switch (nr) {
        case 1: return multiply_all<1>(n_blocks, s, bs, weights, rows, nc);
        case 2: return multiply_all<2>(n_blocks, s, bs, weights, rows, nc);
        case 3: return multiply_all<3>(n_blocks, s, bs, weights, rows, nc);
        default: GGML_ABORT("%d rows are no rest of fours", nr);
    }
}

} // namespace

/* Arguments as llama.cpp has them: nr rows of n values at vy (a multiple of four, and for gemv up to three), by nc columns
 * of weights (a multiple of eight) at vx, into rows of s, which are bs apart. */
#define PRODUCTS(type, block_t)                                                                                        \
    extern "C" void ggml_gemm_##type##_8x8_q8_0(                                                                       \
        int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {                               \
        multiply_fours(n / QK8_0, s, bs, (const block_t *) vx, (const block_q8_0x4 *) vy, nr, nc);                     \
    }                                                                                                                  \
    extern "C" void ggml_gemv_##type##_8x8_q8_0(                                                                       \
        int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {                               \
        multiply_rest(n / QK8_0, s, bs, (const block_t *) vx, (const block_q8_0 *) vy, nr, nc);                        \
    }
PRODUCTS(q4_0, block_q4_0x8)
PRODUCTS(mxfp4, block_mxfp4x8)
