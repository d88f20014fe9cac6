/* Chooses between llama.cpp's two products for AMX, by the number of rows.
 *
 * llama.cpp multiplies one row with dot products of vectors, and more rows in tiles. Before it multiplies, a tile unpacks
 * its weights, which takes as long for two rows as for sixteen. So a step of two rows took 2.5 times as long as one of one
 * row. Here a few rows go through the product of one row, one after another over each block of weights: all but the
 * first row find the block in the cache. Both products give the same bits (docs/results/kernels.md).
 *
 * Included by amx_batches.h behind llama.cpp's amx/mmq.cpp, in builds with relayline's kernels.
 */
#include "relayline_hooks.h"

namespace {

/* The most rows that are faster one by one; measured, see docs/results/kernels.md. */
int few_rows(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return 6;
        case GGML_TYPE_Q4_1: return 6;
        case GGML_TYPE_Q4_K: return 4;
        case GGML_TYPE_Q6_K: return 4;
        case GGML_TYPE_Q8_0: return 4;
        case GGML_TYPE_IQ4_XS: return 3;
        case GGML_TYPE_Q5_K: return 2;
        default: return 0;  // F16: its products take no tiles
    }
}

/* Multiply rows that are quantised already by this thread's share of the columns, in blocks of n_tiles tiles. */
template <typename vec_dot_type, typename type, int blck_size, int n_tiles>
void multiply_by_blocks(const ggml_compute_params * params, ggml_tensor * dst) {
    constexpr int kTilesN = n_tiles;  // this name and others below are those of the macro
    constexpr int BLOCK_N = TILE_N * kTilesN;
    const ggml_tensor * src0 = dst->src[0];
    const int64_t src0_offset = 0;
    const int N = dst->ne[0], ldc = N;
    const int KB = src0->ne[0] / blck_size;
    const int TILE_SIZE = get_tile_size<type>();
    parallel_for_ggml(params, div_up(N, BLOCK_N), [&](int begin, int end) {
        for (int nb = begin; nb < end; ++nb) {
            const int nb_start = nb * BLOCK_N;
            for (int64_t row = 0; row < dst->ne[1]; ++row) {
                const char * wdata_batch = (const char *) params->wdata + row * KB * sizeof(vec_dot_type);
                const int64_t dst_offset = row * N;
                switch (std::min(BLOCK_N, N - nb_start)) {
                    case 128: LAUNCH_TINYGEMM_KERNEL_VNNI(128); break;
                    case 96: LAUNCH_TINYGEMM_KERNEL_VNNI(96); break;
                    case 64: LAUNCH_TINYGEMM_KERNEL_VNNI(64); break;
                    default: LAUNCH_TINYGEMM_KERNEL_VNNI(32);
                }
            }
        }
    });
}

/* Compute this thread's share of a matrix of products. Returns false, on all threads, if llama.cpp must compute it. */
bool multiply_few_rows(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_type TYPE = dst->src[0]->type;
    const int n_rows = dst->ne[1], n_values = dst->src[0]->ne[0];
    if (n_rows < 2 || n_rows > few_rows(TYPE) || !relayline_kernels_on()) {
        return false;
    }
    const float * rows = (const float *) dst->src[1]->data;
    GGML_DISPATCH_QTYPES(TYPE, [&] {
        const size_t row_size = n_values / blck_size * sizeof(vec_dot_type);
        parallel_for_ggml(params, n_rows, [&](int begin, int end) {
            for (int64_t row = begin; row < end; ++row) {
                from_float<vec_dot_type>(rows + row * n_values, (char *) params->wdata + row * row_size, n_values);
            }
        });
        ggml_barrier(params->threadpool);
        // Wide blocks share more of a row's work; with many threads there would be too few of them.
        if (dst->ne[0] >= 4 * 128 * params->nth) {
            multiply_by_blocks<vec_dot_type, type, blck_size, 8>(params, dst);
        } else {
            multiply_by_blocks<vec_dot_type, type, blck_size, 2>(params, dst);
        }
    });
    return true;
}

}  // namespace
