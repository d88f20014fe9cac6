/* Products of rows and Q6_K or Q5_K weights, which llama.cpp does not repack on x86.
 *
 * llama.cpp multiplies up to seven rows one by one, and unpacks each block of weights again for every row. From eight rows
 * on it computes tiles of sixteen, filled or not.
 *
 * Here a block is unpacked once for up to eight rows. As many blocks of rows as fit the L1 cache are multiplied by sixteen
 * rows of weights before the next ones. A row of weights is prefetched while the previous one is multiplied.
 *
 * Integer sums are exact, and they are combined in the order of llama.cpp's product of one row. So a row has the same bits
 * alone and among others.
 *
 * kernels.cmake adds this file; llama.cpp.patch adds the calls. Figures: docs/results/kernels.md.
 */
#include "add_products.h"
#include "stored_rows.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int ROWS_AT_ONCE = 8, WEIGHTS_AT_ONCE = 16;
constexpr int TILE_ROWS = 16; // of llama.cpp's tiles. A full tile is faster than this code, except where noted
constexpr int NEAR_BYTES = 20 * 1024; // of rows, in an L1 cache of 32 KiB
constexpr int VECTORS = QK_K / 32;

/* The product of a row and a row of weights so far: eight sums, and the amounts that the minima subtract. */
struct product_t {
    __m256 sums;
    float  minima;
};

/* A block has 256 values of six bits, in sixteen parts with scales of eight bits. 32 is subtracted from each value. */
struct q6_K {
    using weights_t = block_q6_K;

#ifdef __AVX512VNNI__
    static constexpr int ROWS_MAX = TILE_ROWS - 1;
#else
    static constexpr int ROWS_MAX = 64;
#endif

    const weights_t & w;
    __m128i           scales;

    q6_K(const weights_t & w) : w(w), scales(_mm_loadu_si128((const __m128i *) w.scales)) {}

    __m256i first_sums(const block_q8_K & row) const {
        const __m256i sums_of_parts = _mm256_loadu_si256((const __m256i *) row.bsums);
        const __m256i scaled = _mm256_madd_epi16(sums_of_parts, _mm256_cvtepi8_epi16(scales));
        return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(scaled, 5));
    }

    __m256i values(int vector) const {
        const int part = vector % 4, half = vector / 4;
        const __m256i lower = _mm256_loadu_si256((const __m256i *) (w.ql + 64 * half + 32 * (part % 2)));
        const __m256i upper = _mm256_loadu_si256((const __m256i *) (w.qh + 32 * half));
        const __m256i nibbles = _mm256_and_si256(_mm256_srli_epi16(lower, part / 2 * 4), _mm256_set1_epi8(15));
        const __m256i in_place =
            part < 2 ? _mm256_slli_epi16(upper, 4 - 2 * part) : _mm256_srli_epi16(upper, 2 * part - 4);
        return _mm256_or_si256(nibbles, _mm256_and_si256(in_place, _mm256_set1_epi8(0x30)));
    }

    __m256i scales_of(int vector) const {
        const __m128i first = _mm_set1_epi8((char) (2 * vector));
        const __m128i both = _mm_add_epi8(first, _mm_set_epi8(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
        return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, both));
    }

    void add(product_t & to, __m256i sums, const block_q8_K & row) const {
        const __m256 d = _mm256_set1_ps(row.d * single(w.d));
        to.sums = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sums), to.sums);
    }
};

/* A block has 256 values of five bits, in eight parts with scales and minima of six bits. */
struct q5_K {
    using weights_t = block_q5_K;

    static constexpr int ROWS_MAX = TILE_ROWS - 1;

    const weights_t & w;
    __m256i           scales; // 16 bits each, the same in both halves
    __m128i           minima;

