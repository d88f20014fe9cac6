/* Writes one span as OTLP's protobuf message, from the plain values that wire/telemetry/otlp.py gives.
 *
 * The exporters make an object for every key and value. That takes some thirty times as long, under the interpreter's lock.
 * The output here is canonical protobuf: apart from the order of fields, the same bytes as the library's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TRACE_ID_BYTES 16
#define SPAN_ID_BYTES 8
#define IDS_BYTES (TRACE_ID_BYTES + SPAN_ID_BYTES)
#define STATUS_ERROR 2
#define HAS_IS_REMOTE 0x100u /* SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK */
#define IS_REMOTE 0x200u     /* SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK */
#define VARINT_BYTES_MAX 10

enum wire { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };

struct out {
    uint8_t * bytes;
    size_t n, room;
};

/* Makes room for n more bytes; -1 with an error set. */
static int reserve(struct out * out, size_t more) {
    if (out->room - out->n >= more) {
        return 0;
    }
    size_t room = out->room ? out->room : 4096;
    while (room - out->n < more) {
        room *= 2;
    }
    uint8_t * bytes = PyMem_Realloc(out->bytes, room);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    out->bytes = bytes;
    out->room = room;
    return 0;
}

static size_t varint(uint8_t * into, uint64_t value) {
    size_t n = 0;
    for (; value > 0x7F; value >>= 7) {
        into[n++] = (uint8_t) (value & 0x7F) | 0x80;
    }
    into[n++] = (uint8_t) value;
    return n;
}

static int put_varint(struct out * out, uint64_t value) {
    if (reserve(out, VARINT_BYTES_MAX) < 0) {
        return -1;
    }
    out->n += varint(out->bytes + out->n, value);
    return 0;
}

static int put_tag(struct out * out, unsigned field, enum wire wire) {
    return put_varint(out, (uint64_t) field << 3 | wire);
}

static int put_raw(struct out * out, const void * bytes, size_t n) {
    if (reserve(out, n) < 0) {
        return -1;
    }
    memcpy(out->bytes + out->n, bytes, n);
    out->n += n;
    return 0;
}

static int put_bytes(struct out * out, unsigned field, const void * bytes, size_t n) {
    return put_tag(out, field, LENGTH) < 0 || put_varint(out, n) < 0 ? -1 : put_raw(out, bytes, n);
}

static int put_text(struct out * out, unsigned field, PyObject * text) {
    Py_ssize_t n;
    const char * utf8 = PyUnicode_AsUTF8AndSize(text, &n);
    return utf8 == NULL ? -1 : put_bytes(out, field, utf8, (size_t) n);
}

static int put_fixed64(struct out * out, unsigned field, uint64_t value) {
    return put_tag(out, field, FIXED64) < 0 ? -1 : put_raw(out, &value, sizeof value);
}

static int put_number(struct out * out, unsigned field, uint64_t value) {
    return value == 0 ? 0 : put_tag(out, field, VARINT) < 0 ? -1 : put_varint(out, value);
}

/* Begins a message in a field: its content follows, then `end`. Returns its place, or (size_t) -1 with an error set. */
static size_t begin(struct out * out, unsigned field) {
    if (put_tag(out, field, LENGTH) < 0 || reserve(out, 1) < 0) {
        return (size_t) -1;
    }
    out->n++; /* room for a short length; `end` moves longer content */
    return out->n;
}

static int end(struct out * out, size_t at) {
    const size_t n = out->n - at;
    uint8_t length[VARINT_BYTES_MAX];
    const size_t n_length = varint(length, n);
    if (n_length > 1) {
        if (reserve(out, n_length - 1) < 0) {
            return -1;
        }
        memmove(out->bytes + at + n_length - 1, out->bytes + at, n);
        out->n += n_length - 1;
    }
    memcpy(out->bytes + at - 1, length, n_length);
    return 0;
}

static int put_value(struct out * out, unsigned field, PyObject * value);

/* ArrayValue */
static int put_items(struct out * out, PyObject * value) {
    const size_t at = begin(out, 5);
    if (at == (size_t) -1) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
        if (put_value(out, 1, PySequence_Fast_GET_ITEM(value, i)) < 0) {
            return -1;
        }
    }
    return end(out, at);
}

/* AnyValue: of text, bool, int, float, and lists of these. */
static int put_value(struct out * out, unsigned field, PyObject * value) {
    const size_t at = begin(out, field);
    int failed;
    if (at == (size_t) -1) {
        return -1;
    }
    if (PyUnicode_Check(value)) {
        failed = put_text(out, 1, value);
    } else if (PyBool_Check(value)) {
        failed = put_tag(out, 2, VARINT) < 0 || put_varint(out, value == Py_True) < 0;
    } else if (PyLong_Check(value)) {
        const long long number = PyLong_AsLongLong(value);
        failed = (number == -1 && PyErr_Occurred()) || put_tag(out, 3, VARINT) < 0 ||
                 put_varint(out, (uint64_t) number) < 0;
    } else if (PyFloat_Check(value)) {
        const double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        failed = put_fixed64(out, 4, bits);
    } else if (PyList_Check(value) || PyTuple_Check(value)) {
        failed = put_items(out, value);
    } else {
        PyObject * name = PyType_GetName(Py_TYPE(value));
        if (name != NULL) {
            PyErr_Format(PyExc_TypeError, "an attribute of type %U", name);
            Py_DECREF(name);
        }
        failed = -1;
    }
    return failed ? -1 : end(out, at);
}

