"""The cost of an envelope: relayline's reusable buffers against a new message and new arrays per token.

`python -m benches.bench_envelope [--quick] [--json FILE]`. One frame per row, as in a decode step; f16 on the wire.

* encode: f32 rows and frame fields to the bytes that gRPC sends. decode: those bytes, checked, to rows in the f32 batch
  array of the native engine. gRPC's own work is the same for both, so it is left out.
* The two ways run in turns, so that a drifting machine affects both. The figures are medians over the runs.
* new: objects of at least the payload's size that one warm step makes, as tracemalloc sees them while the step's
  intermediates are kept alive. It does not see memory inside protobuf messages.
* copies: passes that write the whole payload again, including the f16 conversion. Each is marked in the code below.
  Copies inside protobuf count.
* The run fails if the two ways give different rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relayline.wire.envelopes import _rows
from relayline.wire.envelopes.buffers import BufferPool, with_extras
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.envelopes.envelope import checksum, parse
from relayline.wire.envelopes.frames import TRACE_BYTES
from relayline.wire.envelopes.rows import RowEncoder, decode_f16
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

WIDTHS = (1024, 4096, 8192)
ROW_COUNTS = (1, 8, 32)
TRACE = bytes(range(25))


class Reusable:
    """relayline's way; see stage/steps/step.py and stage/inbound.py."""

    name, encode_copies, decode_copies = "reusable", 1, 1

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.n_rows = rows, rows.shape[0]
        self.pool = BufferPool(DTYPE_F16, rows.shape[1])
        self.encoder = RowEncoder(*rows.shape)
        self.inputs = np.empty_like(rows)

    def encode(self, keep: list[Any]) -> bytes:
        """Return the message of one step."""
        n_rows = self.n_rows
        buffer = self.pool.lease(n_rows, n_rows)
        exponents, all_finite = self.encoder.encode(self.rows, buffer.payload)  # copy 1
        assert all_finite
        records = buffer.frames
        records["session_id"] = list(range(n_rows))
        records["epoch"] = 1
        records["position"] = [100] * n_rows
        records["n_rows"] = [1] * n_rows
        records["flags"] = [2] * n_rows
        records["argument"] = 0
        records["enqueued_ns"] = [7] * n_rows
        records["trace"] = np.frombuffer(TRACE * n_rows, f"V{TRACE_BYTES}")
        buffer.seal(1, 1, 1)
        message = with_extras(buffer, exponents, [])
        self.pool.give_back(buffer)  # gRPC copies while a write starts, so the buffer is free once it returns
        return message

    def decode(self, message: bytes, keep: list[Any]) -> None:
        """Check a message and fill `inputs` from it."""
        view = parse(message)
        for row in range(self.n_rows):  # frames of one envelope may land in different steps
            decode_f16(view.payload[row : row + 1], None, self.inputs[row : row + 1])  # copy 1, a row at a time


class Naive:
    """A new protobuf message and new arrays for every token, with the same checks."""

    name, encode_copies, decode_copies = "naive", 4, 4

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.n_rows = rows, rows.shape[0]
        self.inputs = np.empty_like(rows)

    def encode(self, keep: list[Any]) -> bytes:
        """Return the message of one step."""
        assert np.isfinite(self.rows).all()
        halves = self.rows.astype(np.float16)  # copy 1
        payload = halves.tobytes()  # copy 2
        message = pb.RelayRequest(
            epoch=1,
            sequence=1,
            dtype=pb.DTYPE_F16,
            n_rows=self.n_rows,
            width=self.rows.shape[1],
            sent_ns=1,
            n_frames=self.n_rows,
            payload=payload,  # copy 3, into the message
        )
        for row in range(self.n_rows):
            message.frames.add(
                session_id=row,
                epoch=1,
                position=100,
                n_rows=1,
                flags=2,
                checksum=checksum(halves[row]),
                enqueued_ns=7,
                trace=TRACE,
            )
        data: bytes = message.SerializeToString()  # copy 4
        keep += [halves, payload, message, data]
        return data

    def decode(self, message: bytes, keep: list[Any]) -> None:
        """Check a message and fill `inputs` from it."""
        envelope = pb.RelayRequest.FromString(message)  # copy 1
        payload = envelope.payload  # copy 2, out of the message
        halves = np.frombuffer(payload, np.float16).reshape(envelope.n_rows, envelope.width)
        for row, frame in enumerate(envelope.frames):
            assert checksum(halves[row]) == frame.checksum
        rows = halves.astype(np.float32)  # copy 3
        self.inputs[:] = rows  # copy 4, into the batch array
        keep += [payload, halves, rows]


