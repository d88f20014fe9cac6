/* Conversion of hidden-state rows between f32 and range-safe f16: the inner loops of wire/envelopes/rows.py.
 *
 * One pass over a row converts it and finds its largest magnitude. The magnitude is the float without its sign, taken as an
 * unsigned integer. These integers order like the numbers; infinity is above every finite value, and NaN above infinity. So
 * one integer maximum also detects values that must not be sent. A row whose maximum does not fit f16 is converted again,
 * scaled by a power of two.
 *
 * Rounding is to nearest, ties to even, subnormals included: every implementation gives the same bits as numpy's own
 * conversion. Wire payloads begin at any byte address, so f16 is only ever touched through unaligned loads and stores.
 *
 * The GIL is released for large inputs only. Taking it back can cost a whole switch interval (5 ms) when the event loop
 * is busy, which is a hundred times the conversion of a decode step's rows.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little endian and are converted in place; a big-endian host is not supported"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#define HAS_NEON 1
#include <arm_neon.h>
#endif

#define F16_MAX 65504.0f
#define F16_MAX_BITS 0x477fe000u /* of the f32 65504 */
#define INFINITY_BITS 0x7f800000u
#define SIGN_CLEARED 0x7fffffffu
#define EXPONENT_MAX 112 /* 65504 * 2^112 is the largest f32 with 11 significant bits */

#define SCALED 1     /* some row has an exponent */
#define NOT_FINITE 2 /* some row holds NaN or infinity; its output means nothing */

#define RELEASE_GIL_FLOATS (1 << 18)

/* All three return the bits of the largest magnitude: of the input when narrowing, of the result when widening. Arrays are
 * passed as bytes, because they may be unaligned. */
struct kernels {
    const char * name;
    uint32_t (*largest)(const uint8_t * row, size_t n);
    uint32_t (*narrow)(const uint8_t * row, uint8_t * out, size_t n, float scale);
    uint32_t (*widen)(const uint8_t * row, uint8_t * out, size_t n, float scale);
};

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float load_f32(const uint8_t * from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint32_t magnitude_of(float value) {
    return bits_of(value) & SIGN_CLEARED;
}

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* 2^exponent for -126 <= exponent <= 127, exact. */
static float power_of_two(int exponent) {
    return float_of((uint32_t) (exponent + 127) << 23);
}

/* --- portable ---------------------------------------------------------------------------------------------------- */

static uint16_t half_of(float value) {
    const uint16_t sign = (uint16_t) ((bits_of(value) >> 16) & 0x8000u);
    const uint32_t magnitude = magnitude_of(value);
    if (magnitude >= 0x47800000u) { /* 2^16 and above, infinity, NaN */
        return sign | (magnitude > INFINITY_BITS ? 0x7e00u : 0x7c00u);
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: in [0.5, 1) the f32 step is 2^-24, the step of f16 subnormals */
        return sign | (uint16_t) (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u);
    }
    const uint32_t is_odd = (magnitude >> 13) & 1u;
    return sign | (uint16_t) ((magnitude - 0x38000000u + 0xfffu + is_odd) >> 13);
}

static float single_of(uint16_t half) {
    const uint32_t sign = (uint32_t) (half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return float_of(sign | INFINITY_BITS | (magnitude & 0x3ffu) << 13);
    }
    if (magnitude < 0x400u) {
        return float_of(sign | bits_of((float) magnitude * 0x1p-24f));
    }
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

static uint32_t largest_portable(const uint8_t * row, size_t n) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        most = larger(most, magnitude_of(load_f32(row + 4 * i)));
    }
    return most;
}

static uint32_t narrow_portable(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        const float value = load_f32(row + 4 * i);
        most = larger(most, magnitude_of(value));
        float scaled = value * scale;
        scaled = scaled > F16_MAX ? F16_MAX : scaled < -F16_MAX ? -F16_MAX : scaled;
        const uint16_t half = half_of(scaled);
        memcpy(out + 2 * i, &half, sizeof half);
    }
    return most;
}

static uint32_t widen_portable(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, row + 2 * i, sizeof half);
        const float value = single_of(half) * scale;
        most = larger(most, magnitude_of(value));
        memcpy(out + 4 * i, &value, sizeof value);
    }
    return most;
}

static const struct kernels portable = {"portable", largest_portable, narrow_portable, widen_portable};

/* --- x86-64 with AVX2 and F16C --------------------------------------------------------------------------------------- */

