/* Products of rows and repacked Q4_K weights (eight columns side by side), in place of llama.cpp's.
 *
 * llama.cpp's kernels shuffle rows and weights together. Here the values of a row are repeated along a register as they are
 * loaded. Two or three rows beyond a multiple of four are multiplied together: that takes a third of llama.cpp's time. Four
 * rows take 60 % to 90 % (docs/results/kernels.md).
 *
 * Integer sums are exact. Each block of 256 values is added to the product in one step, for any number of rows. So a row
 * has the same bits alone and among others. (From four rows on, llama.cpp adds a quarter of a block at a time.)
 *
 * kernels.cmake adds this file if the processor has AVX2.
 */
#include "add_products.h"
#include "repack_rows.h"

namespace {

/* A block has 256 values in eight parts of 32. Each part has a scale and a minimum of six bits. Two parts share their
 * bytes: one has the lower nibbles, the other the upper ones. */
struct q4_K {
    using weights_t = block_q4_Kx8;
    using in_turns_t = block_q8_Kx4;
    using apart_t = block_q8_K;

    static constexpr int PART = 32, PAIRS = QK_K / PART / 2;
    static constexpr int ROWS_AT_ONCE = 16; // the scales and nibbles of a block are unpacked once for all of them

    /* The 16-bit sums of the values of both parts of a pair, and the scales. */
    template <int R> struct row_sums {
        int32_t parts[PAIRS][R];
        float   d[R];
    };

    static int32_t both(int32_t first, int32_t last) { return (first & 0xFFFF) | (uint32_t) last << 16; }

    template <int R> static void sum(const rows_in_turns<in_turns_t> & rows, int b, row_sums<R> & sums) {
        for (int y = 0; y < R; y += 4) {
            const in_turns_t & four = rows.block(b, y);
            for (int pair = 0; pair < PAIRS; pair++) {
                int32_t parts[2][4];
                for (int part = 0; part < 2; part++) {
                    const int8_t * qs = four.qs + 4 * PART * (2 * pair + part);
                    const __m256i first = _mm256_add_epi32(sum_fours(qs, 1), sum_fours(qs + 32, 1));
                    const __m256i last = _mm256_add_epi32(sum_fours(qs + 64, 1), sum_fours(qs + 96, 1));
                    const __m256i all = _mm256_add_epi32(first, last);
                    const __m128i rows_01 = _mm256_castsi256_si128(all), rows_23 = _mm256_extracti128_si256(all, 1);
                    _mm_storeu_si128((__m128i *) parts[part], _mm_hadd_epi32(rows_01, rows_23));
                }
                for (int r = 0; r < 4; r++) {
                    sums.parts[pair][y + r] = both(parts[0][r], parts[1][r]);
                }
            }
            memcpy(sums.d + y, four.d, sizeof(four.d));
        }
    }

    template <int R> static void sum(const rows_apart<apart_t> & rows, int b, row_sums<R> & sums) {
        for (int r = 0; r < R; r++) {
            const apart_t & block = rows.block(b, r);
            for (int pair = 0; pair < PAIRS; pair++) {
                const int16_t * sixteens = block.bsums + 4 * pair;
                sums.parts[pair][r] = both(sixteens[0] + sixteens[1], sixteens[2] + sixteens[3]);
            }
            sums.d[r] = block.d;
        }
    }

    /* The scales of a part in the lower half, its minima in the upper half; one byte for each column. */
    static __m128i scales_and_minima(const weights_t & w, int part) {
        // For four columns the scales and the minima; for the others the lower bits of both. The rest is not used.
        const __m128i packed = _mm_loadu_si128((const __m128i *) (w.scales + 12 * part));
        const __m128i of_first = _mm_and_si128(packed, _mm_set1_epi8(0x3F));
        const __m128i upper = _mm_slli_epi32(_mm_and_si128(_mm_srli_epi32(packed, 6), _mm_set1_epi8(3)), 4);
        const __m128i lower = _mm_srlv_epi32(_mm_shuffle_epi32(packed, 0xAA), _mm_set_epi32(0, 0, 4, 0));
        const __m128i of_last = _mm_or_si128(upper, _mm_and_si128(lower, _mm_set1_epi8(15)));
        return _mm_unpacklo_epi32(of_first, of_last);
    }

    /* As 16-bit numbers, each four times, for the first four columns or the last four. */
    static __m256i scales_of(__m128i scales, int first_column) {
        const __m256i columns = _mm256_set_epi8(-1, 3, -1, 3, -1, 3, -1, 3, -1, 2, -1, 2, -1, 2, -1, 2, //
                                                -1, 1, -1, 1, -1, 1, -1, 1, -1, 0, -1, 0, -1, 0, -1, 0);
        const __m256i both_halves = _mm256_broadcastsi128_si256(scales);
        return _mm256_shuffle_epi8(both_halves, _mm256_add_epi8(columns, _mm256_set1_epi16((short) first_column)));
    }

