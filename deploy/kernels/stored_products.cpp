/* Decides which products of rows and weights in their stored layout our code computes (stored_k_quants.cpp,
 * stored_q8_0.cpp). llama.cpp computes the others. kernels.cmake adds these files; llama.cpp.patch adds the calls.
 */
#include "relayline_hooks.h"
#include "stored_rows.h"

static int rows_max(ggml_type type) {
    return type == GGML_TYPE_Q8_0 ? relayline_q8_0_rows_max : relayline_k_quants_rows_max(type);
}

bool relayline_multiplies(const ggml_tensor * dst) {
    const ggml_tensor * weights = dst->src[0];
    const ggml_tensor * rows = dst->src[1];
    const int first = weights->type == GGML_TYPE_Q8_0 ? 2 : 1; // llama.cpp is as fast for a single row
    return relayline_kernels_on() && first <= rows->ne[1] && rows->ne[1] <= rows_max(weights->type) && rows->type == GGML_TYPE_F32 &&
           ggml_n_dims(weights) <= 2 && ggml_n_dims(rows) <= 2;
}

template <typename row_block>
static product_of_all<row_block> product_of(const ggml_tensor * dst, const void * rows, int64_t first_column,
                                            int64_t end_column, int64_t first_row, int64_t end_row) {
    const ggml_tensor * weights = dst->src[0];
    const int64_t n_blocks = weights->ne[0] / ggml_blck_size(weights->type);
    const size_t weights_bytes = weights->nb[1], out_floats = dst->nb[1] / sizeof(float);
    return {
        (int) n_blocks,
        (int) (end_row - first_row),
        (int) (end_column - first_column),
        (const row_block *) rows + first_row * n_blocks,
        (const char *) weights->data + first_column * weights_bytes,
        weights_bytes,
        (float *) dst->data + first_row * out_floats + first_column,
        out_floats,
    };
}

void relayline_multiply(const ggml_tensor * dst, const void * rows, int64_t first_column, int64_t end_column,
                        int64_t first_row, int64_t end_row) {
    const ggml_type type = dst->src[0]->type;
    if (type == GGML_TYPE_Q8_0) {
        relayline_multiply_q8_0(product_of<block_q8_0>(dst, rows, first_column, end_column, first_row, end_row));
        return;
    }
    const auto all = product_of<block_q8_K>(dst, rows, first_column, end_column, first_row, end_row);
    relayline_multiply_k_quants(type, all);
}