#ifdef HAS_AVX2
#define AVX2 __attribute__((target("avx2,f16c")))

/* In registers. Through an array, GCC would keep the caller's maximum in memory, and each turn would wait for the store. */
AVX2 static uint32_t largest_lane_avx2(__m256i lanes) {
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m128i one = _mm_max_epu32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
    return (uint32_t) _mm_cvtsi128_si32(one);
}

AVX2 static uint32_t largest_avx2(const uint8_t * row, size_t n) {
    const __m256i mask = _mm256_set1_epi32((int) SIGN_CLEARED);
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i bits = _mm256_loadu_si256((const __m256i *) (row + 4 * i));
        most = _mm256_max_epu32(most, _mm256_and_si256(bits, mask));
    }
    return larger(largest_lane_avx2(most), largest_portable(row + 4 * i, n - i));
}

AVX2 static uint32_t narrow_avx2(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    const __m256i mask = _mm256_set1_epi32((int) SIGN_CLEARED);
    const __m256 factor = _mm256_set1_ps(scale), top = _mm256_set1_ps(F16_MAX), bottom = _mm256_set1_ps(-F16_MAX);
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 values = _mm256_loadu_ps((const float *) (const void *) (row + 4 * i));
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(values), mask));
        const __m256 scaled = _mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(values, factor), top), bottom);
        _mm_storeu_si128((__m128i *) (out + 2 * i), _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
    }
    return larger(largest_lane_avx2(most), narrow_portable(row + 4 * i, out + 2 * i, n - i, scale));
}

AVX2 static uint32_t widen_avx2(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    const __m256i mask = _mm256_set1_epi32((int) SIGN_CLEARED);
    const __m256 factor = _mm256_set1_ps(scale);
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 values = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (row + 2 * i)));
        const __m256 scaled = _mm256_mul_ps(values, factor);
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(scaled), mask));
        _mm256_storeu_ps((float *) (void *) (out + 4 * i), scaled);
    }
    return larger(largest_lane_avx2(most), widen_portable(row + 2 * i, out + 4 * i, n - i, scale));
}

static const struct kernels native = {"avx2", largest_avx2, narrow_avx2, widen_avx2};

static int has_native(void) {
    /* Not every compiler's __builtin_cpu_supports knows "f16c". */
    unsigned int eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

/* --- AArch64: conversion and NEON are part of the base architecture -------------------------------------------------- */

#ifdef HAS_NEON
static uint32_t largest_neon(const uint8_t * row, size_t n) {
    uint32x4_t most = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8(row + 4 * i));
        most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(SIGN_CLEARED)));
    }
    return larger(vmaxvq_u32(most), largest_portable(row + 4 * i, n - i));
}

static uint32_t narrow_neon(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    const float32x4_t top = vdupq_n_f32(F16_MAX), bottom = vdupq_n_f32(-F16_MAX);
    uint32x4_t most = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8(row + 4 * i));
        most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(SIGN_CLEARED)));
        const float32x4_t scaled = vmulq_n_f32(vreinterpretq_f32_u32(bits), scale);
        const float16x4_t half = vcvt_f16_f32(vmaxq_f32(vminq_f32(scaled, top), bottom));
        vst1_u8(out + 2 * i, vreinterpret_u8_f16(half));
    }
    return larger(vmaxvq_u32(most), narrow_portable(row + 4 * i, out + 2 * i, n - i, scale));
}

static uint32_t widen_neon(const uint8_t * row, uint8_t * out, size_t n, float scale) {
    uint32x4_t most = vdupq_n_u32(0);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float16x4_t half = vreinterpret_f16_u8(vld1_u8(row + 2 * i));
        const uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(vcvt_f32_f16(half), scale));
        most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(SIGN_CLEARED)));
        vst1q_u8(out + 4 * i, vreinterpretq_u8_u32(bits));
    }
    return larger(vmaxvq_u32(most), widen_portable(row + 2 * i, out + 4 * i, n - i, scale));
}

static const struct kernels native = {"neon", largest_neon, narrow_neon, widen_neon};

static int has_native(void) {
    return 1;
}
#endif

static const struct kernels * active = &portable;

/* --- whole arrays ---------------------------------------------------------------------------------------------------- */

