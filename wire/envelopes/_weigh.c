/* Estimates the memory that parsing a protobuf message would take, from its bytes alone. wire/envelopes/messages.py tells
 * the reasons and the callers.
 *
 * Two bytes of a message may become a hundred in the library's memory. `weigh` returns an upper bound of the library's
 * allocations, and stops as soon as that is over the limit. It follows the library's rules: a field with a wire type other
 * than the contract's counts as unknown. A malformed message is weighed up to the fault, because the library reads no
 * further.
 *
 * The table has ENTRIES 32-bit numbers for each message type. The first is the size of an empty message. The entry at a
 * field's number holds its kind, the bytes of one element in memory, and the encoding or message type of the elements.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define FIELD_NUMBER_MAX 63u
#define ENTRIES (FIELD_NUMBER_MAX + 1u)
#define DEPTH_MAX 8 /* messages within messages; the contract has three */

enum kind { UNKNOWN = 0, SINGLE = 1, REPEATED = 2, TEXT = 3, MESSAGE = 4 };

/* In addition to the value itself: */
#define SINGLE_BYTES 1u    /* nothing is allocated; this bounds the time */
#define ELEMENT_BYTES 16u  /* a place in an array that grows by doubling */
#define TEXT_BYTES 32u     /* address and length, in an array that grows by doubling */
#define UNKNOWN_BYTES 48u  /* its entry among the unknown fields */

struct span {
    const uint8_t * at;
    const uint8_t * end;
};

struct field {
    uint32_t number, wire_type;
    uint64_t value;   /* of a varint */
    struct span data; /* of a length-delimited field */
};

static int read_varint(struct span * from, uint64_t * value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64 && from->at < from->end; shift += 7) {
        const uint8_t byte = *from->at++;
        *value |= (uint64_t) (byte & 0x7Fu) << shift;
        if (byte < 0x80) {
            return 1;
        }
    }
    return 0;
}

static int skip(struct span * from, uint64_t n_bytes) {
    if (n_bytes > (uint64_t) (from->end - from->at)) {
        return 0;
    }
    from->at += n_bytes;
    return 1;
}

/* Returns 1 and the next field; 0 if there is none, or if it is malformed. A group counts as malformed: the contract has
 * none. */
static int next_field(struct span * from, struct field * found) {
    uint64_t tag;
    if (from->at == from->end || !read_varint(from, &tag) || tag > UINT32_MAX || tag >> 3 == 0) {
        return 0;
    }
    found->number = (uint32_t) (tag >> 3);
    found->wire_type = (uint32_t) (tag & 7u);
    found->value = 0;
    switch (found->wire_type) {
    case 0:
        return read_varint(from, &found->value);
    case 1:
        return skip(from, 8);
    case 5:
        return skip(from, 4);
    case 2:
        if (!read_varint(from, &found->value)) {
            return 0;
        }
        found->data.at = from->at;
        if (!skip(from, found->value)) {
            return 0;
        }
        found->data.end = from->at;
        return 1;
    default:
        return 0;
    }
}

static uint64_t n_varints(struct span data) {
    uint64_t n = 0;
    for (; data.at < data.end; data.at++) {
        n += *data.at < 0x80;
    }
    return n;
}

/* The cost of a field that is no message. `how` is the encoding of one element: 0 is a varint, else its bytes. */
static uint64_t cost_of(const struct field * field, uint32_t kind, uint32_t item_bytes, uint32_t how) {
    const uint64_t n_bytes = field->wire_type == 2 ? (uint64_t) (field->data.end - field->data.at) : 0;
    const uint32_t wire_type = how == 0 ? 0 : how == 8 ? 1 : 5;
    if (field->wire_type == 2 && kind == TEXT) {
        return TEXT_BYTES + n_bytes;
    }
    if (field->wire_type == 2 && kind == REPEATED) {
        const uint64_t n_items = how == 0 ? n_varints(field->data) : n_bytes / how;
        return ELEMENT_BYTES + 2u * item_bytes * n_items;
    }
    if (field->wire_type == wire_type && (kind == SINGLE || kind == REPEATED)) {
        return kind == SINGLE ? SINGLE_BYTES : ELEMENT_BYTES;
    }
    return UNKNOWN_BYTES + 2u * n_bytes;
}