Way = Reusable | Naive


def time_us(work: Callable[[], object], n_calls: int) -> float:
    """Mean time of one call."""
    started_ns = time.perf_counter_ns()
    for _ in range(n_calls):
        work()
    return (time.perf_counter_ns() - started_ns) / n_calls / 1e3


def _alone(work: Callable[[list[Any]], object]) -> None:
    """Run it once, and keep nothing."""
    work([])


def count_new(work: Callable[[list[Any]], object], at_least_bytes: int) -> int:
    """Objects of at least this size that one warm call makes."""
    work([])
    tracemalloc.start()
    try:
        keep: list[Any] = []
        keep.append(work(keep))
        return sum(trace.size >= at_least_bytes for trace in tracemalloc.take_snapshot().traces)
    finally:
        tracemalloc.stop()


def measure(width: int, n_rows: int, n_runs: int, run_us: float) -> dict[str, Any]:
    """Both ways at one size, in alternation."""
    rows = np.random.default_rng(n_rows).standard_normal((n_rows, width)).astype(np.float32)
    ways: list[Way] = [Reusable(rows), Naive(rows)]
    messages = [way.encode([]) for way in ways]
    for way, message in zip(ways, messages, strict=True):
        way.decode(message, [])
    assert ways[0].inputs.tobytes() == ways[1].inputs.tobytes() == rows.astype("f2").astype("f4").tobytes()
    payload_bytes = rows.size * 2
    result: dict[str, Any] = {"width": width, "rows": n_rows, "payload_bytes": payload_bytes}
    for phase in ("encode", "decode"):
        works: list[Callable[[list[Any]], object]] = [
            way.encode if phase == "encode" else functools.partial(way.decode, message)
            for way, message in zip(ways, messages, strict=True)
        ]
        calls = [max(1, int(run_us / time_us(functools.partial(_alone, work), 1))) for work in works]
        samples: list[list[float]] = [[], []]
        for _ in range(n_runs):
            for index, work in enumerate(works):
                samples[index].append(time_us(functools.partial(_alone, work), calls[index]))
        for index, way in enumerate(ways):
            result[f"{phase}_{way.name}_us"] = statistics.median(samples[index])
            result[f"{phase}_{way.name}_new"] = count_new(works[index], payload_bytes)
            result[f"{phase}_{way.name}_copies"] = way.encode_copies if phase == "encode" else way.decode_copies
    return result


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table; times are microseconds per envelope, in parentheses per frame."""
    lines = [
        "| width | rows | KiB | encode: ours | naive | ratio | decode: ours | naive | ratio | new o/n | copies o/n |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in results:
        cells = [f"{one['width']}", f"{one['rows']}", f"{one['payload_bytes'] / 1024:.0f}"]
        for phase in ("encode", "decode"):
            ours, naive = one[f"{phase}_reusable_us"], one[f"{phase}_naive_us"]
            cells += [f"{us:.1f} ({us / one['rows']:.1f})" for us in (ours, naive)] + [f"{naive / ours:.1f}x"]
        for what in ("new", "copies"):
            totals = [one[f"encode_{way}_{what}"] + one[f"decode_{way}_{what}"] for way in ("reusable", "naive")]
            cells.append(f"{totals[0]}/{totals[1]}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short runs: checks the bench itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    n_runs, run_us = (3, 2_000.0) if options.quick else (31, 20_000.0)
    results = [measure(width, n_rows, n_runs, run_us) for width in WIDTHS for n_rows in ROW_COUNTS]
    print(f"conversion: {_rows.implementations()[0]}; microseconds per envelope (per frame), median of {n_runs} runs")
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
