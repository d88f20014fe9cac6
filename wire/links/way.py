"""How long the way to a relayed stage is: frames that its end acknowledges, through all that carries its connections.

to the stage        length (4 bytes, little endian), then so many bytes
from the stage      one byte for each frame
"""

from __future__ import annotations

import asyncio
import time

from relayline.wire.common.tasks import end_task

ROUND_TRIPS = 5  # the quickest counts
FRAME_BYTES = 256 * 1024
FRAMES_MAX = 64  # 16 MiB
SEND_S = 1.0  # for which frames are sent at most
ANSWER_S = 10.0  # for the last of them to be acknowledged
_LENGTH_BYTES = 4
_ACKNOWLEDGED = b"\0"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be the end at the stage: acknowledge frames until the other end is done."""
    try:
        while True:
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
            await reader.readexactly(min(length, FRAME_BYTES))
            writer.write(_ACKNOWLEDGED)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
    """Return the quickest round trip in nanoseconds, and the bytes per second to the stage.

    Raises OSError, TimeoutError, asyncio.IncompleteReadError.
    """
    async with asyncio.timeout(ANSWER_S + SEND_S):
        round_trips = []
        for _ in range(ROUND_TRIPS):
            began_ns = time.monotonic_ns()
            await _send(writer, 1)
            await reader.readexactly(1)
            round_trips.append(time.monotonic_ns() - began_ns)
        sending = asyncio.create_task(_send_for_a_while(writer))
        try:
            n_frames, first_ns, last_ns = 0, 0, 0
            while not sending.done() or n_frames < sending.result():
                await reader.readexactly(1)
                last_ns = time.monotonic_ns()
                first_ns = first_ns or last_ns
                n_frames += 1
        finally:
            await end_task(sending)
    took_ns = last_ns - first_ns
    return min(round_trips), (n_frames - 1) * FRAME_BYTES / took_ns * 1e9 if took_ns else 0.0


async def _send(writer: asyncio.StreamWriter, n_bytes: int) -> None:
    writer.write(n_bytes.to_bytes(_LENGTH_BYTES, "little") + bytes(n_bytes))
    await writer.drain()


async def _send_for_a_while(writer: asyncio.StreamWriter) -> int:
    """Return how many frames were sent, at least two."""
    n_frames, until_ns = 0, time.monotonic_ns() + round(SEND_S * 1e9)
    while n_frames < 2 or (n_frames < FRAMES_MAX and time.monotonic_ns() < until_ns):
        await _send(writer, FRAME_BYTES)
        n_frames += 1
    return n_frames
