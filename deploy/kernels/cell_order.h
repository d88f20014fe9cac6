/* In which order the cells of a KV cache were written (cell_order.cpp). */
#pragma once

#include <cstdint>
#include <vector>

struct ggml_tensor;

/* When each cell of a cache was written last, by the number of rows that were written before it. Numbers begin anew after
 * 2^32 rows, which does no harm as long as no cell is as old. */
struct written_cells {
    std::vector<uint32_t> when;
    uint32_t              n_written = 0;
    uint64_t              last_use = 0; // of all tables' uses

    uint32_t age(int32_t cell) const { return n_written - when[cell]; }
};

/* The cells behind the keys of an attention; nullptr where they lie in order: where lanes have cells of their own. */
const written_cells * relayline_written_cells(const ggml_tensor * k);

/* Return cells in the order in which they were written, which is that of their lane's tokens. They come in the order of
 * their places and hold until the thread's next call. One row of a step asks this in every layer: `row` and `mask` tell
 * which, so that it is sorted for the first one alone. */
const std::vector<int32_t> & relayline_in_order(const written_cells & cache, const std::vector<int32_t> & cells, int64_t row,
                                                const void * mask);
