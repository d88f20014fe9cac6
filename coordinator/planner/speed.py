"""The speed of a host, as curves that scale to any range of layers. Pure.

A native step over a range takes a fixed time, plus a time per byte of layers, plus on the last stage a time per byte of
the head. The latter two depend on the number of rows (see wire.common.curve: a staircase). Layers of one model are of
one kind, so their bytes measure their work. Heads are measured apart: they are quantised otherwise, and rows of a
prompt do not need them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from relayline.wire.common.curve import LADDER, CostCurve
from relayline.wire.common.units import GIB

# Curves hold the fastest of a few steps on an idle machine. Steps in service have other processes on the cores and a
# cache that fills. They took as long on a host whose steps differ by 1 %, and 1.1 to 1.45 times as long on one where
# they differ by tens (`benches.plan_accuracy` on a 1B shape). A survey sees by how much they differ; elsewhere the
# middle is predicted.
STEP_IN_SERVICE, STEP_IN_SERVICE_MAX = 1.2, 1.45
PREFILL_ROWS = (192, 256, 384, 512)
ROWS = (*LADDER, *PREFILL_ROWS)
# For a declared or estimated speed: the bytes of a weight on disk, which give the multiply-adds per byte.
BYTES_PER_WEIGHT = 0.5625  # Q4_0 and its like


@dataclasses.dataclass(frozen=True)
class Speed:
    """Costs by rows. The curves have nanoseconds per GiB of weights."""

    layers: tuple[tuple[int, float], ...]
    """(rows, ns per GiB of layers), ascending."""
    head: tuple[tuple[int, float], ...]
    """(rows, ns per GiB of head), ascending; every row wants logits."""
    step_ns: float = 0.0
    """The fixed cost of a step, for any number of rows and layers."""
    source: str = "declared"
    """measured, calibrated, declared or estimated: how much to trust it."""
    in_service: float = STEP_IN_SERVICE
    """The time of a step in service, as a multiple of the curves' time."""

    @functools.cached_property
    def _layer_curve(self) -> CostCurve:
        return CostCurve(self.layers)

    @functools.cached_property
    def _head_curve(self) -> CostCurve:
        return CostCurve(self.head)

    def layer_ns(self, rows: int) -> float:
        """Return the ns per GiB of layers in a step of `rows` rows."""
        return self._layer_curve.cost_ns(rows)

    def head_ns(self, rows: int) -> float:
        """Return the ns per GiB of head in a step of `rows` rows that all want logits."""
        return self._head_curve.cost_ns(rows)

    def scaled(self, factor: float, source: str | None = None) -> Speed:
        """Return a host that takes `factor` times as long."""
        return Speed(
            tuple((rows, ns * factor) for rows, ns in self.layers),
            tuple((rows, ns * factor) for rows, ns in self.head),
            self.step_ns * factor,
            source or self.source,
            self.in_service,
        )

    def seen_in_service(self, share: float) -> Speed:
        """Return the same for steps that usually take `share` times as long as the quickest; 0.0: unknown."""
        return dataclasses.replace(self, in_service=min(max(1.0, share), STEP_IN_SERVICE_MAX)) if share else self


def roofline(
    bytes_per_s: float,
    flops: float,
    *,
    step_ns: float = 0.0,
    bytes_per_weight: float = BYTES_PER_WEIGHT,
    source: str = "declared",
) -> Speed:
    """Return the speed of a host from only its memory bandwidth and arithmetic.

    A step reads every weight once and computes two operations per weight and row; the longer of the two counts.
    """
    read_ns = GIB / bytes_per_s * 1e9
    row_ns = 2 * GIB / bytes_per_weight / flops * 1e9
    points = tuple((rows, max(read_ns, rows * row_ns)) for rows in ROWS)
    return Speed(points, points, step_ns, source)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A measured step curve of one slice: what `relayline calibrate` prints."""

    layer_bytes: int
    head_bytes: int  # 0 where the slice has no head
    decode: Sequence[tuple[int, float]]  # (rows, ns); every row wants logits on the last stage
    prefill: Sequence[tuple[int, float]] = ()  # (rows, ns); no row but the last wants logits


def from_samples(samples: Iterable[Sample], source: str = "measured") -> Speed | None:
    """Derive a speed from measured slices of one host: None if they hold no layers.

    Two slices without head, of different size, also give the cost of a step with no layers. The head's cost is the last
    slice's time beyond its layers. Without any headless slice, head and layers count alike, byte for byte.
    """
    found = [sample for sample in samples if sample.layer_bytes and sample.decode]
    plain = sorted((sample for sample in found if not sample.head_bytes), key=lambda sample: sample.layer_bytes)
    last = next((sample for sample in found if sample.head_bytes), None)
    if plain:
        step_ns = _intercept_ns(plain[0], plain[-1])
        layers = _per_gib(_rows_of(plain[-1]), plain[-1].layer_bytes, step_ns)
    elif last is not None:
        step_ns = 0.0
        layers = _whole(last)
    else:
        return None
    return Speed(layers, layers if last is None else _head(last, Speed(layers, layers, step_ns)), step_ns, source)


def _rows_of(sample: Sample) -> list[tuple[int, float]]:
    """Return decode rows, continued by prefill rows; without a head both cost the same."""
    most = max(rows for rows, _ in sample.decode)
    return [*sample.decode, *((rows, ns) for rows, ns in sample.prefill if rows > most)]


def _intercept_ns(small: Sample, large: Sample) -> float:
    more = large.layer_bytes - small.layer_bytes
    times_small, times_large = dict(small.decode), dict(large.decode)
    common = sorted(times_small.keys() & times_large.keys())
    if not common or more * 4 < large.layer_bytes:
        return 0.0  # too much alike to tell
    rows = common[0]
    slope = (times_large[rows] - times_small[rows]) / more
    return max(0.0, min(times_small[rows] - slope * small.layer_bytes, times_small[rows]))


def _per_gib(points: Iterable[tuple[int, float]], size_bytes: int, step_ns: float) -> tuple[tuple[int, float], ...]:
    return tuple((rows, max(ns - step_ns, ns / 10) * GIB / size_bytes) for rows, ns in points)


def _whole(sample: Sample) -> tuple[tuple[int, float], ...]:
    points = _per_gib(sample.decode, sample.layer_bytes + sample.head_bytes, 0.0)
    most = points[-1][0]
    # Prompt rows leave the head out, so beyond the decode ladder the layers alone are known.
    return (*points, *((rows, ns * GIB / sample.layer_bytes) for rows, ns in sample.prefill if rows > most))


def _head(sample: Sample, rest: Speed) -> tuple[tuple[int, float], ...]:
    """Return the head's time per GiB: the step beyond its layers, but at least a tenth of the step, so that noise
    cannot win.
    """
    gib, layers_gib = sample.head_bytes / GIB, sample.layer_bytes / GIB
    return tuple(
        (rows, max(ns - rest.step_ns - rest.layer_ns(rows) * layers_gib, 0.1 * ns) / gib) for rows, ns in sample.decode
    )
