/* Attention of a few rows over a cache that many lanes share, for processors with AVX2.
 *
 * Streams that are decoded together share one cache, and a row may see only the cells of its own lane. For each row and
 * head, llama.cpp checks the cells of all lanes and computes the visible ones one by one, with sums in half precision.
 *
 * This code differs in four ways. It first collects the visible cells of a row, sixteen checks at a time. Up to four heads
 * that share a key (grouped-query attention) are computed together, so the key is read and converted once. Exponentials
 * are computed eight at a time. Values are added in single precision.
 *
 * Cells are taken in the order in which they were written (cell_order.cpp). So a row's result depends only on the tokens
 * of its lane. It does not depend on the places of the cells, or on other streams in the cache and the step.
 *
 * llama.cpp still computes: types other than F16, biases by distance (ALiBi), few heads on many threads, and steps of many
 * rows of few lanes where few heads share a key (TILED_ROWS, PAIRS).
 *
 * kernels.cmake adds this file; llama.cpp.patch adds the call. Figures: docs/results/kernels.md.
 */
#include "cell_order.h"
#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "relayline_hooks.h"
#include "vec.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

/* Cells and heads that are computed at once. The keys, or the values, of so few cells fit the L1 cache for one head,
 * although neighbouring cells map to the same cache sets. */
constexpr int CELLS = 32, HEADS = 4;
constexpr uint16_t HIDDEN = 0xFC00; // minus infinity in half precision
/* From TILED_ROWS rows on, llama.cpp multiplies tiles of rows and cells in single precision. That is faster unless more
 * heads than this share a key. */
constexpr int TILED_ROWS = 64, TILED_HEADS = 2;
/* A tile computes all cells of all lanes for each of its rows. That pays if the rows see the same cells, as the rows of a
 * prompt do. Rows of streams that are decoded together see different cells. This many pairs of neighbours are compared. */
constexpr int PAIRS = 4;

/* Walks over the cells that one row may see. */
struct seen_cells {
    const ggml_fp16_t * mask; // nullptr: the row sees all cells
    int64_t             end;
    int64_t             group = 0; // of sixteen cells

    /* All visible cells, in order of place. */
    void collect(std::vector<int32_t> & cells) {
        size_t n = 0;
        for (group = 0; group < end; group += 16) {
            uint32_t left = ask();
            if (left && cells.size() < n + 16) {
                cells.resize(2 * n + 16);
            }
            for (; left; left &= left - 1) {
                cells[n++] = group + __builtin_ctz(left);
            }
        }
        cells.resize(n);
    }

    /* One bit for each of the sixteen cells of `group`: whether the row sees it. */
    uint32_t ask() const {
        const int n = std::min<int64_t>(end - group, 16);
        if (mask && n == 16) {
            const __m256i asked = _mm256_loadu_si256((const __m256i *) (mask + group));
            const __m256i is_hidden = _mm256_cmpeq_epi16(asked, _mm256_set1_epi16((short) HIDDEN));
            const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(is_hidden), _mm256_extracti128_si256(is_hidden, 1));
            return ~_mm_movemask_epi8(bytes) & 0xFFFF;
        }
        uint32_t bits = 0;
        for (int i = 0; i < n; i++) {
            bits |= (uint32_t) (!mask || mask[group + i] != HIDDEN) << i;
        }
        return bits;
    }
};

/* The visible cells that are computed next. */
struct block_of_cells {
    int     n;
    int32_t cells[CELLS];
    float   bias[CELLS];

    /* The cells from `first` on, and the mask's value for each, which is added to its score. */
    void take(const std::vector<int32_t> & seen, size_t first, const ggml_fp16_t * mask) {
        n = std::min<size_t>(CELLS, seen.size() - std::min(first, seen.size()));
        for (int i = 0; i < n; i++) {
            cells[i] = seen[first + i];
            bias[i] = mask ? _cvtsh_ss(mask[cells[i]]) : 0;
        }
    }
};

/* For each head that is computed at once: its greatest score so far, and its sum of exponentials. */
struct progress {
    __m128 greatest = _mm_set1_ps(-INFINITY), total = _mm_setzero_ps();
};

struct attention {
    const ggml_tensor *   dst, *q, *k, *v, *mask, *sinks;
    float                 scale, softcap;
    int                   dk, dv, sharing, pieces_of_key;
    const written_cells * written; // nullptr: cells are taken in order of place

