/* Reads and writes the plain envelopes of decode steps. The fast path next to wire/envelopes/envelope.py and frames.py.
 *
 * `read` accepts the form that nearly every message of steady decode has: Buffer's layout, frames with ordinary rows, no
 * scaled row, nothing appended. It checks every tag, size and checksum. For any other message, valid or not, it returns
 * None; envelope.py then reads the message by its full rules and reports errors.
 *
 * The caller compares the result with the limits (wire/common/bounds.py). Only the limit on frames is checked here, because
 * each frame becomes an object.
 *
 * With warm caches this saves little. But a stage reads an envelope after its core has computed for milliseconds. Then the
 * same loops in Python take several times as long.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_layout.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "envelopes are little endian and are read in place; a big-endian host is not supported"
#endif

#define ORDINARY_FLAGS 3u /* Flag.PREFILL and Flag.WANTS_SAMPLE */
#define CHECKSUM_BYTES 9   /* tag and value; always the last bytes of a message */
#define LEAD_BYTES_MAX 11  /* a tag and a size of up to 64 bits in sevens: room for any size that a header may claim */
#define DTYPE_F16 2

static const uint8_t ITEM_BYTES[] = {0, 4, 2, 4}; /* of dtypes: token ids, f16, f32 */

#define N_OF(array) (sizeof(array) / sizeof((array)[0]))