/* The cost of a message. Over cost_max as soon as the cost is, or if there are more than fields_max fields. */
static uint64_t weigh(struct span whole, const uint32_t * table, uint32_t n_types, uint32_t root, uint64_t cost_max,
                      uint64_t fields_max) {
    struct span ends[DEPTH_MAX];
    uint32_t types[DEPTH_MAX];
    size_t depth = 0;
    uint64_t cost = table[root * ENTRIES], n_fields = 0;
    ends[0] = whole;
    types[0] = root;
    while (cost <= cost_max) {
        struct field field;
        if (!next_field(&ends[depth], &field)) {
            if (ends[depth].at != ends[depth].end || depth == 0) {
                return cost; /* the end, or the first malformed field */
            }
            depth--;
            continue;
        }
        if (++n_fields > fields_max) {
            return cost_max + 1;
        }
        const uint32_t entry = field.number <= FIELD_NUMBER_MAX ? table[types[depth] * ENTRIES + field.number] : 0;
        const uint32_t kind = entry & 0xFFu, how = entry >> 16;
        if (kind != MESSAGE || field.wire_type != 2) {
            cost += cost_of(&field, kind, (entry >> 8) & 0xFFu, how);
            continue;
        }
        if (how >= n_types || depth + 1 == DEPTH_MAX) {
            return cost_max + 1;
        }
        cost += ELEMENT_BYTES + table[how * ENTRIES];
        depth++;
        ends[depth] = field.data;
        types[depth] = how;
    }
    return cost;
}

static PyObject * py_weigh(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    (void) module;
    if (n_args != 5 || !PyBytes_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a message and a table, as bytes, a type and two limits");
        return NULL;
    }
    const unsigned long root = PyLong_AsUnsignedLong(args[2]);
    const unsigned long long cost_max = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[3]);
    const unsigned long long fields_max = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const size_t row_bytes = ENTRIES * sizeof(uint32_t), n_types = (size_t) PyBytes_GET_SIZE(args[1]) / row_bytes;
    if (root >= n_types || n_types > 0xFFFF || cost_max > UINT64_MAX / 4) {
        PyErr_SetString(PyExc_ValueError, "no such type in the table, or a limit without meaning");
        return NULL;
    }
    uint32_t * table = PyMem_Malloc(n_types * row_bytes); /* a bytes object is not aligned for numbers */
    if (table == NULL) {
        return PyErr_NoMemory();
    }
    memcpy(table, PyBytes_AS_STRING(args[1]), n_types * row_bytes);
    const uint8_t * data = (const uint8_t *) PyBytes_AS_STRING(args[0]);
    const struct span whole = {data, data + PyBytes_GET_SIZE(args[0])};
    const uint64_t cost = weigh(whole, table, (uint32_t) n_types, (uint32_t) root, cost_max, fields_max);
    PyMem_Free(table);
    return PyLong_FromUnsignedLongLong(cost);
}

/* Finds the last top-level length-delimited field with a given number. Returns the offsets of its tag, of its data and of
 * their end; None if there is no such field; False if there are several or the message is malformed. */
static PyObject * py_find(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    (void) module;
    if (n_args != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a message, as bytes, and a field's number");
        return NULL;
    }
    const unsigned long number = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const uint8_t * data = (const uint8_t *) PyBytes_AS_STRING(args[0]);
    struct span rest = {data, data + PyBytes_GET_SIZE(args[0])};
    Py_ssize_t tag_at = -1, at = 0, end = 0;
    for (;;) {
        struct field field;
        const Py_ssize_t begins = rest.at - data;
        if (!next_field(&rest, &field)) {
            break;
        }
        if (field.number == number && field.wire_type == 2) {
            if (tag_at >= 0) {
                Py_RETURN_FALSE;
            }
            tag_at = begins;
            at = field.data.at - data;
            end = field.data.end - data;
        }
    }
    if (rest.at != rest.end) {
        Py_RETURN_FALSE;
    }
    if (tag_at < 0) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(nnn)", tag_at, at, end);
}

/* The casts go through a general function pointer: METH_FASTCALL has another signature than PyCFunction. */
static PyMethodDef methods[] = {
    {"weigh", (PyCFunction) (void (*)(void)) py_weigh, METH_FASTCALL, NULL},
    {"find", (PyCFunction) (void (*)(void)) py_find, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject * module) {
    return PyModule_AddIntConstant(module, "FIELD_NUMBER_MAX", FIELD_NUMBER_MAX);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *) module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_weigh", .m_doc = "What reading a protobuf message would cost.",
    .m_size = 0,           .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__weigh(void) {
    return PyModuleDef_Init(&module_definition);
}
