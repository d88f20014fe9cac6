/* Copies the rows of a stage's last layer out of llama.cpp's graph, then stops the graph. Some graphs have no input for
 * rows, or for a family's further inputs. There it also writes these over the values that nodes have computed.
 *
 * Some slices begin with placeholders, whose nodes are not computed: llama.cpp's backends leave out nodes without a flag.
 *
 * llama.cpp calls relayline_capture_eval for every node of the graph, on the decode thread and without the GIL. A Python
 * callback would take the GIL about a thousand times a step; this one costs a string comparison.
 *
 * stage/engine/capture.py passes the functions of ggml as pointers into the libraries that llama_cpp has loaded. So the
 * build needs no ggml header or import library, and `struct ggml_tensor` stays opaque. stage/engine/capture.py mirrors the
 * layout of struct relayline_capture; `size_bytes` shows it a stale build.
 *
 * The Python module is empty. It exists so that pip builds and installs the library.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct ggml_tensor;

enum relayline_capture_error {
    CAPTURE_OK = 0,
    CAPTURE_NOT_F32 = 1,        /* elements are not four bytes wide, or the tensor is not one contiguous block */
    CAPTURE_NOT_WHOLE_ROWS = 2, /* the tensor's size is not a multiple of one row */
    CAPTURE_OVERFLOW = 3,       /* more rows than the destination holds; nothing was copied */
    ENTRY_NOT_F32 = 4,          /* as 1, for a tensor to write, which may also be i32 */
    ENTRY_UNDERFLOW = 5,        /* the tensor has more values than are left to write; nothing was written */
};

#define TENSOR_FLAG_COMPUTE 16 /* GGML_TENSOR_FLAG_COMPUTE of ggml.h: without it backends leave a node out */

/* A further tensor to copy, which comes before the wanted one. It has rows of the same width. */
struct relayline_tap {
    const char * name;        /* NUL-terminated */
    float *      destination; /* as large as the wanted one's */
    uint64_t     written;     /* floats copied since the caller last set it to 0; micro-batches append */
};

/* A tensor to write over. */
struct relayline_entry {
    const char * name;          /* NUL-terminated */
    const void * source;        /* source_floats values of four bytes, in the order in which micro-batches are computed */
    uint64_t     source_floats; /* set by the caller before each decode */
    uint64_t     consumed;      /* values written since the caller last set it to 0; each micro-batch continues there */
};

struct relayline_capture {
    const char * target;      /* name of the wanted tensor, NUL-terminated, or NULL */
    float *      destination; /* capacity floats; filled from the start by each decode */
    uint64_t     capacity;
    uint64_t     row_floats; /* floats of one row (n_embd) */
    uint64_t     written;    /* floats copied since the caller last set it to 0; micro-batches append */
    uint64_t     n_calls;    /* micro-batches that delivered rows since the caller last set it to 0 */
    int32_t      error;      /* enum relayline_capture_error; the caller resets it */
    int32_t      stop;       /* non-zero: nothing after the wanted tensor is computed */
    const char * (*get_name)(const struct ggml_tensor *);
    size_t (*nbytes)(const struct ggml_tensor *);
    size_t (*element_size)(const struct ggml_tensor *);
    bool (*is_contiguous)(const struct ggml_tensor *);
    void (*tensor_get)(const struct ggml_tensor *, void *, size_t offset, size_t size);
    struct relayline_entry * entries;
    uint64_t                 n_entries;
    void (*tensor_set)(struct ggml_tensor *, const void *, size_t offset, size_t size);
    struct relayline_tap * taps;
    uint64_t               n_taps;
    /* Nodes from skip_from up to skip_to are not computed, both included, but for what later nodes need: those that join
     * rows to others (CONCAT with row_floats columns), and from skip_last on the scores of rows that are joined. Entries
     * among them are written all the same. */
    const char * skip_from; /* NUL-terminated, or NULL to compute all */
    const char * skip_last;
    const char * skip_to;
    uint64_t     flags_at; /* offset of `flags` in struct ggml_tensor */
    int32_t      skipping; /* 0: outside; 1: from skip_from on; 2: from skip_last on. The caller sets it to 0 at first */
    const char * (*op_desc)(const struct ggml_tensor *);
    int64_t (*nrows)(const struct ggml_tensor *);
};

EXPORT const uint64_t relayline_capture_size_bytes = sizeof(struct relayline_capture);

static int32_t copy_rows(
    const struct relayline_capture * capture, const struct ggml_tensor * tensor, float * destination, uint64_t * written) {
    if (capture->element_size(tensor) != sizeof(float) || !capture->is_contiguous(tensor)) {
        return CAPTURE_NOT_F32;
    }
    const uint64_t n_bytes = capture->nbytes(tensor), n_floats = n_bytes / sizeof(float);
    if (n_floats == 0 && capture->stop == 0) { /* a micro-batch without wanted rows */
        return CAPTURE_OK;
    }
    if (n_floats == 0 || n_bytes % sizeof(float) != 0 || capture->row_floats == 0 || n_floats % capture->row_floats != 0) {
        return CAPTURE_NOT_WHOLE_ROWS;
    }
    if (*written > capture->capacity || n_floats > capture->capacity - *written) {
        return CAPTURE_OVERFLOW;
    }
    capture->tensor_get(tensor, destination + *written, 0, (size_t) n_floats * sizeof(float));
    *written += n_floats;
    return CAPTURE_OK;
}