static uint32_t u32(const uint8_t * at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t u64(const uint8_t * at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void put_u32(uint8_t * at, uint32_t value) {
    memcpy(at, &value, sizeof value);
}

static void put_u64(uint8_t * at, uint64_t value) {
    memcpy(at, &value, sizeof value);
}

/* Writes the tag and size before a length-delimited field; returns their bytes, at most LEAD_BYTES_MAX. */
static size_t write_lead(uint8_t into[LEAD_BYTES_MAX], uint8_t tag, uint64_t size) {
    size_t n = 0;
    into[n++] = tag;
    for (; size > 0x7F; size >>= 7) {
        into[n++] = (uint8_t) (size & 0x7F) | 0x80;
    }
    into[n++] = (uint8_t) size;
    return n;
}

static int has_lead(const uint8_t * message, uint64_t length, uint64_t at, uint8_t tag, uint64_t size, size_t * n) {
    uint8_t lead[LEAD_BYTES_MAX];
    *n = write_lead(lead, tag, size);
    return at <= length && *n <= length - at && memcmp(message + at, lead, *n) == 0;
}

/* Computes a checksum with the given function, which may take a seed; -1 with an error set. */
static int seeded_checksum_of(PyObject * checksum, const uint8_t * bytes, uint64_t n, const uint64_t * seed, uint64_t * sum) {
    PyObject * args[2] = {PyMemoryView_FromMemory((char *) (uintptr_t) bytes, (Py_ssize_t) n, PyBUF_READ), NULL};
    if (args[0] != NULL && seed != NULL) {
        args[1] = PyLong_FromUnsignedLongLong(*seed);
    }
    PyObject * found = NULL;
    if (args[0] != NULL && (seed == NULL || args[1] != NULL)) {
        found = PyObject_Vectorcall(checksum, args, seed == NULL ? 1 : 2, NULL);
    }
    Py_XDECREF(args[0]);
    Py_XDECREF(args[1]);
    if (found == NULL) {
        return -1;
    }
    *sum = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return *sum == (uint64_t) -1 && PyErr_Occurred() ? -1 : 0;
}

static int checksum_of(PyObject * checksum, const uint8_t * bytes, uint64_t n, uint64_t * sum) {
    return seeded_checksum_of(checksum, bytes, n, NULL, sum);
}

/* The header of a message, and the places of its parts. */
struct layout {
    const uint8_t * frames;
    const uint8_t * frames_end;
    const uint8_t * payload;
    const uint8_t * payload_end;
    const uint8_t * checksum; /* its tag; all other fields end here */
    uint32_t n_frames, n_rows, dtype, width;
    uint64_t row_bytes;
};

/* 1: a plain envelope, judged without its frames; 0: another message. */
static int lay_out(const uint8_t * message, uint64_t length, struct layout * found) {
    if (length < HEADER_BYTES) {
        return 0;
    }
    for (size_t i = 0; i < N_OF(HEADER_CONSTANTS); i++) {
        if (message[HEADER_CONSTANTS[i].at] != HEADER_CONSTANTS[i].byte) {
            return 0;
        }
    }
    found->dtype = u32(message + HEADER_DTYPE_AT);
    found->n_rows = u32(message + HEADER_N_ROWS_AT);
    found->width = u32(message + HEADER_WIDTH_AT);
    found->n_frames = u32(message + HEADER_N_FRAMES_AT);
    if (found->dtype == 0 || found->dtype >= N_OF(ITEM_BYTES) || found->n_frames == 0 || found->width == 0) {
        return 0;
    }
    found->row_bytes = (uint64_t) ITEM_BYTES[found->dtype] * found->width;
    if (found->row_bytes > length || found->n_rows > length / found->row_bytes) {
        return 0; /* checked before the product, which may have 66 bits */
    }
    if (length < HEADER_BYTES + CHECKSUM_BYTES || message[length - CHECKSUM_BYTES] != CHECKSUM_TAG) {
        return 0;
    }
    const uint64_t frames_end = HEADER_BYTES + (uint64_t) FRAME_BYTES * found->n_frames;
    const uint64_t payload_bytes = found->n_rows * found->row_bytes, end = length - CHECKSUM_BYTES;
    size_t lead_bytes;
    if (!has_lead(message, end, frames_end, PAYLOAD_TAG, payload_bytes, &lead_bytes)) {
        return 0;
    }
    uint64_t at = frames_end + lead_bytes;
    if (payload_bytes > end - at) {
        return 0;
    }
    found->frames = message + HEADER_BYTES;
    found->frames_end = message + frames_end;
    found->payload = message + at;
    at += payload_bytes;
    found->payload_end = message + at;
    found->checksum = message + end;
    if (at == end) {
        return 1;
    }
    if (found->dtype != DTYPE_F16 || !has_lead(message, end, at, ROW_EXPONENTS_TAG, found->n_rows, &lead_bytes) ||
        end - at - lead_bytes != found->n_rows) {
        return 0;
    }
    for (at += lead_bytes; at < end; at++) {
        if (message[at] != 0) {
            return 0;
        }
    }
    return 1;
}

/* 1 if the checksum of everything but the rows is right, 0 if not, -1 with an error set. */
static int is_whole(const uint8_t * message, const struct layout * found, PyObject * checksum) {
    uint64_t head, sum;
    if (checksum_of(checksum, message, (uint64_t) (found->frames_end - message), &head) < 0) {
        return -1;
    }
    const uint64_t tail_bytes = (uint64_t) (found->checksum - found->payload_end);
    if (seeded_checksum_of(checksum, found->payload_end, tail_bytes, &head, &sum) < 0) {
        return -1;
    }
    return sum == u64(found->checksum + 1);
}

/* One frame's fields as a tuple, see wire.frames.Head. */
static PyObject * head_of(const uint8_t * frame) {
    return Py_BuildValue("(KIIIIKKKy#)", (unsigned long long) u64(frame + FRAME_SESSION_ID_AT), u32(frame + FRAME_EPOCH_AT), u32(frame + FRAME_POSITION_AT),
                         u32(frame + FRAME_N_ROWS_AT), u32(frame + FRAME_FLAGS_AT), (unsigned long long) u64(frame + FRAME_ARGUMENT_AT),
                         (unsigned long long) u64(frame + FRAME_CHECKSUM_AT), (unsigned long long) u64(frame + FRAME_ENQUEUED_NS_AT), frame + FRAME_TRACE_AT,
                         (Py_ssize_t) TRACE_BYTES);
}

/* Fills heads. Returns 1; 0 if a frame is not plain or the checksum of its rows is wrong; -1 with an error set. */
static int read_frames(const struct layout * found, PyObject * checksum, PyObject * heads, uint32_t * most_rows,
                       uint64_t * last_position) {
    uint64_t rows_before = 0;
    for (uint32_t i = 0; i < found->n_frames; i++) {
        const uint8_t * frame = found->frames + (size_t) FRAME_BYTES * i;
        for (size_t j = 0; j < N_OF(FRAME_CONSTANTS); j++) {
            if (frame[FRAME_CONSTANTS[j].at] != FRAME_CONSTANTS[j].byte) {
                return 0;
            }
        }
        const uint32_t n_rows = u32(frame + FRAME_N_ROWS_AT);
        if (n_rows == 0 || n_rows > found->n_rows - rows_before || u32(frame + FRAME_FLAGS_AT) & ~ORDINARY_FLAGS) {
            return 0;
        }
        uint64_t sum;
        if (checksum_of(checksum, found->payload + rows_before * found->row_bytes, n_rows * found->row_bytes, &sum)) {
            return -1;
        }
        if (sum != u64(frame + FRAME_CHECKSUM_AT)) {
            return 0;
        }
        PyObject * head = head_of(frame);
        if (head == NULL) {
            return -1;
        }
        PyList_SET_ITEM(heads, (Py_ssize_t) i, head);
        rows_before += n_rows;
        const uint64_t end = (uint64_t) u32(frame + FRAME_POSITION_AT) + n_rows;
        *most_rows = n_rows > *most_rows ? n_rows : *most_rows;
        *last_position = end > *last_position ? end : *last_position;
    }
    return rows_before == found->n_rows;
}

static PyObject * frames_read(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    (void) module;
    if (n_args != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a message, as bytes, a function for checksums and a number of frames");
        return NULL;
    }
    const unsigned long frames_max = PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const uint8_t * message = (const uint8_t *) PyBytes_AS_STRING(args[0]);
    struct layout found;
    if (!lay_out(message, (uint64_t) PyBytes_GET_SIZE(args[0]), &found) || found.n_frames > frames_max) {
        Py_RETURN_NONE;
    }
    PyObject * heads = PyList_New((Py_ssize_t) found.n_frames);
    if (heads == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(heads); /* the garbage collector must not see a list with holes while checksums are computed */
    uint32_t most_rows = 0;
    uint64_t last_position = 0;
    int is_plain = is_whole(message, &found, args[1]);
    if (is_plain > 0) {
        is_plain = read_frames(&found, args[1], heads, &most_rows, &last_position);
    }
    if (is_plain <= 0) {
        Py_DECREF(heads);
        return is_plain < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject_GC_Track(heads);
    return Py_BuildValue("(IKIIIKNnIKy#)", u32(message + HEADER_EPOCH_AT), (unsigned long long) u64(message + HEADER_SEQUENCE_AT), found.dtype,
                         found.n_rows, found.width, (unsigned long long) u64(message + HEADER_SENT_NS_AT), heads,
                         (Py_ssize_t) (found.payload - message), most_rows, (unsigned long long) last_position,
                         message + HEADER_BATCH_TRACE_AT, (Py_ssize_t) TRACE_BYTES);
}

/* One record from its fields; -1 with an error set. */
static int write_frame(uint8_t * frame, PyObject * head, uint64_t sum) {
    unsigned long long session_id, argument, enqueued_ns;
    unsigned int epoch, position, n_rows, flags;
    const char * trace;
    Py_ssize_t trace_bytes;
    PyObject * ignored;
    if (!PyArg_ParseTuple(head, "KIIIIKOKy#", &session_id, &epoch, &position, &n_rows, &flags, &argument, &ignored,
                          &enqueued_ns, &trace, &trace_bytes)) {
        return -1;
    }
    if (trace_bytes != TRACE_BYTES) {
        PyErr_Format(PyExc_ValueError, "a trace context of %zd bytes", trace_bytes);
        return -1;
    }
    for (size_t i = 0; i < N_OF(FRAME_CONSTANTS); i++) {
        frame[FRAME_CONSTANTS[i].at] = FRAME_CONSTANTS[i].byte;
    }
    put_u64(frame + FRAME_SESSION_ID_AT, session_id);
    put_u32(frame + FRAME_EPOCH_AT, epoch);
    put_u32(frame + FRAME_POSITION_AT, position);
    put_u32(frame + FRAME_N_ROWS_AT, n_rows);
    put_u32(frame + FRAME_FLAGS_AT, flags);
    put_u64(frame + FRAME_ARGUMENT_AT, argument);
    put_u64(frame + FRAME_CHECKSUM_AT, sum);
    put_u64(frame + FRAME_ENQUEUED_NS_AT, enqueued_ns);
    memcpy(frame + FRAME_TRACE_AT, trace, TRACE_BYTES);
    return 0;
}

/* Writes the record of one frame with its rows at `at`; returns the bytes of the rows, -1 with an error set. */
static int64_t write_one(uint8_t * bytes, uint64_t length, uint64_t at, uint64_t frame_at, PyObject * head,
                         uint64_t row_bytes, PyObject * checksum) {
    if (!PyTuple_Check(head) || PyTuple_GET_SIZE(head) < 4) {
        PyErr_SetString(PyExc_TypeError, "a head is a tuple of a frame's fields");
        return -1;
    }
    const unsigned long n_rows = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(head, 3));
    if (n_rows == (unsigned long) -1 && PyErr_Occurred()) {
        return -1;
    }
    if (n_rows > UINT32_MAX || at > length || n_rows > (row_bytes ? (length - at) / row_bytes : 0)) {
        PyErr_SetString(PyExc_ValueError, "more rows than the message has room for");
        return -1;
    }
    uint64_t sum = 0;
    if (n_rows > 0 && checksum_of(checksum, bytes + at, n_rows * row_bytes, &sum) < 0) {
        return -1;
    }
    return write_frame(bytes + frame_at, head, sum) < 0 ? -1 : (int64_t) (n_rows * row_bytes);
}

/* Writes the records of all frames, with the checksums of their rows; 0, or -1 with an error set. */
static int write_frames(const Py_buffer * message, PyObject * heads, uint64_t payload_at, uint64_t row_bytes,
                        PyObject * checksum) {
    uint8_t * bytes = message->buf;
    const uint64_t length = (uint64_t) message->len;
    uint64_t at = payload_at;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(heads); i++) { /* the checksum function could change the list */
        const uint64_t frame_at = HEADER_BYTES + (uint64_t) FRAME_BYTES * (uint64_t) i;
        if (payload_at > length || payload_at < FRAME_BYTES || frame_at > payload_at - FRAME_BYTES) {
            PyErr_SetString(PyExc_ValueError, "more frames than the message has room for");
            return -1;
        }
        PyObject * head = Py_NewRef(PyList_GET_ITEM(heads, i));
        const int64_t n_bytes = write_one(bytes, length, at, frame_at, head, row_bytes, checksum);
        Py_DECREF(head);
        if (n_bytes < 0) {
            return -1;
        }
        at += (uint64_t) n_bytes;
    }
    return 0;
}

static PyObject * frames_write(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    Py_buffer message;
    (void) module;
    if (n_args != 5 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a message, heads in a list, two sizes and a function for checksums");
        return NULL;
    }
    const unsigned long long payload_at = PyLong_AsUnsignedLongLong(args[2]);
    const unsigned long long row_bytes = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &message, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    const int written = write_frames(&message, args[1], payload_at, row_bytes, args[4]);
    PyBuffer_Release(&message);
    return written < 0 ? NULL : Py_NewRef(Py_None);
}

/* The casts go through a general function pointer: METH_FASTCALL has another signature than PyCFunction. */
static PyMethodDef methods[] = {
    {"read", (PyCFunction) (void (*)(void)) frames_read, METH_FASTCALL, NULL},
    {"write", (PyCFunction) (void (*)(void)) frames_write, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_frames", .m_doc = "Plain envelopes, read and written whole.",
    .m_size = 0,           .m_methods = methods,
};

PyMODINIT_FUNC PyInit__frames(void) {
    return PyModuleDef_Init(&module_definition);
}
