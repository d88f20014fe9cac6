/* Chooses between llama.cpp's AVX-512 and AVX2 products of repacked weights, by the number of rows.
 *
 * llama.cpp has both in one file, and compiler macros decide which of them a build gets. AMD's Zen 4 executes an
 * instruction of 512 bits as two of 256. There the AVX2 code, compiled with AVX-512's registers and dot products, is faster
 * for four, eight and twelve rows. The AVX-512 code is faster for sixteen. Both give the same bits
 * (docs/results/kernels.md).
 *
 * kernels.cmake adds this file on such processors. It compiles llama.cpp's own file with names that end in _wide. Q4_0,
 * MXFP4 and Q4_K are not chosen here; they have products of ours (repack_4_bit.cpp, repack_q4_k.cpp).
 */

/* llama.cpp's file once more: without its AVX-512 code, and with other names for everything it exports. */
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

/* Arguments as in llama.cpp. vy: nr rows of n values, in groups of four rows of n / per_block blocks; nr is a multiple of
 * four. vx: nc columns of weights. s: the result; its rows are bs apart. */
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
