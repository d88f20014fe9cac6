/* The part of CPython's stable ABI that relayline's C extensions use, for machines without the interpreter's headers.
 *
 * Debian, Ubuntu and Fedora ship those in a package of their own (python3-dev). The folder of this file is the last one
 * that the compiler looks in, see setup.py: where the interpreter has its headers, this file is not read. What stands here
 * holds for CPython 3.11 and later with the GIL (PEP 384, PEP 652). Macros of the real headers that reach into objects are
 * functions here. A name that the extensions begin to use has to be added; tests/deploy/test_python_headers.py tells.
 */
#ifndef RELAYLINE_PYTHON_H
#define RELAYLINE_PYTHON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct _ts PyThreadState;

typedef struct _object {
    Py_ssize_t ob_refcnt;
    PyTypeObject * ob_type;
} PyObject;

typedef PyObject * (*PyCFunction)(PyObject *, PyObject *);

typedef struct PyMethodDef {
    const char * ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char * ml_doc;
} PyMethodDef;

typedef struct PyModuleDef_Slot {
    int slot;
    void * value;
} PyModuleDef_Slot;

typedef struct PyModuleDef {
    struct {
        PyObject ob_base;
        PyObject * (*m_init)(void);
        Py_ssize_t m_index;
        PyObject * m_copy;
    } m_base;
    const char * m_name;
    const char * m_doc;
    Py_ssize_t m_size;
    PyMethodDef * m_methods;
    PyModuleDef_Slot * m_slots;
    void * m_traverse;
    void * m_clear;
    void * m_free;
} PyModuleDef;

typedef struct {
    void * buf;
    PyObject * obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char * format;
    Py_ssize_t * shape;
    Py_ssize_t * strides;
    Py_ssize_t * suboffsets;
    void * internal;
} Py_buffer;

#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *
#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}
#define Py_mod_exec 2
#define METH_VARARGS 0x0001
#define METH_NOARGS 0x0004
#define METH_O 0x0008
#define METH_FASTCALL 0x0080
#define PyBUF_WRITABLE 0x0001
#define PyBUF_FORMAT 0x0004
#define PyBUF_C_CONTIGUOUS 0x0038
#define PyBUF_READ 0x0100

PyObject * PyModuleDef_Init(PyModuleDef *);
int PyModule_AddIntConstant(PyObject *, const char *, long);

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyExc_TypeError, *PyExc_ValueError;
extern PyTypeObject PyBool_Type, PyDict_Type, PyFloat_Type;
#define Py_None (&_Py_NoneStruct)
#define Py_True (&_Py_TrueStruct)
#define Py_False (&_Py_FalseStruct)
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)

PyObject * Py_NewRef(PyObject *);
void Py_DecRef(PyObject *); /* takes NULL */
#define Py_DECREF Py_DecRef
#define Py_XDECREF Py_DecRef
#define Py_TYPE(object) ((object)->ob_type)
void PyObject_GC_Track(void *);
void PyObject_GC_UnTrack(void *);

unsigned long PyType_GetFlags(PyTypeObject *);
PyObject * PyType_GetName(PyTypeObject *);
int PyType_IsSubtype(PyTypeObject *, PyTypeObject *);

static inline int relayline_has_flag(PyObject * object, int bit) {
    return (PyType_GetFlags(Py_TYPE(object)) >> bit & 1) != 0;
}

#define PyLong_Check(object) relayline_has_flag(object, 24)
#define PyList_Check(object) relayline_has_flag(object, 25)
#define PyTuple_Check(object) relayline_has_flag(object, 26)
#define PyBytes_Check(object) relayline_has_flag(object, 27)
#define PyUnicode_Check(object) relayline_has_flag(object, 28)
#define PyDict_Check(object) relayline_has_flag(object, 29)
#define PyBool_Check(object) (Py_TYPE(object) == &PyBool_Type)
#define PyFloat_Check(object) PyType_IsSubtype(Py_TYPE(object), &PyFloat_Type)

/* With PY_SSIZE_T_CLEAN, which every extension defines: lengths behind `#` are Py_ssize_t. */
int _PyArg_ParseTuple_SizeT(PyObject *, const char *, ...);
PyObject * _Py_BuildValue_SizeT(const char *, ...);
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#define Py_BuildValue _Py_BuildValue_SizeT

PyObject * PyErr_Occurred(void);
void PyErr_SetString(PyObject *, const char *);
PyObject * PyErr_Format(PyObject *, const char *, ...);
PyObject * PyErr_NoMemory(void);

PyThreadState * PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState *);

void * PyMem_Malloc(size_t);
void * PyMem_Realloc(void *, size_t);
void PyMem_Free(void *);

int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
void PyBuffer_Release(Py_buffer *);
PyObject * PyMemoryView_FromMemory(char *, Py_ssize_t, int);
PyObject * PyObject_Vectorcall(PyObject *, PyObject * const *, size_t, PyObject *);

PyObject * PyBool_FromLong(long);
PyObject * PyLong_FromLong(long);
PyObject * PyLong_FromUnsignedLongLong(unsigned long long);
long long PyLong_AsLongLong(PyObject *);
unsigned long PyLong_AsUnsignedLong(PyObject *);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
double PyFloat_AsDouble(PyObject *);
#define PyFloat_AS_DOUBLE PyFloat_AsDouble

PyObject * PyBytes_FromStringAndSize(const char *, Py_ssize_t);
char * PyBytes_AsString(PyObject *);
Py_ssize_t PyBytes_Size(PyObject *);
#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size

PyObject * PyUnicode_FromString(const char *);
const char * PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
Py_ssize_t PyUnicode_GetLength(PyObject *);
#define PyUnicode_AsUTF8(object) PyUnicode_AsUTF8AndSize(object, NULL)
#define PyUnicode_GET_LENGTH PyUnicode_GetLength

PyObject * PyList_New(Py_ssize_t);
PyObject * PyList_GetItem(PyObject *, Py_ssize_t);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyList_Size(PyObject *);
#define PyList_GET_ITEM PyList_GetItem
#define PyList_SET_ITEM (void) PyList_SetItem
#define PyList_GET_SIZE PyList_Size

PyObject * PyTuple_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_GET_SIZE PyTuple_Size

int PyDict_Next(PyObject *, Py_ssize_t *, PyObject **, PyObject **);

/* A list or a tuple. */
PyObject * PySequence_Fast(PyObject *, const char *);
#define PySequence_Fast_GET_SIZE(object) (PyList_Check(object) ? PyList_Size(object) : PyTuple_Size(object))
#define PySequence_Fast_GET_ITEM(object, at) (PyList_Check(object) ? PyList_GetItem(object, at) : PyTuple_GetItem(object, at))

#endif
