/* Included before the file of llama.cpp that says which products AMX takes (amx/amx.cpp).
 *
 * It is asked twice: when a weight is loaded, for made-up rows, and for each product of a graph. The made-up rows are
 * always contiguous. So weights went to AMX's memory whose rows are not, such as those of multi-head latent attention,
 * and the process died when its graph was made. Here products take such rows (amx_batches.h moves them together), and
 * weights of several matrices stay out of that memory, for which llama.cpp has no layout.
 */
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#include "ggml.h"

/* Whether AMX takes an operand: rows (always f32), or weights. */
static inline bool relayline_amx_takes(const struct ggml_tensor * operand) {
    if (operand->type == GGML_TYPE_F32) {
        return ggml_is_contiguous_rows(operand);
    }
    return ggml_is_contiguous(operand) && operand->ne[2] * operand->ne[3] == 1;
}

/* The file has one such call for each operand. */
#define ggml_is_contiguous relayline_amx_takes
#endif