    q5_K(const weights_t & w) : w(w) {
        // Twelve bytes. The first eight hold four scales and four minima in their lower six bits. Their upper bits
        // belong to the other four of each, whose lower bits are the nibbles of the last four bytes.
        uint32_t packed[3];
        memcpy(packed, w.scales, sizeof(packed));
        const uint32_t six = 0x3F3F3F3F, four = 0x0F0F0F0F, two = 0x03030303;
        const uint32_t last_scales = (packed[2] & four) | ((packed[0] >> 6) & two) << 4;
        const uint32_t last_minima = ((packed[2] >> 4) & four) | ((packed[1] >> 6) & two) << 4;
        const __m128i all = _mm_set_epi32(last_minima, packed[1] & six, last_scales, packed[0] & six);
        scales = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(all));
        minima = _mm_cvtepu8_epi16(_mm_srli_si128(all, 8));
    }

    __m256i first_sums(const block_q8_K &) const { return _mm256_setzero_si256(); }

    __m256i values(int vector) const {
        const __m256i lower = _mm256_loadu_si256((const __m256i *) (w.qs + 32 * (vector / 2)));
        const __m256i upper = _mm256_loadu_si256((const __m256i *) w.qh);
        const __m256i nibbles = _mm256_and_si256(_mm256_srli_epi16(lower, vector % 2 * 4), _mm256_set1_epi8(15));
        const __m256i in_place =
            vector < 4 ? _mm256_slli_epi16(upper, 4 - vector) : _mm256_srli_epi16(upper, vector - 4);
        return _mm256_or_si256(nibbles, _mm256_and_si256(in_place, _mm256_set1_epi8(0x10)));
    }

    __m256i scales_of(int vector) const {
        return _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (2 * vector | (2 * vector + 1) << 8)));
    }

    void add(product_t & to, __m256i sums, const block_q8_K & row) const {
        const __m256 d = _mm256_set1_ps(row.d * single(w.data.data.d));
        to.sums = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sums), to.sums);
        const __m128i * sixteens = (const __m128i *) row.bsums;
        const __m128i parts = _mm_hadd_epi16(_mm_loadu_si128(sixteens), _mm_loadu_si128(sixteens + 1));
        __m128i taken = _mm_madd_epi16(minima, parts);
        taken = _mm_add_epi32(taken, _mm_shuffle_epi32(taken, 0x4E));
        taken = _mm_add_epi32(taken, _mm_shuffle_epi32(taken, 0xB1));
        to.minima += -row.d * single(w.data.data.dmin) * (float) _mm_cvtsi128_si32(taken);
    }
};

using all_t = product_of_all<block_q8_K>;

/* The first n_blocks blocks of a row of weights, multiplied by those of R rows. */
template <typename type, int R>
void add_blocks(const all_t & all, const typename type::weights_t * weights, const block_q8_K * first_row,
                int n_blocks, product_t * products) {
    for (int b = 0; b < n_blocks; b++) {
        for (size_t i = 0; i < sizeof(*weights); i += 64) {
            _mm_prefetch((const char *) (weights + b) + all.weights_bytes + i, _MM_HINT_T0);
        }
        const type block(weights[b]);
        const block_q8_K * rows = first_row + b;
        __m256i sums[R];
        for (int r = 0; r < R; r++) {
            sums[r] = block.first_sums(rows[r * all.n_blocks]);
        }
#pragma GCC unroll 8
        for (int vector = 0; vector < VECTORS; vector++) {
            const __m256i values = block.values(vector), scales = block.scales_of(vector);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256i row = _mm256_loadu_si256((const __m256i *) rows[r * all.n_blocks].qs + vector);
                sums[r] = add_products(sums[r], _mm256_maddubs_epi16(values, row), scales);
            }
        }
        for (int r = 0; r < R; r++) {
            block.add(products[r], sums[r], rows[r * all.n_blocks]);
        }
    }
}

/* R rows, from row y on, by all weights. */
template <typename type, int R> void multiply_rows(const all_t & all, int y) {
    constexpr int BLOCKS = NEAR_BYTES / (R * (int) sizeof(block_q8_K));
    const block_q8_K * rows = all.rows + (int64_t) y * all.n_blocks;
    for (int x = 0; x < all.n_weights; x += WEIGHTS_AT_ONCE) {
        const int n = std::min(WEIGHTS_AT_ONCE, all.n_weights - x);
        product_t products[WEIGHTS_AT_ONCE][R] = {};
        for (int b = 0; b < all.n_blocks; b += BLOCKS) {
            for (int i = 0; i < n; i++) {
                const auto * weights = (const typename type::weights_t *) (all.weights + (x + i) * all.weights_bytes);
                add_blocks<type, R>(all, weights + b, rows + b, std::min(BLOCKS, all.n_blocks - b), products[i]);
            }
        }
        for (int i = 0; i < n; i++) {
            for (int r = 0; r < R; r++) {
                all.out[(y + r) * all.out_floats + x + i] = sum(products[i][r].sums) + products[i][r].minima;
            }
        }
    }
}

template <typename type, int R> void multiply_up_to(const all_t & all, int y) {
    if constexpr (R > 1) {
        if (all.n_rows - y < R) {
            return multiply_up_to<type, R - 1>(all, y);
        }
    }
    multiply_rows<type, R>(all, y);
}

template <typename type> void multiply_all(const all_t & all) {
    for (int y = 0; y < all.n_rows; y += ROWS_AT_ONCE) {
        multiply_up_to<type, ROWS_AT_ONCE>(all, y);
    }
}

} // namespace

int relayline_k_quants_rows_max(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q6_K: return q6_K::ROWS_MAX;
        case GGML_TYPE_Q5_K: return q5_K::ROWS_MAX;
        default: return 0;
    }
}

void relayline_multiply_k_quants(ggml_type type, const product_of_all<block_q8_K> & all) {
    type == GGML_TYPE_Q6_K ? multiply_all<q6_K>(all) : multiply_all<q5_K>(all);
}
