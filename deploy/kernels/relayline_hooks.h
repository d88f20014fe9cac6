/* The functions that the patched files of llama.cpp call (llama.cpp.patch). For C and C++. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

/* Whether this process uses the kernels. RELAYLINE_KERNELS=off in its environment, which is read once, turns them off. */
bool relayline_kernels_on(void);

/* The names of the kernels that this process uses, separated by spaces; empty if they are off. */
const char * relayline_kernels(void);

/* stored_products.cpp: whether our code computes the products that make `dst`. */
bool relayline_multiplies(const struct ggml_tensor * dst);

/* Compute a block of dst: these rows and these columns. `rows` holds the input rows as Q8_K (as Q8_0 for Q8_0 weights);
 * each column belongs to one row of weights. */
void relayline_multiply(const struct ggml_tensor * dst, const void * rows, int64_t first_column, int64_t end_column,
                        int64_t first_row, int64_t end_row);

/* attend_own_cells.cpp: whether each row of a step with `n_rows` rows is computed here, from its own cells only. True for
 * any mix of lanes. */
bool relayline_attends_own_cells(int n_rows, int n_heads, int n_kv_heads);

/* Whether that holds for any number of rows if most rows belong to different lanes. */
bool relayline_attends_lanes_apart(void);

/* Whether attention follows the order of a lane's tokens in a cache that lanes share. */
bool relayline_attends_in_order(void);

/* cell_order.cpp: note which cells of a KV cache's keys are about to be written. One thread calls this. */
void relayline_note_rows(const struct ggml_compute_params * params, const struct ggml_tensor * dst);

/* Compute this thread's share of attention. Returns false, on all threads, if llama.cpp must compute it. */
bool relayline_attend(const struct ggml_compute_params * params, const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