    /* The products of unsigned and signed bytes, added in pairs. Sums of four pairs fit in 16 bits. */
    static __m256i dot(const __m256i (&w)[4], const __m256i (&x)[4]) {
        const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x[0]), _mm256_maddubs_epi16(w[1], x[1]));
        const __m256i last = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], x[2]), _mm256_maddubs_epi16(w[3], x[3]));
        return _mm256_add_epi16(first, last);
    }

    template <int C, int R, typename rows_t>
    static void multiply(int n_blocks, float * s, size_t bs, const weights_t * weights, const rows_t & rows,
                         const row_sums<R> * sums) {
        __m256 acc[C][R], acc_minima[C][R];
        for (int c = 0; c < C; c++) {
            for (int r = 0; r < R; r++) {
                acc[c][r] = acc_minima[c][r] = _mm256_setzero_ps();
            }
        }
        for (int b = 0; b < n_blocks; b++) {
            for (int c = 0; c < C; c++) {
                const weights_t & w = weights[c * n_blocks + b];
                if (C > 1) {
                    ask_ahead(w);
                }
                __m256i columns_0123[R], columns_4567[R], minima[R];
                for (int r = 0; r < R; r++) {
                    columns_0123[r] = columns_4567[r] = minima[r] = _mm256_setzero_si256();
                }
                for (int pair = 0; pair < PAIRS; pair++) {
                    add_pair(w, rows, b, pair, sums[b], columns_0123, columns_4567, minima);
                }
                const __m256 d = neighbours_of(w.d), dmin = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) w.dmin));
                for (int r = 0; r < R; r++) {
                    const __m256 row = _mm256_set1_ps(sums[b].d[r]);
                    const __m256 sum = _mm256_cvtepi32_ps(add_neighbours(columns_0123[r], columns_4567[r]));
                    acc[c][r] = _mm256_fmadd_ps(sum, _mm256_mul_ps(d, row), acc[c][r]);
                    acc_minima[c][r] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(minima[r]), _mm256_mul_ps(dmin, row), acc_minima[c][r]);
                }
            }
        }
        for (int c = 0; c < C; c++) {
            for (int r = 0; r < R; r++) {
                _mm256_storeu_ps(s + r * bs + 8 * c, _mm256_sub_ps(in_order(acc[c][r]), acc_minima[c][r]));
            }
        }
    }

    template <int R, typename rows_t>
    static void add_pair(const weights_t & w, const rows_t & rows, int b, int pair, const row_sums<R> & sums,
                         __m256i (&columns_0123)[R], __m256i (&columns_4567)[R], __m256i (&minima)[R]) {
        const __m128i of_parts[] = { scales_and_minima(w, 2 * pair), scales_and_minima(w, 2 * pair + 1) };
        const __m256i * qs = (const __m256i *) w.qs + 8 * pair;
        for (int part = 0; part < 2; part++) {
            __m256i q_0123[4], q_4567[4]; // eight values at a time, columns interleaved
            for (int i = 0; i < 4; i++) {
                const __m256i first = _mm256_loadu_si256(qs + 2 * i), last = _mm256_loadu_si256(qs + 2 * i + 1);
                q_0123[i] = _mm256_and_si256(part ? _mm256_srli_epi16(first, 4) : first, _mm256_set1_epi8(15));
                q_4567[i] = _mm256_and_si256(part ? _mm256_srli_epi16(last, 4) : last, _mm256_set1_epi8(15));
            }
            const __m256i scales_0123 = scales_of(of_parts[part], 0), scales_4567 = scales_of(of_parts[part], 4);
            for (int r = 0; r < R; r++) {
                constexpr int STEP = rows_t::TO_NEXT_EIGHT;
                const int8_t * x = rows.values(b, r) + 4 * STEP * (2 * pair + part);
                const __m256i values[] = { repeat(x), repeat(x + STEP), repeat(x + 2 * STEP), repeat(x + 3 * STEP) };
                columns_0123[r] = add_products(columns_0123[r], dot(q_0123, values), scales_0123);
                columns_4567[r] = add_products(columns_4567[r], dot(q_4567, values), scales_4567);
            }
        }
        const __m128i minima_of_parts = _mm_unpackhi_epi8(of_parts[0], of_parts[1]);
        const __m256i of_columns = _mm256_cvtepu8_epi16(minima_of_parts);
        for (int r = 0; r < R; r++) {
            minima[r] = add_products(minima[r], of_columns, _mm256_set1_epi32(sums.parts[pair][r]));
        }
    }
};

} // namespace

PRODUCTS(q4_K_8x8_q8_K, q4_K, QK_K)
