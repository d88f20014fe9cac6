"""The saving of each trick of the hot path: the same work with and without it, in turns, `python -m benches.tricks`. A
trick that saves too little to measure goes. The figures in the comments come from here.

* in place: an envelope's message is a `bytes` object written in place (wire/envelopes/buffers.py). Without, it would be
  a bytearray, and each message a copy of it, since gRPC takes nothing but `bytes`.
* begun: a step's first send begins in the turn of the event loop that delivers the step (wire/links/eager.py). Without,
  it begins once the sending task has its turn. The time of other callbacks in that turn comes on top.
* by position: a frame from the network becomes a QueuedFrame by position (stage/inbound.py), and not by keywords.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
import uvloop

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.envelopes.buffers import Buffer
from relayline.wire.envelopes.dtypes import DTYPE_F16
from relayline.wire.links.eager import Begun

WIDTH, ROWS, N_TURNS, N_RUNS = 4_096, (1, 8, 32, 512), 2_000, 15


def per_call_us(works: list[Callable[[], object]], n_calls: int) -> list[float]:
    """Return the time of each, the median of N_RUNS alternating runs of so many calls."""
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(N_RUNS):
        for work, into in zip(works, samples, strict=True):
            began_ns = time.perf_counter_ns()
            for _ in range(n_calls):
                work()
            into.append((time.perf_counter_ns() - began_ns) / n_calls / 1e3)
    return [statistics.median(each) for each in samples]


def in_place(n_rows: int) -> list[float]:
    """Return the time to write one envelope, without a copy and with one. The rows are in place before."""
    buffer = Buffer(DTYPE_F16, WIDTH, n_rows, n_rows)
    buffer.payload[:] = 1
    heads = [(session, 5, 7, 1, 2, 0, 0, 3, bytes(25)) for session in range(n_rows)]

    def write() -> bytes:
        buffer.seal(5, 1, 2, heads=heads)
        buffer.scale_nothing()
        return buffer.close()

    return per_call_us([write, lambda: bytes(memoryview(write()))], max(20, 4_000 // n_rows))


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
    found = {f"in place, {n_rows} x {WIDTH}": in_place(n_rows) for n_rows in ROWS}
    found["begun"] = uvloop.run(begun())
    found["by position, a frame"] = by_position()
    for name, (with_it, without) in found.items():
        print(f"{name:22} {with_it:7.2f} us, without {without:7.2f}: saves {without - with_it:.2f}")


if __name__ == "__main__":
    main()
