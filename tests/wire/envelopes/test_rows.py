"""Goal: native row conversion is exactly numpy's, range-safe, and finds values that must not travel.

Method: every implementation that this machine can run is compared with numpy, bit by bit, on every half, on every
rounding boundary between halves and on random floats; then properties of whole rows by hypothesis.
"""

from __future__ import annotations

import math
import sys
import threading

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from relayline.wire.common.errors import ProtocolError
from relayline.wire.envelopes import _rows
from relayline.wire.envelopes.rows import EXPONENT_MAX, RowEncoder, decode_f16

F16_MAX = float(np.finfo(np.float16).max)
F32_MAX = float(np.finfo(np.float32).max)
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE_HALVES = HALVES[np.isfinite(HALVES)]


@pytest.fixture(params=_rows.implementations(), autouse=True)
def implementation(request):
    previous = _rows.use(request.param)
    yield request.param
    _rows.use(previous)


def unaligned(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """An array at an odd address, as payloads are."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + 16, np.uint8)
    start = 1 + (raw.ctypes.data & 1 == 1)
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def encode(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, bool]:
    """Encode into an unaligned array, as in a message; returns halves, exponents, all_finite."""
    out = unaligned(rows.shape, "<f2")
    encoded = RowEncoder(max(1, rows.shape[0]), rows.shape[1]).encode(rows, out)
    return out, encoded.exponents, encoded.all_finite


def decode(halves: np.ndarray, exponents: np.ndarray | None) -> np.ndarray:
    out = np.full(halves.shape, np.nan, np.float32)
    decode_f16(halves, exponents, out)
    return out


def reference_exponent(row: np.ndarray) -> int:
    """The smallest exponent with which the row fits, found by trying, up to the largest allowed."""
    largest = float(np.abs(row).max(initial=0))
    return next((e for e in range(EXPONENT_MAX) if math.ldexp(largest, -e) <= F16_MAX), EXPONENT_MAX)


def reference_halves(row: np.ndarray) -> np.ndarray:
    scaled = np.ldexp(row.astype(np.float64), -reference_exponent(row)).clip(-F16_MAX, F16_MAX)
    return scaled.astype(np.float32).astype(np.float16)


def test_every_half_widens_to_numpys_bits():
    halves = FINITE_HALVES.reshape(2, -1)
    assert decode(halves, None).tobytes() == halves.astype(np.float32).tobytes()


def boundary_values() -> dict[str, np.ndarray]:
    positive = np.sort(FINITE_HALVES[~np.signbit(FINITE_HALVES)]).astype(np.float64)
    middles = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)  # exact: one bit more than a half has
    random = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.random.default_rng(2).integers(0x32000000, 0x477FE000, 200_000, dtype=np.uint32).view(np.float32)
    return {
        "halves": positive.astype(np.float32),
        "middles": middles,
        "negative middles": -middles,
        "just below": np.nextafter(middles, np.float32(0)),
        "just above": np.nextafter(middles, np.float32(np.inf)),
        "f32 subnormals": np.arange(1, 5000, dtype=np.uint32).view(np.float32),
        "random bits that fit": random[np.abs(random) <= F16_MAX],
        "the range of f16": near,
    }


@pytest.mark.parametrize("name", boundary_values())
def test_narrowing_gives_numpys_bits(name: str):
    values = boundary_values()[name].reshape(1, -1)
    halves, exponents, all_finite = encode(values)
    assert exponents is None
    assert all_finite
    assert np.array_equal(halves.view(np.uint16), values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33])
def test_every_width_up_to_several_vectors(width: int):
    rows = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    rows[1] *= 1e6
    halves, exponents, _ = encode(rows)
    assert exponents is not None
    for row in range(3):
        assert exponents[row] == reference_exponent(rows[row])
        assert halves[row].tobytes() == reference_halves(rows[row]).tobytes()
    expected = np.ldexp(halves.astype(np.float32), exponents[:, None].astype(np.int32))
    assert np.array_equal(decode(halves, exponents), expected)


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (0.0, 0),
        (65_504.0, 0),
        (float(np.nextafter(np.float32(65_504), np.float32(np.inf))), 1),
        (65_519.9, 1),
        (65_520.0, 1),
        (131_008.0, 1),
        (131_009.0, 2),
        (3e5, 3),
        (1e38, 111),
        (F32_MAX, EXPONENT_MAX),
    ],
)
def test_exponent_is_the_smallest_that_fits(largest: float, exponent: int):
    rows = np.array([[-largest, largest / 3, 1e-3, 0.0] * 3], np.float32)
    halves, exponents, all_finite = encode(rows)
    assert (0 if exponents is None else exponents[0]) == exponent == reference_exponent(rows[0])
    assert halves[0].tobytes() == reference_halves(rows[0]).tobytes()
    assert all_finite
    back = decode(halves, exponents)
    assert np.isfinite(back).all()
    assert np.abs(back - rows).max() <= max(largest, 1e-3) * 2**-10


def test_only_the_rows_that_need_it_are_scaled():
    rows = np.random.default_rng(3).standard_normal((4, 40)).astype(np.float32)
    rows[2, 7] = 3e5
    halves, exponents, _ = encode(rows)
    assert exponents is not None
    assert exponents.tolist() == [0, 0, 3, 0]
    plain = [0, 1, 3]
    assert halves[plain].tobytes() == rows[plain].astype(np.float16).tobytes()
    assert decode(halves, exponents)[2, 7] == pytest.approx(3e5, rel=2**-11)


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 4), st.integers(1, 40)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_round_trip_stays_within_half_precision(rows: np.ndarray):
    halves, exponents, all_finite = encode(rows)
    assert all_finite
    back = decode(halves, exponents)
    for row, got in zip(rows, back, strict=True):
        exponent = reference_exponent(row)
        exact, got = row.astype(np.float64), got.astype(np.float64)
        # Half a step of f16: relative for normal values, 2^-25 of the row's scale for subnormal ones. Beyond the last
        # f16 of the largest exponent the value is cut, by at most one step.
        step = 2**-10 if np.abs(exact).max() > F16_MAX * 2.0**EXPONENT_MAX else 2**-11
        allowed = np.maximum(np.abs(exact) * step, 2.0 ** (exponent - 25))
        assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7, 8, 16, 18])
def test_not_finite_is_found_wherever_it_stands(bad: float, at: int):
    rows = np.ones((3, 19), np.float32)
    rows[1, at] = bad
    encoder = RowEncoder(3, 19)
    assert not encoder.encode(rows, unaligned((3, 19), "<f2")).all_finite
    assert not encoder.encode(rows, unaligned((3, 19), "<f4")).all_finite
    assert np.isfinite(encoder.measure(rows)).tolist() == [True, False, True]


def test_nan_next_to_infinity_is_measured_as_not_finite():
    rows = np.array([[1, np.inf, np.nan, 2] * 5, [3, -4, 2, 0] * 5], np.float32)
    largest = RowEncoder(2, 20).measure(rows)
    assert np.isnan(largest[0])
    assert largest[1] == 4


def test_f32_rows_travel_unchanged():
    rows = np.array([[1e38, -1e-40, 3.1415927]], np.float32)
    out = unaligned((1, 3), "<f4")
    encoded = RowEncoder(1, 3).encode(rows, out)
    assert encoded == (None, True)
    assert out.tobytes() == rows.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_receiver_refuses_values_that_must_not_travel(bad: float):
    halves = np.ones((2, 9), np.float16)
    halves[1, 8] = bad
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        decode(halves, None)


def test_receiver_refuses_rows_that_overflow_when_scaled_back():
    beyond = np.array([[65_504.0]], np.float16)
    assert decode(beyond, np.array([EXPONENT_MAX], np.int8))[0, 0] == math.ldexp(65_504, EXPONENT_MAX)
    with pytest.raises(ValueError, match="exponent 113"):
        decode(beyond, np.array([EXPONENT_MAX + 1], np.int8))
    with pytest.raises(ValueError, match="exponent -1"):
        decode(beyond, np.array([-1], np.int8))


def test_results_are_reused():
    encoder = RowEncoder(8, 16)
    rows = np.full((2, 16), 1e6, np.float32)
    out = np.empty((2, 16), np.float16)
    first, second = encoder.encode(rows, out).exponents, encoder.encode(rows, out).exponents
    assert first is not None
    assert second is not None
    assert np.shares_memory(first, second)
    assert np.shares_memory(encoder.measure(rows), encoder.measure(rows))


@pytest.mark.parametrize(
    ("rows", "out"),
    [
        (np.zeros((2, 8), np.float32), np.zeros((2, 9), np.float16)),
        (np.zeros((2, 8), np.float32), np.zeros((3, 8), np.float16)),
        (np.zeros((2, 8), np.float64), np.zeros((2, 8), np.float16)),
        (np.zeros((2, 8), np.int32), np.zeros((2, 8), np.float16)),
        (np.zeros((2, 8), np.float32), np.zeros((2, 8), np.int16)),
        (np.zeros((2, 16), np.float32)[:, ::2], np.zeros((2, 8), np.float16)),
        (np.zeros((2, 8), np.float32), np.zeros((2, 16), np.float16)[:, ::2]),
        (np.zeros(16, np.float32), np.zeros((2, 8), np.float16)),
    ],
)
def test_wrong_arrays_are_a_value_error(rows: np.ndarray, out: np.ndarray):
    with pytest.raises(ValueError):
        _rows.encode_f16(rows, out, np.zeros(2, np.int8))
    with pytest.raises(ValueError):
        _rows.decode_f16(out, None, rows)


def test_wrong_calls_are_refused():
    rows, out = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float16)
    read_only = out.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError):
        _rows.encode_f16(rows, read_only, np.zeros(2, np.int8))
    with pytest.raises(ValueError, match="one element per row"):
        _rows.encode_f16(rows, out, np.zeros(3, np.int8))
    with pytest.raises(ValueError, match="one element per row"):
        _rows.decode_f16(out, np.zeros(1, np.int8), rows)
    with pytest.raises(ValueError, match="one element per row"):
        _rows.largest(rows, np.zeros(1, np.float32))
    with pytest.raises(TypeError):
        _rows.encode_f16(rows, out)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no implementation"):
        _rows.use("abacus")
    with pytest.raises(ValueError, match="wide"):
        RowEncoder(2, 9).measure(rows)


@pytest.fixture
def no_forced_switches():
    previous = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(previous)


def ran_meanwhile(n_rows: int, n_encodes: int) -> bool:
    """Whether a thread released just before many encodes of n_rows x 8192 ran before the last one returned."""
    rows, ran = np.ones((n_rows, 8192), np.float32), []
    out, encoder = np.empty(rows.shape, np.float16), RowEncoder(n_rows, 8192)
    ready, go = threading.Event(), threading.Event()

    def other():
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    go.set()
    for _ in range(n_encodes):
        encoder.encode(rows, out)
        if ran:
            break
    result = bool(ran)
    thread.join()
    return result


@pytest.mark.usefixtures("no_forced_switches")
def test_only_large_inputs_give_the_gil_away():
    # Without forced switches another thread runs only where this one lets go of the GIL by itself.
    # A thread that may run need not get a processor while one millisecond's encode lasts: it has a minute's worth.
    assert ran_meanwhile(512, n_encodes=60_000)
    assert not ran_meanwhile(8, n_encodes=1_000)