static bool is_named(const struct relayline_capture * capture, const struct ggml_tensor * tensor, const char * name) {
    return name != NULL && strcmp(capture->get_name(tensor), name) == 0;
}

static struct relayline_entry * entry_of(const struct relayline_capture * capture, const struct ggml_tensor * tensor) {
    for (uint64_t index = 0; index < capture->n_entries; index++) {
        if (is_named(capture, tensor, capture->entries[index].name)) {
            return &capture->entries[index];
        }
    }
    return NULL;
}

static struct relayline_tap * tap_of(const struct relayline_capture * capture, const struct ggml_tensor * tensor) {
    for (uint64_t index = 0; index < capture->n_taps; index++) {
        if (is_named(capture, tensor, capture->taps[index].name)) {
            return &capture->taps[index];
        }
    }
    return NULL;
}

static bool is_needed(const struct relayline_capture * capture, const struct ggml_tensor * tensor) {
    const char * op = capture->op_desc(tensor);
    if (strcmp(op, "CONCAT") == 0) {
        const int64_t n_rows = capture->nrows(tensor);
        return n_rows > 0 && capture->nbytes(tensor) / sizeof(float) / (uint64_t) n_rows == capture->row_floats;
    }
    return capture->skipping == 2 && (strcmp(op, "RMS_NORM") == 0 || strcmp(op, "MUL") == 0 || strcmp(op, "SUM_ROWS") == 0);
}

/* Clears the flag of a node that is not to be computed. llama.cpp uses a graph again: its flags are cleared already. */
static void skip(struct relayline_capture * capture, struct ggml_tensor * tensor) {
    if (capture->skip_from == NULL) {
        return;
    }
    if (capture->skipping == 0 && is_named(capture, tensor, capture->skip_from)) {
        capture->skipping = 1;
    }
    if (capture->skipping == 1 && is_named(capture, tensor, capture->skip_last)) {
        capture->skipping = 2;
    }
    if (capture->skipping != 0 && !is_needed(capture, tensor)) {
        int32_t flags;
        memcpy(&flags, (const char *) tensor + capture->flags_at, sizeof(flags));
        flags &= ~TENSOR_FLAG_COMPUTE;
        memcpy((char *) tensor + capture->flags_at, &flags, sizeof(flags));
    }
    if (capture->skipping != 0 && is_named(capture, tensor, capture->skip_to)) {
        capture->skipping = 0;
    }
}

static int32_t write_rows(
    const struct relayline_capture * capture, struct relayline_entry * entry, struct ggml_tensor * tensor) {
    if (capture->element_size(tensor) != sizeof(float) || !capture->is_contiguous(tensor)) {
        return ENTRY_NOT_F32;
    }
    const uint64_t n_floats = capture->nbytes(tensor) / sizeof(float);
    if (entry->consumed > entry->source_floats || n_floats > entry->source_floats - entry->consumed) {
        return ENTRY_UNDERFLOW;
    }
    capture->tensor_set(tensor, (const float *) entry->source + entry->consumed, 0, (size_t) n_floats * sizeof(float));
    entry->consumed += n_floats;
    return CAPTURE_OK;
}

static int32_t take_rows(struct relayline_capture * capture, struct relayline_tap * tap, struct ggml_tensor * tensor) {
    if (tap != NULL) {
        return copy_rows(capture, tensor, tap->destination, &tap->written);
    }
    const uint64_t before = capture->written;
    const int32_t error = copy_rows(capture, tensor, capture->destination, &capture->written);
    capture->n_calls += capture->written != before;
    return error;
}

/* A ggml_backend_sched_eval_callback. Called first to ask whether it wants a node, and again when that is computed. */
EXPORT bool relayline_capture_eval(struct ggml_tensor * tensor, bool ask, void * user) {
    struct relayline_capture * capture = user;
    struct relayline_entry * entry = entry_of(capture, tensor);
    struct relayline_tap * tap = tap_of(capture, tensor);
    if (ask) {
        skip(capture, tensor);
        return entry != NULL || tap != NULL || is_named(capture, tensor, capture->target);
    }
    const int32_t error = entry != NULL ? write_rows(capture, entry, tensor) : take_rows(capture, tap, tensor);
    if (error != CAPTURE_OK) {
        capture->error = error;
        return false;
    }
    return entry != NULL || tap != NULL || capture->stop == 0;
}

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_capture", .m_doc = "C symbols for stage.capture, reached through ctypes.", .m_size = 0,
};

PyMODINIT_FUNC PyInit__capture(void) {
    return PyModuleDef_Init(&module_definition);
}
