/* Remembers when each cell of a KV cache was written, so that attention can follow the order of a lane's tokens.
 *
 * A sum of floats depends on its order. In a cache that lanes share, llama.cpp puts a row into any free cell. So the cells
 * of a lane lie in a different order after other streams have ended. Attention in order of place would then give other
 * last bits.
 *
 * Cells that no step has written (of a restored lane) count as the oldest, in order of place.
 *
 * kernels.cmake adds this file; llama.cpp.patch adds the call where rows are written.
 */
#include "cell_order.h"

#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "relayline_hooks.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t CACHES_MAX = 4096; // one for the keys of each layer; beyond that, the least recently used is forgotten
/* The order is kept from layer to layer for this many rows of a step, and this many cells of a row. */
constexpr int64_t ROWS_KEPT = 128;
constexpr size_t  CELLS_KEPT = 16384;

std::mutex                                      tables_mutex;
std::unordered_map<const void *, written_cells> tables; // by the address of a cache's keys
uint64_t                                        n_uses = 0;

/* The keys of the cache that `view` is a part of; nullptr unless its lanes share cells. */
const ggml_tensor * shared_keys(const ggml_tensor * view) {
    const ggml_tensor * keys = view->view_src;
    const bool is_one = keys && keys->ne[2] == 1 && keys->ne[3] == 1 && view->data == keys->data;
    return is_one && strncmp(keys->name, "cache_", 6) == 0 && strstr(keys->name, "k_l") ? keys : nullptr;
}

void make_room() {
    if (tables.size() >= CACHES_MAX) {
        tables.erase(std::min_element(tables.begin(), tables.end(), [](const auto & one, const auto & other) {
            return one.second.last_use < other.second.last_use;
        }));
    }
}

struct row_order {
    const void *         mask = nullptr;
    uint32_t             n_written = 0;
    std::vector<int32_t> cells, in_order;
};

void sort_by_age(const written_cells & cache, const std::vector<int32_t> & cells, std::vector<int32_t> & in_order) {
    in_order = cells;
    const auto is_older = [&](int32_t one, int32_t other) { return cache.age(one) > cache.age(other); };
    if (std::is_sorted(cells.begin(), cells.end(), is_older)) {
        return;
    }
    static thread_local std::vector<uint64_t> keys;
    keys.resize(cells.size());
    for (size_t i = 0; i < cells.size(); i++) {
        keys[i] = (uint64_t) ~cache.age(cells[i]) << 32 | (uint32_t) cells[i];
    }
    std::sort(keys.begin(), keys.end());
    for (size_t i = 0; i < cells.size(); i++) {
        in_order[i] = (int32_t) keys[i];
    }
}

} // namespace

bool relayline_attends_in_order(void) {
    return relayline_kernels_on();
}

void relayline_note_rows(const ggml_compute_params * params, const ggml_tensor * dst) {
    if (params->ith != 0 || dst->type != GGML_TYPE_F16 || !relayline_kernels_on()) {
        return;
    }
    const ggml_tensor *keys = shared_keys(dst), *places = dst->src[1];
    if (!keys || places->ne[1] != 1 || places->ne[2] != 1 || places->ne[3] != 1) {
        return;
    }
    const std::lock_guard<std::mutex> lock(tables_mutex);
    if (tables.find(keys->data) == tables.end()) {
        make_room();
    }
    written_cells & cache = tables[keys->data];
    cache.last_use = ++n_uses;
    cache.when.resize(keys->ne[1]);
    for (int64_t i = 0; i < places->ne[0]; i++) {
        const char *  place = (const char *) places->data + i * places->nb[0];
        const int64_t cell = places->type == GGML_TYPE_I64 ? *(const int64_t *) place : *(const int32_t *) place;
        cache.when[cell] = ++cache.n_written;
    }
}

const written_cells * relayline_written_cells(const ggml_tensor * k) {
    const ggml_tensor * keys = shared_keys(k);
    if (!keys || k->nb[1] != keys->nb[1] || k->ne[3] != 1) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(tables_mutex);
    const auto found = tables.find(keys->data);
    return found == tables.end() || (int64_t) found->second.when.size() < k->ne[1] ? nullptr : &found->second;
}

const std::vector<int32_t> & relayline_in_order(const written_cells & cache, const std::vector<int32_t> & cells, int64_t row,
                                                const void * mask) {
    static thread_local std::vector<row_order> kept(ROWS_KEPT + 1);
    const bool  is_kept = row < ROWS_KEPT && cells.size() <= CELLS_KEPT;
    row_order & its = kept[is_kept ? row : ROWS_KEPT];
    if (!is_kept || its.mask != mask || its.n_written != cache.n_written || its.cells != cells) {
        sort_by_age(cache, cells, its.in_order);
        its.cells = cells;
        its.mask = mask;
        its.n_written = cache.n_written;
    }
    return its.in_order;
}