/* Convert n_rows rows and fill exponents; returns SCALED and NOT_FINITE as bits. */
static int encode_rows(const uint8_t * rows, uint8_t * out, int8_t * exponents, size_t n_rows, size_t width) {
    int found = 0;
    for (size_t row = 0; row < n_rows; row++, rows += 4 * width, out += 2 * width) {
        const uint32_t most = active->narrow(rows, out, width, 1.0f);
        exponents[row] = 0;
        if (most >= INFINITY_BITS) {
            found |= NOT_FINITE;
        } else if (most > F16_MAX_BITS) {
            /* The smallest exponent that makes the row fit. At the very end of f32 it would be one more, and the row
             * could not be scaled back without overflow: there the clamp in `narrow` rounds down instead. */
            const uint32_t above = (most - F16_MAX_BITS + 0x7fffffu) >> 23;
            exponents[row] = (int8_t) (above > EXPONENT_MAX ? EXPONENT_MAX : above);
            active->narrow(rows, out, width, power_of_two(-exponents[row]));
            found |= SCALED;
        }
    }
    return found;
}

/* Convert back; returns the bits of the largest magnitude of all. exponents may be NULL. */
static uint32_t decode_rows(const uint8_t * rows, uint8_t * out, const int8_t * exponents, size_t n_rows, size_t width) {
    if (exponents == NULL) {
        return active->widen(rows, out, n_rows * width, 1.0f);
    }
    uint32_t most = 0;
    for (size_t row = 0; row < n_rows; row++, rows += 2 * width, out += 4 * width) {
        most = larger(most, active->widen(rows, out, width, power_of_two(exponents[row])));
    }
    return most;
}

/* --- Python ---------------------------------------------------------------------------------------------------------- */

/* Get a C-contiguous buffer of `n_dim` dimensions. Its elements have the struct code `code`, in the host's byte order. */
static int take(PyObject * object, Py_buffer * view, char code, int n_dim, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) {
        return -1;
    }
    const char * format = view->format == NULL ? "B" : view->format; /* the buffer protocol's default */
    const char * actual = format + (format[0] != '\0' && strchr("@=<", format[0]) != NULL);
    const Py_ssize_t item_bytes = code == 'f' ? 4 : code == 'e' ? 2 : 1;
    if (actual[0] != code || actual[1] != '\0' || view->itemsize != item_bytes || view->ndim != n_dim) {
        PyErr_Format(PyExc_ValueError, "expected a %d-dimensional array of '%c', got %d of '%s'", n_dim, code, view->ndim, format);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int same_shape(const Py_buffer * a, const Py_buffer * b) {
    if (a->shape[0] == b->shape[0] && a->shape[1] == b->shape[1]) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "input and output differ in shape");
    return 0;
}

static int one_per_row(const Py_buffer * rows, const Py_buffer * each) {
    if (rows->shape[0] == each->shape[0]) {
        return 1;
    }
    PyErr_SetString(PyExc_ValueError, "expected one element per row");
    return 0;
}

/* wire.envelope refuses exponents that no encoder writes. This check catches a caller's mistake. */
static int usable_exponents(const Py_buffer * exponents) {
    const int8_t * each = exponents->buf;
    for (Py_ssize_t row = 0; row < exponents->shape[0]; row++) {
        if (each[row] < 0 || each[row] > EXPONENT_MAX) {
            PyErr_Format(PyExc_ValueError, "row exponent %d is outside 0..%d", each[row], EXPONENT_MAX);
            return 0;
        }
    }
    return 1;
}

static int right_count(Py_ssize_t n_given, Py_ssize_t n_wanted) {
    if (n_given == n_wanted) {
        return 1;
    }
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", n_wanted, n_given);
    return 0;
}

static PyThreadState * release_gil(const Py_buffer * rows) {
    return rows->len / (Py_ssize_t) rows->itemsize >= RELEASE_GIL_FLOATS ? PyEval_SaveThread() : NULL;
}

static void take_gil(PyThreadState * state) {
    if (state != NULL) {
        PyEval_RestoreThread(state);
    }
}

