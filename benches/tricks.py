"""Measures what each trick of the hot path saves: the same work with and without it, in turns.

A trick that saves too little to measure goes. `python -m benches.tricks` makes the figures of docs/results/hop.md,
which the comments at the tricks quote.

* write in place: an envelope's message is a `bytes` object that is written in place (wire/envelopes/buffers.py).
  Without: a bytearray, copied to `bytes` for each message, because gRPC takes nothing else.
* read in C: an envelope of ordinary rows is checked and read by wire/envelopes/_frames.c. Without: by numpy views
  (`_parse_canonical`), as all other envelopes are.
* rows in C: hidden rows become f16 in one pass (wire/envelopes/_rows.c). Without: numpy finds the largest value, which
  also finds NaN, and then converts.
* send at once: a step's first send begins in the turn of the event loop that delivers the step (wire/links/eager.py).
  Without: once the sending task has its turn. The time of other callbacks in that turn comes on top.
* by position: a frame from the network becomes a QueuedFrame by position (stage/inbound.py). Without: by keywords.
* spans in C: spans of batches are encoded by wire/telemetry/_otlp.c. Without: by OpenTelemetry's encoder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
import uvloop
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import AttributeValue

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common import bounds
from relayline.wire.envelopes import envelope, trace_context
from relayline.wire.envelopes.buffers import Buffer
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.envelopes.rows import RowEncoder
from relayline.wire.links.eager import Begun
from relayline.wire.telemetry.otlp import request_of
from relayline.wire.telemetry.spans import Finished, FinishedSpan

WIDTH, ROWS, N_TURNS, N_RUNS = 4_096, (1, 8, 32, 512), 2_000, 15
N_SPANS, N_ATTRIBUTES = 50, 20


def per_call_us(works: list[Callable[[], object]], n_calls: int) -> list[float]:
    """Return the time of each: the third fastest of N_RUNS alternating runs of so many calls, since hosts are busy."""
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(N_RUNS):
        for work, into in zip(works, samples, strict=True):
            began_ns = time.perf_counter_ns()
            for _ in range(n_calls):
                work()
            into.append((time.perf_counter_ns() - began_ns) / n_calls / 1e3)
    return [sorted(each)[2] for each in samples]


def written(n_rows: int) -> tuple[Buffer, Callable[[], bytes]]:
    """Return a buffer with its rows in place, and the call that writes the rest of its envelope."""
    buffer = Buffer(DTYPE_F16, WIDTH, n_rows, n_rows)
    buffer.payload[:] = 1
    heads = [(session, 5, 7, 1, 2, 0, 0, 3, bytes(25)) for session in range(n_rows)]

    def write() -> bytes:
        buffer.seal(5, 1, 2, heads=heads)
        buffer.scale_nothing()
        return buffer.close()

    return buffer, write


def in_place(n_rows: int) -> list[float]:
    """Return the time to write one envelope, without a copy and with one. The rows are in place before."""
    _, write = written(n_rows)
    return per_call_us([write, lambda: bytes(memoryview(write()))], max(20, 4_000 // n_rows))


def read_in_c(n_rows: int) -> list[float]:
    """Return the time to read and check one envelope, in C and by views."""
    buffer, write = written(n_rows)
    message = bytes(memoryview(write()))
    del buffer

    def by_views() -> object:
        found = envelope._parse_canonical(message)
        assert found is not None
        view, rows = found
        return envelope._check_frames(view, rows, bounds.ROWS_PER_FRAME_MAX)

    assert envelope._parse_plain(message, bounds.ROWS_PER_FRAME_MAX) is not None
    return per_call_us([lambda: envelope.parse(message), by_views], max(20, 2_000 // n_rows))


def rows_in_c(n_rows: int) -> list[float]:
    """Return the time to encode hidden rows as f16, in one pass and by numpy."""
    rows = np.random.default_rng(1).standard_normal((n_rows, WIDTH), dtype=np.float32)
    out, encoder = np.empty((n_rows, WIDTH), np.float16), RowEncoder(n_rows, WIDTH)

    def by_numpy() -> object:
        largest = np.abs(rows).max(axis=1)  # NaN, if there is one
        assert bool(np.isfinite(largest).all())
        np.copyto(out, rows, casting="same_kind")
        return largest

    return per_call_us([lambda: encoder.encode(rows, out), by_numpy], max(10, 500 // n_rows))


def spans_in_c() -> list[float]:
    """Return the time to encode one span of a batch, by our encoder and by OpenTelemetry's."""
    attributes: dict[str, AttributeValue] = {f"relayline.batch.number_{at}": at for at in range(N_ATTRIBUTES)}
    finished = Finished("decode ×8", trace_context.new_root(), trace_context.NONE, 1, 2, attributes)
    spans = [FinishedSpan(finished, Resource({}), InstrumentationScope("relayline"), 0, 0) for _ in range(N_SPANS)]
    calls: list[Callable[[], object]] = [lambda: request_of(spans), lambda: encode_spans(spans)]
    return [each / N_SPANS for each in per_call_us(calls, 3)]


async def begun() -> list[float]:
    """Return how long a send waits until it begins: at once, and by the task that sends."""
    queue: asyncio.Queue[Begun[None] | None] = asyncio.Queue()
    done, began_ns = asyncio.Event(), 0

    async def send() -> None:
        nonlocal began_ns
        began_ns = time.perf_counter_ns()
        await asyncio.sleep(0)

    async def send_forever() -> None:
        while True:
            await (await queue.get() or send())
            done.set()

    sending = asyncio.create_task(send_forever())
    waits: list[list[float]] = [[], []]
    for turn in range(2 * N_TURNS):
        done.clear()
        delivered_ns = time.perf_counter_ns()
        queue.put_nowait(None if turn % 2 else Begun(send()))
        await done.wait()
        waits[turn % 2].append((began_ns - delivered_ns) / 1e3)
    sending.cancel()
    return [statistics.median(each) for each in waits]


def by_position() -> list[float]:
    """Return the time to make one frame, by position and by keywords."""
    payload = np.zeros((1, WIDTH), np.float16)
    values = (1, 2, 3, 4, 1, 2, 0, payload, None, None, bytes(25), 5, 6, None, 0, 7, bytes(25))
    names = [field.name for field in dataclasses.fields(QueuedFrame)][: len(values)]
    call = ", ".join(f"{name}={name}" for name in names)  # as source, since `**` would make a dict first
    known: dict[str, object] = dict(zip(names, values, strict=True)) | {"QueuedFrame": QueuedFrame}
    works = [eval(f"lambda: QueuedFrame({form})", known) for form in (", ".join(names), call)]
    return per_call_us(works, 5_000)


def main() -> None:
    """Measure and print."""
    found = {f"write in place, {n_rows} x {WIDTH}": in_place(n_rows) for n_rows in ROWS}
    found |= {f"read in C, {n_rows} x {WIDTH}": read_in_c(n_rows) for n_rows in ROWS}
    found |= {f"rows in C, {n_rows} x {WIDTH}": rows_in_c(n_rows) for n_rows in ROWS}
    found["send at once"] = uvloop.run(begun())
    found["by position, a frame"] = by_position()
    found["spans in C, a span"] = spans_in_c()
    for name, (with_it, without) in found.items():
        print(f"{name:26} {with_it:8.2f} us, without {without:8.2f}: saves {1 - with_it / without:.0%}")


if __name__ == "__main__":
    main()
