/* Included before llama.cpp's AMX kernels (amx/mmq.cpp), which it includes in turn, under other names.
 *
 * ggml's products may have several matrices: the third and fourth dimension of their operands. llama.cpp's AMX kernels
 * write each matrix but the first at four times its offset, since they add bytes to a pointer to floats. And where all
 * matrices share one matrix of weights, they read the bytes behind it. Recurrent models have one matrix for each stream
 * of a step: they got wrong numbers, or the process died. Here all matrices of rows are one.
 *
 * Rows that are not contiguous are moved together first, see amx_operands.h.
 */
#include "amx_tile_config.h"
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#define ggml_backend_amx_desired_wsize llama_amx_desired_wsize
#define ggml_backend_amx_mul_mat llama_amx_mul_mat
#include "amx/mmq.cpp"
#undef ggml_backend_amx_desired_wsize
#undef ggml_backend_amx_mul_mat

#ifdef RELAYLINE_AMX_FEW_ROWS  // kernels.cmake defines it in builds with relayline's kernels
#include "amx_few_rows.h"
#endif

/* wire/common/faulty_amx.py looks for this name. */
extern "C" {
    extern const int relayline_amx_batches;
    const int relayline_amx_batches = 1;
}

namespace {

/* A contiguous tensor, all of whose matrices are one. */
ggml_tensor as_matrix(const ggml_tensor * tensor, void * data) {
    ggml_tensor matrix = *tensor;
    matrix.ne[1] = ggml_nrows(tensor);
    matrix.ne[2] = matrix.ne[3] = 1;
    matrix.nb[1] = tensor->ne[0] * sizeof(float);
    matrix.nb[2] = matrix.nb[3] = matrix.ne[1] * matrix.nb[1];
    matrix.data = data;
    return matrix;
}

/* Bytes of the rows where they have to be moved together; 0 where they lie so. */
size_t moved_size(const ggml_tensor * rows) {
    return ggml_is_contiguous(rows) ? 0 : ggml_nrows(rows) * rows->ne[0] * sizeof(float);
}

/* Where they are moved to: behind the kernels' part of the work space. */
size_t place_of_moved(const ggml_tensor * products) {
    return GGML_PAD(llama_amx_desired_wsize(products), 64);
}

/* Move this thread's share of the rows. */
void move(const ggml_compute_params * params, const ggml_tensor * rows, char * to) {
    const size_t row_size = rows->ne[0] * sizeof(float);
    for (int64_t row = params->ith; row < ggml_nrows(rows); row += params->nth) {
        const int64_t i1 = row % rows->ne[1], matrix = row / rows->ne[1];
        const int64_t i2 = matrix % rows->ne[2], i3 = matrix / rows->ne[2];
        const char * from = (const char *) rows->data + i1 * rows->nb[1] + i2 * rows->nb[2] + i3 * rows->nb[3];
        memcpy(to + row * row_size, from, row_size);
    }
}

}  // namespace

size_t ggml_backend_amx_desired_wsize(const struct ggml_tensor * products) {
    return place_of_moved(products) + moved_size(products->src[1]);
}

void ggml_backend_amx_mul_mat(const ggml_compute_params * params, struct ggml_tensor * products) {
    ggml_tensor rows = as_matrix(products->src[1], products->src[1]->data);
    if (moved_size(products->src[1]) > 0) {
        rows.data = (char *) params->wdata + place_of_moved(products);
        move(params, products->src[1], (char *) rows.data);
        ggml_barrier(params->threadpool);
    }
    ggml_tensor of_all = as_matrix(products, products->data);
    of_all.src[1] = &rows;
#ifdef RELAYLINE_AMX_FEW_ROWS
    if (multiply_few_rows(params, &of_all)) {
        return;
    }
#endif
    llama_amx_mul_mat(params, &of_all);
}

/* The file itself follows; its body was included above. */
#undef __AMX_INT8__
#endif
