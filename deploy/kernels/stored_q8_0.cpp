/* Products of several rows and Q8_0 weights, which llama.cpp does not repack on x86. There two or three rows take more than
 * twice the time of one.
 *
 * Here up to eight rows are multiplied by a row of weights at once, while the next weights are prefetched. 128 is added to
 * the values of the rows. So a dot product is one instruction for unsigned by signed bytes. The excess is the same for all
 * rows and is subtracted.
 *
 * Integer sums are exact, and they are combined in the order of llama.cpp's product of one row. So a row has the same bits
 * alone and among others.
 *
 * On processors without that instruction this was not measured, and llama.cpp's products stay.
 * Figures: docs/results/kernels.md.
 */
#include "stored_rows.h"

#include <vector>

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)

namespace {

constexpr int ROWS_AT_ONCE = 8;
constexpr int AHEAD_BYTES = 2048; // how early weights are prefetched

inline __m256i dot(__m256i total, __m256i unsigned_bytes, __m256i signed_bytes) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(total, unsigned_bytes, signed_bytes);
#else
    return _mm256_dpbusd_avx_epi32(total, unsigned_bytes, signed_bytes);
#endif
}

/* R rows, from row y on, by row x of the weights. `scales` holds the scales of all blocks of all rows. */
template <int R> void multiply_rows(const product_of_all<block_q8_0> & all, const float * scales, int y, int x) {
    const auto * weights = (const block_q8_0 *) (all.weights + x * all.weights_bytes);
    const block_q8_0 * rows = all.rows + (int64_t) y * all.n_blocks;
    const __m256i zero = _mm256_setzero_si256(), too_large = _mm256_set1_epi8((char) 128);
    __m256 sums[R];
    for (int r = 0; r < R; r++) {
        sums[r] = _mm256_setzero_ps();
    }
    for (int b = 0; b < all.n_blocks; b++) {
        _mm_prefetch((const char *) (weights + b) + AHEAD_BYTES, _MM_HINT_T0);
        const __m256i values = _mm256_loadu_si256((const __m256i *) weights[b].qs);
        const __m256i correction = _mm256_sub_epi32(zero, dot(zero, too_large, values));
        const __m256 d = _mm256_set1_ps(single(weights[b].d));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int64_t at = (int64_t) r * all.n_blocks + b;
            const __m256i row = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *) rows[at].qs), too_large);
            const __m256 both = _mm256_mul_ps(d, _mm256_set1_ps(scales[(int64_t) y * all.n_blocks + at]));
            sums[r] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot(correction, row, values)), sums[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        all.out[(y + r) * all.out_floats + x] = sum(sums[r]);
    }
}

template <int R> void multiply_up_to(const product_of_all<block_q8_0> & all, const float * scales, int y, int x) {
    if constexpr (R > 1) {
        if (all.n_rows - y < R) {
            return multiply_up_to<R - 1>(all, scales, y, x);
        }
    }
    multiply_rows<R>(all, scales, y, x);
}

} // namespace

const int relayline_q8_0_rows_max = 16; // more rows are split into parts, and each part reads all weights

void relayline_multiply_q8_0(const product_of_all<block_q8_0> & all) {
    static thread_local std::vector<float> scales;
    scales.resize((size_t) all.n_rows * all.n_blocks);
    for (size_t i = 0; i < scales.size(); i++) {
        scales[i] = single(all.rows[i].d);
    }
    for (int x = 0; x < all.n_weights; x++) {
        for (int y = 0; y < all.n_rows; y += ROWS_AT_ONCE) {
            multiply_up_to<ROWS_AT_ONCE>(all, scales.data(), y, x);
        }
    }
}

#else

const int relayline_q8_0_rows_max = 0;

void relayline_multiply_q8_0(const product_of_all<block_q8_0> &) {}

#endif