/* One KeyValue for each entry. */
static int put_attributes(struct out * out, unsigned field, PyObject * attributes) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (!PyDict_Check(attributes)) {
        PyErr_SetString(PyExc_TypeError, "attributes are a dict");
        return -1;
    }
    while (PyDict_Next(attributes, &at, &key, &value)) {
        const size_t begun = begin(out, field);
        if (begun == (size_t) -1 || put_text(out, 1, key) < 0 || put_value(out, 2, value) < 0 || end(out, begun) < 0) {
            return -1;
        }
    }
    return 0;
}

static int put_event(struct out * out, PyObject * event) {
    PyObject *name, *attributes;
    unsigned long long at_ns;
    if (!PyArg_ParseTuple(event, "UKO", &name, &at_ns, &attributes)) {
        return -1;
    }
    const size_t at = begin(out, 11);
    return at == (size_t) -1 || put_fixed64(out, 1, at_ns) < 0 || put_text(out, 2, name) < 0 ||
                   put_attributes(out, 3, attributes) < 0 || end(out, at) < 0
               ? -1
               : 0;
}

static int put_link(struct out * out, PyObject * link) {
    const char * context;
    Py_ssize_t n_context;
    PyObject * attributes;
    if (!PyArg_ParseTuple(link, "y#O", &context, &n_context, &attributes)) {
        return -1;
    }
    if (n_context < IDS_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a link without ids");
        return -1;
    }
    const uint32_t flags = HAS_IS_REMOTE | IS_REMOTE;
    const size_t at = begin(out, 13);
    return at == (size_t) -1 || put_bytes(out, 1, context, TRACE_ID_BYTES) < 0 ||
                   put_bytes(out, 2, context + TRACE_ID_BYTES, SPAN_ID_BYTES) < 0 ||
                   put_attributes(out, 4, attributes) < 0 || put_tag(out, 6, FIXED32) < 0 ||
                   put_raw(out, &flags, sizeof flags) < 0 || end(out, at) < 0
               ? -1
               : 0;
}

typedef int (*put_one)(struct out *, PyObject *);

static int put_each(struct out * out, PyObject * items, put_one put) {
    PyObject * fast = PySequence_Fast(items, "events and links are sequences");
    int failed = fast == NULL;
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(fast); i++) {
        failed = put(out, PySequence_Fast_GET_ITEM(fast, i)) < 0;
    }
    Py_XDECREF(fast);
    return failed ? -1 : 0;
}

struct span {
    const char *own, *parent;
    Py_ssize_t n_own, n_parent;
    PyObject *name, *attributes, *events, *links, *error;
    unsigned long long start_ns, end_ns;
    unsigned int kind, n_dropped_links, n_dropped_events;
};

static int has_parent(const struct span * span) {
    static const char none[IDS_BYTES];
    return memcmp(span->parent, none, IDS_BYTES) != 0;
}

static int put_status(struct out * out, PyObject * error) {
    if (PyUnicode_GET_LENGTH(error) == 0) {
        return put_bytes(out, 15, "", 0);
    }
    const size_t at = begin(out, 15);
    return at == (size_t) -1 || put_text(out, 2, error) < 0 || put_number(out, 3, STATUS_ERROR) < 0 || end(out, at) < 0
               ? -1
               : 0;
}

static int put_span(struct out * out, const struct span * span) {
    const uint32_t flags = HAS_IS_REMOTE | (has_parent(span) ? IS_REMOTE : 0);
    if (put_bytes(out, 1, span->own, TRACE_ID_BYTES) < 0 ||
        put_bytes(out, 2, span->own + TRACE_ID_BYTES, SPAN_ID_BYTES) < 0 ||
        (has_parent(span) && put_bytes(out, 4, span->parent + TRACE_ID_BYTES, SPAN_ID_BYTES) < 0) ||
        put_text(out, 5, span->name) < 0 || put_number(out, 6, span->kind) < 0 ||
        put_fixed64(out, 7, span->start_ns) < 0 || put_fixed64(out, 8, span->end_ns) < 0 ||
        put_attributes(out, 9, span->attributes) < 0 || put_each(out, span->events, put_event) < 0 ||
        put_number(out, 12, span->n_dropped_events) < 0 || put_each(out, span->links, put_link) < 0 ||
        put_number(out, 14, span->n_dropped_links) < 0 || put_status(out, span->error) < 0 ||
        put_tag(out, 16, FIXED32) < 0) {
        return -1;
    }
    return put_raw(out, &flags, sizeof flags);
}

static PyObject * otlp_span(PyObject * module, PyObject * args) {
    struct span span;
    struct out out = {NULL, 0, 0};
    PyObject * encoded = NULL;
    (void) module;
    if (!PyArg_ParseTuple(args, "Uy#y#KKO!OOIUII", &span.name, &span.own, &span.n_own, &span.parent, &span.n_parent,
                          &span.start_ns, &span.end_ns, &PyDict_Type, &span.attributes, &span.events, &span.links,
                          &span.kind, &span.error, &span.n_dropped_links, &span.n_dropped_events)) {
        return NULL;
    }
    if (span.n_own < IDS_BYTES || span.n_parent < IDS_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a span without ids");
        return NULL;
    }
    if (put_span(&out, &span) == 0) {
        encoded = PyBytes_FromStringAndSize((const char *) out.bytes, (Py_ssize_t) out.n);
    }
    PyMem_Free(out.bytes);
    return encoded;
}

static PyMethodDef methods[] = {
    {"span", otlp_span, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_otlp", .m_doc = "Spans as OTLP's protobuf.", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__otlp(void) {
    return PyModuleDef_Init(&module_definition);
}