    explicit attention(const ggml_tensor * dst)
        : dst(dst), q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), mask(dst->src[3]), sinks(dst->src[4]),
          dk(k->ne[0]), dv(v->ne[0]), sharing(q->ne[2] / k->ne[2]), pieces_of_key((sharing + HEADS - 1) / HEADS),
          written(mask ? relayline_written_cells(k) : nullptr) {
        memcpy(&scale, (const float *) dst->op_params, sizeof(scale));
        memcpy(&softcap, (const float *) dst->op_params + 2, sizeof(softcap));
        if (softcap != 0) {
            scale /= softcap;
        }
    }

    /* The number of sets of up to HEADS heads that share keys. */
    int n_pieces() const { return k->ne[2] * pieces_of_key; }

    /* Pieces from `begin` to `end` of one row. */
    void compute(int row, int stream, int begin, int end) const {
        static thread_local std::vector<progress> all;
        all.assign(end - begin, {});
        for (int piece = begin; piece < end; piece++) {
            memset(sums(row, head_of(piece), stream), 0, n_heads(piece) * dv * sizeof(float));
        }
        seen_cells seen = { nullptr, k->ne[1] };
        if (mask) {
            const char * of_row = (const char *) mask->data + row * mask->nb[1] + stream % mask->ne[3] * mask->nb[3];
            seen.mask = (const ggml_fp16_t *) of_row;
        }
        static thread_local std::vector<int32_t> found;
        seen.collect(found);
        const std::vector<int32_t> & cells = written ? relayline_in_order(*written, found, row, mask->data) : found;
        block_of_cells blocks[2], *now = &blocks[0], *then = &blocks[1];
        now->take(cells, 0, seen.mask);
        for (size_t first = CELLS; now->n; first += CELLS, std::swap(now, then)) {
            then->take(cells, first, seen.mask);
            for (int piece = begin; piece < end; piece++) {
                switch (n_heads(piece)) {
                    case 1: add<1>(row, piece, stream, *now, *then, all[piece - begin]); break;
                    case 2: add<2>(row, piece, stream, *now, *then, all[piece - begin]); break;
                    case 3: add<3>(row, piece, stream, *now, *then, all[piece - begin]); break;
                    default: add<4>(row, piece, stream, *now, *then, all[piece - begin]);
                }
            }
        }
        for (int piece = begin; piece < end; piece++) {
            finish(row, piece, stream, all[piece - begin]);
        }
    }

  private:
    int head_of(int piece) const { return piece / pieces_of_key * sharing + piece % pieces_of_key * HEADS; }

    int n_heads(int piece) const { return std::min(sharing - piece % pieces_of_key * HEADS, HEADS); }

    float * sums(int64_t row, int head, int64_t stream) const {
        return (float *) ((char *) dst->data + (stream * dst->ne[2] * dst->ne[1] + head + row * dst->ne[1]) * dst->nb[1]);
    }

    template <int R>
    void add(int row, int piece, int stream, const block_of_cells & now, const block_of_cells & then,
             progress & so_far) const {
        const int    key = piece / pieces_of_key, head = head_of(piece);
        const char * keys = (const char *) k->data + key * k->nb[2] + stream / (q->ne[3] / k->ne[3]) * k->nb[3];
        const char * values = (const char *) v->data + key * v->nb[2] + stream / (q->ne[3] / v->ne[3]) * v->nb[3];
        const char * queries = (const char *) q->data + row * q->nb[1] + head * q->nb[2] + stream * q->nb[3];
        float *      sums_of_heads = sums(row, head, stream);
        float        scores[CELLS][HEADS];
        add_scores<R>(keys, queries, now, then, scores);
        weigh<R>(scores, now.n, so_far, sums_of_heads);
        add_values<R>(values, now, then, scores, sums_of_heads);
    }

    template <int R>
    void add_scores(const char * keys, const char * queries, const block_of_cells & now, const block_of_cells & then,
                    float (&scores)[CELLS][HEADS]) const;
    template <int R> void weigh(float (&scores)[CELLS][HEADS], int n, progress & so_far, float * sums_of_heads) const;
    template <int R>
    void add_values(const char * values, const block_of_cells & now, const block_of_cells & then,
                    const float (&weights)[CELLS][HEADS], float * sums_of_heads) const;
    void finish(int row, int piece, int stream, const progress & all) const;
};

inline __m256 halves(const void * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p));
}

inline void prefetch(const char * p, int n_bytes) {
    for (int i = 0; i < n_bytes; i += 64) {
        _mm_prefetch(p + i, _MM_HINT_T0);
    }
}

