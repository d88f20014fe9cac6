/* llama.cpp's products of repacked weights where whole sixteens of rows and the rest are best computed by two kernels.
 *
 * Its kernels for AVX-512 and those for AVX2 stand in one file, and which of them a build gets is the compiler's macros'
 * choice. On a processor whose instructions of 512 bits are two of 256 (AMD's Zen 4) those for AVX2, compiled with
 * AVX-512's registers and dot products, take less time for four, eight and twelve rows, the others for sixteen; both
 * give the same bits (docs/results/kernels.md). kernels.cmake adds this file
 * on such processors, and compiles llama.cpp's own with the names of its products ending in _wide. Not for Q4_0, MXFP4
 * and Q4_K, which have others (repack_4_bit.cpp, repack_q4_k.cpp).
 */

/* That file once more, without its kernels for AVX-512, and with other names for all that it exports. */
#undef __AVX512BW__
#define ggml_quantize_mat_q8_0_4x8 few_quantize_mat_q8_0_4x8
#define ggml_quantize_mat_q8_K_4x8 few_quantize_mat_q8_K_4x8
#define ggml_gemv_q4_0_8x8_q8_0 few_gemv_q4_0_8x8_q8_0
#define ggml_gemv_iq4_nl_8x8_q8_0 few_gemv_iq4_nl_8x8_q8_0
#define ggml_gemv_mxfp4_8x8_q8_0 few_gemv_mxfp4_8x8_q8_0
#define ggml_gemv_q4_K_8x8_q8_K few_gemv_q4_K_8x8_q8_K
#define ggml_gemv_q2_K_8x8_q8_K few_gemv_q2_K_8x8_q8_K
#define ggml_gemm_q4_0_8x8_q8_0 few_gemm_q4_0_8x8_q8_0
#define ggml_gemm_iq4_nl_8x8_q8_0 few_gemm_iq4_nl_8x8_q8_0
#define ggml_gemm_mxfp4_8x8_q8_0 few_gemm_mxfp4_8x8_q8_0
#define ggml_gemm_q4_K_8x8_q8_K few_gemm_q4_K_8x8_q8_K
#define ggml_gemm_q2_K_8x8_q8_K few_gemm_q2_K_8x8_q8_K
#include "ggml-cpu/arch/x86/repack.cpp"
#include "relayline_hooks.h"
#undef ggml_gemm_iq4_nl_8x8_q8_0
#undef ggml_gemm_q2_K_8x8_q8_K

/* Arguments as in llama.cpp: nr rows (a multiple of four) of n values at vy, in fours of n / per_block blocks, with nc
 * columns of weights at vx into rows of s, which are bs apart. */
#define BY_ROWS(product, block, per_block)                                                                             \
    extern "C" void ggml_gemm_##product##_wide(int, float *, size_t, const void *, const void *, int, int);            \
    extern "C" void ggml_gemm_##product(                                                                               \
        int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {                               \
        const int wide = relayline_kernels_on() ? nr - nr % 16 : nr;                                                   \
        if (wide > 0) {                                                                                                \
            ggml_gemm_##product##_wide(n, s, bs, vx, vy, wide, nc);                                                    \
        }                                                                                                              \
        if (wide < nr) {                                                                                               \
            const block * rest = (const block *) vy + (int64_t) (wide / 4) * (n / (per_block));                        \
            few_gemm_##product(n, s + (int64_t) wide * bs, bs, vx, rest, nr - wide, nc);                               \
        }                                                                                                              \
    }
BY_ROWS(iq4_nl_8x8_q8_0, block_q8_0x4, QK8_0)
BY_ROWS(q2_K_8x8_q8_K, block_q8_Kx4, QK_K)
