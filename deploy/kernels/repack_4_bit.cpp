/* Products of rows and repacked Q4_0 or MXFP4 weights (eight columns side by side), in place of llama.cpp's.
 *
 * Most of the extra time of a step with several rows is spent here, so these functions decide what batching costs.
 *
 * llama.cpp's kernels for AVX2 and AVX-512 read the nibbles of the weights as signed bytes. No instruction multiplies two
 * signed bytes, so each dot product takes two. They also shuffle rows and weights together.
 *
 * Here the nibbles are read as unsigned bytes, which are too large by a constant. That constant, times the sum of the row,
 * is subtracted at the start of each dot product. Eight values of a row are repeated along a register as they are loaded.
 *
 * Integer sums are exact, and the later steps are llama.cpp's, in its order. So the products are equal to the bit, in half
 * the time (docs/results/kernels.md).
 *
 * kernels.cmake adds this file if the processor has AVX2, and renames llama.cpp's functions.
 */
#include "repack_rows.h"

namespace {

/* For each type of weights: its nibbles as bytes of at most 24, which are too large by TOO_LARGE, and its eight scales.
 * The scales have the column order of the sums of neighbours: 0 1 4 5 2 3 6 7. */
template <typename block_t> struct weights_of;

template <> struct weights_of<block_q4_0x8> {
    static constexpr int TOO_LARGE = 8;

    static __m256i low_nibbles(__m256i q) { // repacking made them signed; this undoes it
        return _mm256_and_si256(_mm256_xor_si256(q, _mm256_set1_epi8((char) 0x88)), _mm256_set1_epi8(15));
    }

    static __m256i high_nibbles(__m256i q) {
        const __m256i as_they_were = _mm256_xor_si256(q, _mm256_set1_epi8((char) 0x88));
        return _mm256_and_si256(_mm256_srli_epi16(as_they_were, 4), _mm256_set1_epi8(15));
    }

    static __m256 scales(const block_q4_0x8 & w) { return neighbours_of(w.d); }
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

    static __m256 scales(const block_mxfp4x8 & w) { // half of a power of two each, like ggml_e8m0_to_fp32_half
        const __m256i columns = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) w.e));
        const __m256i e = _mm256_permute4x64_epi64(columns, 0xD8);
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
    }
};

/* start + the products of unsigned and signed bytes, in sums of four. The bytes are at most 24 and 128, so four pairs of
 * products fit in 16 bits. */
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

/* What every column needs of R rows: the scales, and the amounts to subtract. These are sums over a row's even fours and
 * over its odd fours, as the dot products add them up, times TOO_LARGE. */
template <typename block_t> struct four_bits {
    using weights_t = block_t;
    using in_turns_t = block_q8_0x4;
    using apart_t = block_q8_0;
    using type = weights_of<block_t>;

    static constexpr int ROWS_AT_ONCE = 4;

    template <int R> struct row_sums {
        int32_t taken_off[R][2];
        float   d[R];
    };

    static void sum(const rows_in_turns<in_turns_t> & rows, int b, row_sums<4> & sums) {
        constexpr int  times = -type::TOO_LARGE;
        const int8_t * qs = rows.blocks[b].qs;
        const __m256i  first = _mm256_add_epi32(sum_fours(qs, times), sum_fours(qs + 32, times));
        const __m256i  last = _mm256_add_epi32(sum_fours(qs + 64, times), sum_fours(qs + 96, times));
        _mm256_storeu_si256((__m256i *) sums.taken_off, _mm256_add_epi32(first, last));
        _mm_storeu_ps(sums.d, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) rows.blocks[b].d)));
    }

    template <int R> static void sum(const rows_apart<apart_t> & rows, int b, row_sums<R> & sums) {
        for (int r = 0; r < R; r++) {
            const __m128i all = sum_row(sum_fours(rows.values(b, r), -type::TOO_LARGE));
            _mm_storel_epi64((__m128i *) sums.taken_off[r], all);
            sums.d[r] = _cvtsh_ss(rows.block(b, r).d);
        }
    }

    /* R rows by 8 C columns. The first product goes to *s; rows of s are bs apart. */
    template <int C, int R, typename rows_t>
    static void multiply(int n_blocks, float * s, size_t bs, const weights_t * weights, const rows_t & rows,
                         const row_sums<R> * sums) {
        __m256 acc[C][R];
        for (int c = 0; c < C; c++) {
            for (int r = 0; r < R; r++) {
                acc[c][r] = _mm256_setzero_ps();
            }
        }
        for (int b = 0; b < n_blocks; b++) {
#pragma GCC unroll 4 // otherwise the sums would be in memory, at computed addresses
            for (int c = 0; c < C; c++) {
                const weights_t & w = weights[c * n_blocks + b];
                if (C > 1) {
                    for (int line = 0; line < (b % 4 == 0 ? 3 : 2); line++) { // four blocks fill nine cache lines
                        _mm_prefetch((const char *) &w + AHEAD_BYTES + 64 * line, _MM_HINT_T0);
                    }
                }
                __m256i columns_0123[4], columns_4567[4]; // eight values at a time, columns interleaved
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
                    constexpr int STEP = rows_t::TO_NEXT_EIGHT;
                    const int8_t * x = rows.values(b, r);
                    const __m256i values[] = { repeat(x), repeat(x + STEP), repeat(x + 2 * STEP), repeat(x + 3 * STEP) };
                    const __m256i start = repeat(sums[b].taken_off[r]);
                    const __m256i sum = add_neighbours(dot(start, columns_0123, values), dot(start, columns_4567, values));
                    const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(sums[b].d[r]));
                    acc[c][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc[c][r]);
                }
            }
        }
        for (int c = 0; c < C; c++) {
            for (int r = 0; r < R; r++) {
                _mm256_storeu_ps(s + r * bs + 8 * c, in_order(acc[c][r]));
            }
        }
    }
};

} // namespace

PRODUCTS(q4_0_8x8_q8_0, four_bits<block_q4_0x8>, QK8_0)
PRODUCTS(mxfp4_8x8_q8_0, four_bits<block_mxfp4x8>, QK8_0)