template <int R>
void attention::add_scores(const char * keys, const char * queries, const block_of_cells & now, const block_of_cells & then,
                           float (&scores)[CELLS][HEADS]) const {
    for (int i = 0; i < now.n; i++) {
        const ggml_fp16_t * key = (const ggml_fp16_t *) (keys + now.cells[i] * k->nb[1]);
        if (i < then.n) {
            prefetch(keys + then.cells[i] * k->nb[1], 2 * dk);
        }
        __m256 acc[HEADS] = {};
        for (int d = 0; d < dk; d += 8) {
            const __m256 x = halves(key + d);
            for (int r = 0; r < R; r++) {
                acc[r] = _mm256_fmadd_ps(x, _mm256_loadu_ps((const float *) (queries + r * q->nb[2]) + d), acc[r]);
            }
        }
        const __m256 fours = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
        __m128 score = _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
        score = _mm_mul_ps(score, _mm_set1_ps(scale));
        _mm_storeu_ps(scores[i], score);
        if (softcap != 0) {
            for (int r = 0; r < R; r++) {
                scores[i][r] = softcap * tanhf(scores[i][r]);
            }
        }
        _mm_storeu_ps(scores[i], _mm_add_ps(_mm_loadu_ps(scores[i]), _mm_set1_ps(now.bias[i])));
    }
}

/* Turn scores into weights. The cells come a few at a time, so the softmax keeps the greatest score so far. When a greater
 * one comes, it scales the earlier sums down (https://arxiv.org/abs/2112.05682). */
template <int R>
void attention::weigh(float (&scores)[CELLS][HEADS], int n, progress & so_far, float * sums_of_heads) const {
    __m128 greatest = so_far.greatest;
    for (int i = 0; i < n; i++) {
        greatest = _mm_max_ps(greatest, _mm_loadu_ps(scores[i]));
    }
    float shrink[HEADS];
    _mm_storeu_ps(shrink, _mm_sub_ps(so_far.greatest, greatest));
    for (int r = 0; r < R; r++) {
        if (shrink[r] != 0) {
            shrink[r] = expf(shrink[r]);
            ggml_vec_scale_f32(dv, sums_of_heads + r * dv, shrink[r]);
        } else {
            shrink[r] = 1;
        }
    }
    for (int i = 0; i < n; i++) {
        _mm_storeu_ps(scores[i], _mm_sub_ps(_mm_loadu_ps(scores[i]), greatest));
    }
    ggml_vec_soft_max_f32(HEADS * n, scores[0], scores[0], 0);
    __m128 total = _mm_mul_ps(so_far.total, _mm_loadu_ps(shrink));
    for (int i = 0; i < n; i++) {
        total = _mm_add_ps(total, _mm_loadu_ps(scores[i]));
    }
    so_far = { greatest, total };
}

/* sums += the values of cells, multiplied by their weights. */
template <int R>
void attention::add_values(const char * values, const block_of_cells & now, const block_of_cells & then,
                           const float (&weights)[CELLS][HEADS], float * sums_of_heads) const {
    for (int d = 0; d < dv; d += 16) {
        __m256 acc[R][2];
        for (int r = 0; r < R; r++) {
            acc[r][0] = _mm256_loadu_ps(sums_of_heads + r * dv + d);
            acc[r][1] = _mm256_loadu_ps(sums_of_heads + r * dv + d + 8);
        }
        for (int i = 0; i < now.n; i++) {
            const ggml_fp16_t * value = (const ggml_fp16_t *) (values + now.cells[i] * v->nb[1]) + d;
            if (d % 32 == 0 && i < then.n) {
                prefetch(values + then.cells[i] * v->nb[1] + 2 * d, 64);
            }
            const __m256 first = halves(value), last = halves(value + 8);
            for (int r = 0; r < R; r++) {
                const __m256 weight = _mm256_set1_ps(weights[i][r]);
                acc[r][0] = _mm256_fmadd_ps(first, weight, acc[r][0]);
                acc[r][1] = _mm256_fmadd_ps(last, weight, acc[r][1]);
            }
        }
        for (int r = 0; r < R; r++) {
            _mm256_storeu_ps(sums_of_heads + r * dv + d, acc[r][0]);
            _mm256_storeu_ps(sums_of_heads + r * dv + d + 8, acc[r][1]);
        }
    }
}

