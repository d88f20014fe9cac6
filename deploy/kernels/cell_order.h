/* The order in which the cells of a KV cache were written (cell_order.cpp). */
#pragma once

#include <cstdint>
#include <vector>

struct ggml_tensor;

/* When each cell of a cache was last written: the number of rows that were written before it. The numbers wrap after
 * 2^32 rows. That does no harm unless a cell is as old as that. */
struct written_cells {
    std::vector<uint32_t> when;
    uint32_t              n_written = 0;
    uint64_t              last_use = 0; // of all tables' uses

    uint32_t age(int32_t cell) const { return n_written - when[cell]; }
};

/* The write times of the cells that hold these keys. nullptr where each lane has its own cells, which lie in order. */
const written_cells * relayline_written_cells(const ggml_tensor * k);

/* Return `cells` in the order in which they were written, which is the order of their lane's tokens. The argument is in
 * order of place. The result is valid until this thread's next call. Each row of a step calls this in every layer; `row`
 * and `mask` identify it, so that only the first layer sorts. */
const std::vector<int32_t> & relayline_in_order(const written_cells & cache, const std::vector<int32_t> & cells, int64_t row,
                                                const void * mask);