static PyObject * rows_largest(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    Py_buffer rows, out;
    PyObject * result = NULL;
    (void) module;
    if (!right_count(n_args, 2) || take(args[0], &rows, 'f', 2, 0) < 0) {
        return NULL;
    }
    if (take(args[1], &out, 'f', 1, PyBUF_WRITABLE) == 0) {
        if (one_per_row(&rows, &out)) {
            const size_t width = (size_t) rows.shape[1];
            PyThreadState * state = release_gil(&rows);
            for (Py_ssize_t row = 0; row < rows.shape[0]; row++) {
                const uint32_t most = active->largest((const uint8_t *) rows.buf + 4 * width * (size_t) row, width);
                memcpy((uint8_t *) out.buf + 4 * row, &most, sizeof most);
            }
            take_gil(state);
            result = Py_NewRef(Py_None);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&rows);
    return result;
}

static PyObject * rows_encode_f16(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    Py_buffer rows, out, exponents;
    PyObject * result = NULL;
    (void) module;
    if (!right_count(n_args, 3) || take(args[0], &rows, 'f', 2, 0) < 0) {
        return NULL;
    }
    if (take(args[1], &out, 'e', 2, PyBUF_WRITABLE) == 0) {
        if (take(args[2], &exponents, 'b', 1, PyBUF_WRITABLE) == 0) {
            if (same_shape(&rows, &out) && one_per_row(&rows, &exponents)) {
                PyThreadState * state = release_gil(&rows);
                const int found =
                    encode_rows(rows.buf, out.buf, exponents.buf, (size_t) rows.shape[0], (size_t) rows.shape[1]);
                take_gil(state);
                result = PyLong_FromLong(found);
            }
            PyBuffer_Release(&exponents);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&rows);
    return result;
}

static PyObject * rows_decode_f16(PyObject * module, PyObject * const * args, Py_ssize_t n_args) {
    Py_buffer rows, out, exponents;
    PyObject * result = NULL;
    const int has_exponents = n_args == 3 && args[1] != Py_None;
    (void) module;
    if (!right_count(n_args, 3) || take(args[0], &rows, 'e', 2, 0) < 0) {
        return NULL;
    }
    if (take(args[2], &out, 'f', 2, PyBUF_WRITABLE) == 0) {
        if (same_shape(&rows, &out) && (!has_exponents || take(args[1], &exponents, 'b', 1, 0) == 0)) {
            if (!has_exponents || (one_per_row(&rows, &exponents) && usable_exponents(&exponents))) {
                PyThreadState * state = release_gil(&rows);
                const uint32_t most = decode_rows(rows.buf, out.buf, has_exponents ? exponents.buf : NULL,
                                                  (size_t) rows.shape[0], (size_t) rows.shape[1]);
                take_gil(state);
                result = PyBool_FromLong(most < INFINITY_BITS);
            }
            if (has_exponents) {
                PyBuffer_Release(&exponents);
            }
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&rows);
    return result;
}

static PyObject * rows_implementations(PyObject * module, PyObject * unused) {
    (void) module;
    (void) unused;
#if defined(HAS_AVX2) || defined(HAS_NEON)
    if (has_native()) {
        return Py_BuildValue("(ss)", native.name, portable.name);
    }
#endif
    return Py_BuildValue("(s)", portable.name);
}

static PyObject * rows_use(PyObject * module, PyObject * name) {
    (void) module;
    const char * wanted = PyUnicode_AsUTF8(name);
    const char * previous = active->name;
    if (wanted == NULL) { /* not a string, or not valid UTF-8 */
        return NULL;
    }
    if (strcmp(wanted, portable.name) == 0) {
        active = &portable;
        return PyUnicode_FromString(previous);
    }
#if defined(HAS_AVX2) || defined(HAS_NEON)
    if (strcmp(wanted, native.name) == 0 && has_native()) {
        active = &native;
        return PyUnicode_FromString(previous);
    }
#endif
    PyErr_Format(PyExc_ValueError, "no implementation '%s' on this machine", wanted);
    return NULL;
}

/* The casts go through a general function pointer: METH_FASTCALL has another signature than PyCFunction. */
static PyMethodDef methods[] = {
    {"largest", (PyCFunction) (void (*)(void)) rows_largest, METH_FASTCALL, NULL},
    {"encode_f16", (PyCFunction) (void (*)(void)) rows_encode_f16, METH_FASTCALL, NULL},
    {"decode_f16", (PyCFunction) (void (*)(void)) rows_decode_f16, METH_FASTCALL, NULL},
    {"implementations", rows_implementations, METH_NOARGS, NULL},
    {"use", rows_use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject * module) {
#if defined(HAS_AVX2) || defined(HAS_NEON)
    active = has_native() ? &native : &portable;
#endif
    if (PyModule_AddIntConstant(module, "SCALED", SCALED) < 0 ||
        PyModule_AddIntConstant(module, "NOT_FINITE", NOT_FINITE) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "EXPONENT_MAX", EXPONENT_MAX);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *) module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_doc = "Row conversions of wire.rows.",
    .m_size = 0,           .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__rows(void) {
    return PyModuleDef_Init(&module_definition);
}