void attention::finish(int row, int piece, int stream, const progress & all) const {
    float greatest[HEADS], total[HEADS];
    _mm_storeu_ps(greatest, all.greatest);
    _mm_storeu_ps(total, all.total);
    for (int r = 0; r < n_heads(piece); r++) {
        const int head = head_of(piece) + r;
        float     shrink = 1;
        if (sinks) {
            const float sink = ((const float *) sinks->data)[head], most = std::max(greatest[r], sink);
            shrink = expf(greatest[r] - most);
            total[r] = total[r] * shrink + expf(sink - most);
        }
        ggml_vec_scale_f32(dv, sums(row, head, stream), total[r] == 0 ? 0 : shrink / total[r]);
    }
}

/* Whether two rows have at least half of the cells in common that either of them sees. */
bool see_alike(seen_cells one, seen_cells other) {
    int64_t n_both = 0, n_any = 0;
    for (one.group = other.group = 0; one.group < one.end; one.group += 16, other.group += 16) {
        const uint32_t ours = one.ask(), theirs = other.ask();
        n_both += __builtin_popcount(ours & theirs);
        n_any += __builtin_popcount(ours | theirs);
    }
    return 2 * n_both >= n_any;
}

/* Whether most neighbouring rows of a large step see the same cells. The answer depends only on the rows of the step. So
 * the rows of a prompt give the same bits whatever other lanes hold, and all threads agree. */
bool rows_see_alike(const attention & it) {
    if (!it.mask) {
        return true;
    }
    int n_alike = 0;
    for (int pair = 0; pair < PAIRS; pair++) {
        const int64_t row = (2 * pair + 1) * (it.q->ne[1] - 1) / (2 * PAIRS);
        const char *  masks = (const char *) it.mask->data + row * it.mask->nb[1];
        n_alike += see_alike({ (const ggml_fp16_t *) masks, it.k->ne[1] },
                             { (const ggml_fp16_t *) (masks + it.mask->nb[1]), it.k->ne[1] });
    }
    return 2 * n_alike >= PAIRS;
}

bool is_ours(const ggml_compute_params * params, const attention & it) {
    float max_bias;
    memcpy(&max_bias, (const float *) it.dst->op_params + 1, sizeof(max_bias));
    const bool types = it.q->type == GGML_TYPE_F32 && it.k->type == GGML_TYPE_F16 && it.v->type == GGML_TYPE_F16;
    const bool shapes = it.dk % 8 == 0 && it.dv % 16 == 0 && it.k->ne[2] == it.v->ne[2] && it.k->ne[3] == it.v->ne[3];
    const bool lie_together = it.q->nb[0] == sizeof(float) && it.k->nb[0] == 2 && it.v->nb[0] == 2;
    const bool masks = !it.mask || (it.mask->type == GGML_TYPE_F16 && it.mask->ne[2] == 1);
    return types && shapes && lie_together && masks && max_bias == 0 && !params->use_ref;
}

} // namespace

bool relayline_attends_own_cells(int n_rows, int n_heads, int n_kv_heads) {
    return relayline_kernels_on() && (n_rows < TILED_ROWS || n_heads > TILED_HEADS * n_kv_heads);
}

bool relayline_attends_lanes_apart(void) {
    return relayline_kernels_on();
}

bool relayline_attend(const ggml_compute_params * params, const ggml_tensor * dst) {
    const attention it(dst);
    const int64_t   n_rows = it.q->ne[1] * it.q->ne[3], n_threads = params->nth;
    if (!relayline_kernels_on() || !is_ours(params, it) || n_rows * it.n_pieces() < n_threads) {
        return false;
    }
    if (!relayline_attends_own_cells(it.q->ne[1], it.q->ne[2], it.k->ne[2]) && rows_see_alike(it)) {
        return false;
    }
    // One thread computes all heads of a row, so a cell's keys are read once; unless there are too few rows for that.
    const int64_t wanted = n_threads == 1 ? 1 : (4 * n_threads + n_rows - 1) / n_rows;
    const int64_t n_shares = std::min<int64_t>(wanted, it.n_pieces());
    for (int64_t unit = params->ith; unit < n_rows * n_shares; unit += n_threads) {
        const int64_t row = unit / n_shares, share = unit % n_shares;
        const int64_t begin = share * it.n_pieces() / n_shares, end = (share + 1) * it.n_pieces() / n_shares;
        it.compute(row % it.q->ne[1], row / it.q->ne[1], begin, end);
    }
    return true;
}
