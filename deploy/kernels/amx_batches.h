/* Included before llama.cpp's AMX kernels (amx/mmq.cpp), which it includes in turn, under other names.
 *
 * ggml's products may have several matrices: the third and fourth dimension of their operands. llama.cpp's AMX kernels
 * compute such products wrongly:
 *
 *  - They write each matrix but the first at four times its offset: bytes are added to a pointer to floats.
 *  - Where all matrices share one matrix of weights, they read the bytes behind it.
 *  - Of weights with several matrices they hold the first one alone.
 *
 * Recurrent models have one matrix for each stream of a step, and multi-head latent attention one for each head. They
 * got wrong numbers, or the process died. Here every product is made of products with one matrix.
 */
#include "amx_tile_config.h"
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#define ggml_backend_amx_get_alloc_size llama_amx_get_alloc_size
#define ggml_backend_amx_convert_weight llama_amx_convert_weight
#define ggml_backend_amx_mul_mat llama_amx_mul_mat
#include "amx/mmq.cpp"
#undef ggml_backend_amx_get_alloc_size
#undef ggml_backend_amx_convert_weight
#undef ggml_backend_amx_mul_mat

/* stage/engine/ggml.py looks for this name. */
extern "C" {
    extern const int relayline_amx_batches;
    const int relayline_amx_batches = 1;
}

namespace {

int64_t n_matrices(const ggml_tensor * tensor) {
    return tensor->ne[2] * tensor->ne[3];
}

/* A contiguous tensor as one matrix of n_rows rows. */
ggml_tensor as_matrix(const ggml_tensor * tensor, int64_t n_rows, void * data) {
    ggml_tensor matrix = *tensor;
    matrix.ne[1] = n_rows;
    matrix.ne[2] = matrix.ne[3] = 1;
    matrix.nb[2] = matrix.nb[3] = n_rows * tensor->nb[1];
    matrix.data = data;
    return matrix;
}

void multiply(const ggml_compute_params * params, ggml_tensor * weights, ggml_tensor rows, ggml_tensor products) {
    products.src[0] = weights;
    products.src[1] = &rows;
    llama_amx_mul_mat(params, &products);
}

}  // namespace

size_t ggml_backend_amx_get_alloc_size(const struct ggml_tensor * tensor) {
    const ggml_tensor first = as_matrix(tensor, tensor->ne[1], tensor->data);
    return n_matrices(tensor) * llama_amx_get_alloc_size(&first);
}

void ggml_backend_amx_convert_weight(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor));
    const size_t size_of_one = size / n_matrices(tensor);
    ggml_tensor matrix = as_matrix(tensor, tensor->ne[1], tensor->data);
    const size_t packed_size = llama_amx_get_alloc_size(&matrix);
    for (int64_t i = 0; i < n_matrices(tensor); ++i) {
        matrix.data = (char *) tensor->data + i * packed_size;
        llama_amx_convert_weight(&matrix, (const char *) data + i * size_of_one, 0, size_of_one);
    }
}

void ggml_backend_amx_mul_mat(const ggml_compute_params * params, struct ggml_tensor * products) {
    ggml_tensor * weights = products->src[0];
    const ggml_tensor * rows = products->src[1];
    if (n_matrices(weights) == 1) {
        const int64_t n_rows = rows->ne[1] * n_matrices(rows);
        multiply(params, weights, as_matrix(rows, n_rows, rows->data), as_matrix(products, n_rows, products->data));
        return;
    }
    ggml_tensor of_one = as_matrix(weights, weights->ne[1], weights->data);
    const size_t packed_size = llama_amx_get_alloc_size(&of_one);
    for (int64_t i = 0; i < n_matrices(rows); ++i) {
        /* Several matrices of rows may share one of weights (ggml_can_mul_mat). */
        const int64_t i2 = i % rows->ne[2] / (rows->ne[2] / weights->ne[2]);
        const int64_t i3 = i / rows->ne[2] / (rows->ne[3] / weights->ne[3]);
        of_one.data = (char *) weights->data + (i3 * weights->ne[2] + i2) * packed_size;
        if (i > 0) {
            ggml_barrier(params->threadpool);  /* the next product writes its rounded rows over those of the last */
        }
        multiply(params, &of_one,
            as_matrix(rows, rows->ne[1], (char *) rows->data + i * rows->ne[1] * rows->nb[1]),
            as_matrix(products, rows->ne[1], (char *) products->data + i * rows->ne[1] * products->nb[1]));
    }
}

/* The file itself follows; its body was included above. */
#undef __AMX_INT8__
#endif
