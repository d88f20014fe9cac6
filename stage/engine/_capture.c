/* Copies the rows of a stage's last layer out of llama.cpp's graph, then stops the graph. Some graphs have no input for
 * rows, or for a family's further inputs. There it also writes these over the values that nodes have computed.
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
};

EXPORT const uint64_t relayline_capture_size_bytes = sizeof(struct relayline_capture);

static int32_t copy_rows(struct relayline_capture * capture, const struct ggml_tensor * tensor) {
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
    if (capture->written > capture->capacity || n_floats > capture->capacity - capture->written) {
        return CAPTURE_OVERFLOW;
    }
    capture->tensor_get(tensor, capture->destination + capture->written, 0, (size_t) n_floats * sizeof(float));
    capture->written += n_floats;
    capture->n_calls += 1;
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

/* A ggml_backend_sched_eval_callback. Called first to ask whether it wants a node, and again when that is computed. */
EXPORT bool relayline_capture_eval(struct ggml_tensor * tensor, bool ask, void * user) {
    struct relayline_capture * capture = user;
    if (ask) {
        return is_named(capture, tensor, capture->target) || entry_of(capture, tensor) != NULL;
    }
    struct relayline_entry * entry = entry_of(capture, tensor);
    const int32_t error = entry != NULL ? write_rows(capture, entry, tensor) : copy_rows(capture, tensor);
    if (error != CAPTURE_OK) {
        capture->error = error;
        return false;
    }
    return entry != NULL || capture->stop == 0;
}

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_capture", .m_doc = "C symbols for stage.capture, reached through ctypes.", .m_size = 0,
};

PyMODINIT_FUNC PyInit__capture(void) {
    return PyModuleDef_Init(&module_definition);
}
