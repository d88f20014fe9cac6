/* Shared by the products of Q4_K, Q5_K and Q6_K: 16-bit sums times their scales. */
#pragma once

#include <immintrin.h>

namespace {

inline __m256i add_products(__m256i total, __m256i sums, __m256i scales) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(total, sums, scales);
#elif defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(total, sums, scales);
#else
    return _mm256_add_epi32(total, _mm256_madd_epi16(sums, scales));
#endif
}

} // namespace
