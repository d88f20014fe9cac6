/* What the patched files of llama.cpp call (llama.cpp.patch). C and C++ alike. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

/* Whether the kernels are used in this process: not if its environment says RELAYLINE_KERNELS=off. The environment is
 * read once. */
bool relayline_kernels_on(void);

/* The names of the kernels that this process uses, one space between them; empty if they are off. */
const char * relayline_kernels(void);

/* stored_products.cpp: whether the products that dst stands for are computed here. */
bool relayline_multiplies(const struct ggml_tensor * dst);

/* Some rows of dst, made of those that lie at `rows` as Q8_K (Q8_0 for weights of that type), and some columns, each made
 * of a row of weights. */
void relayline_multiply(const struct ggml_tensor * dst, const void * rows, int64_t first_column, int64_t end_column,
                        int64_t first_row, int64_t end_row);

/* attend_own_cells.cpp: whether rows of a step of so many read their own cells alone here, one by one, whatever lanes they
 * are of. */
bool relayline_attends_own_cells(int n_rows, int n_heads, int n_kv_heads);

/* Whether they do, however many they are, where most of them are of lanes of their own. */
bool relayline_attends_lanes_apart(void);

/* Whether attention takes the cells of a lane in the order of its tokens where lanes share the cells of a cache. */
bool relayline_attends_in_order(void);

/* cell_order.cpp: note which cells of a KV cache's keys were written, before they are. One thread does. */
void relayline_note_rows(const struct ggml_compute_params * params, const struct ggml_tensor * dst);

/* Compute this thread's share of attention; false if llama.cpp must, for all threads alike. */
bool relayline_attend(const struct ggml_compute_params * params, const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
