"""Reads an artifact in pieces for a stage that fetches it, without holding up the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from relayline.wire.common.errors import ArtifactError, InternalError, RelaylineError

log = logging.getLogger("relayline.coordinator")

# Large enough that reading and the surrounding message cost little. Small enough that a cut link loses almost nothing,
# and that many fetching stages hold only a few of them each.
CHUNK_BYTES = 256 * 1024
CHUNKS_AHEAD = 8  # read from the hub and not sent yet, of each artifact

Chunks: TypeAlias = AsyncGenerator[tuple[int, bytes], None]
Reader: TypeAlias = Callable[[threading.Event], Iterator[bytes | memoryview]]
"""Yields bytes, each piece good until the next one. It blocks, and soon after the event is set it ends."""


async def read_chunks(path: Path, offset: int, size_bytes: int, end: int = 0) -> Chunks:
    """Yield (offset, bytes) from `offset` to `end`, or to the end of a file that must have `size_bytes`.

    Raises ArtifactError.
    """
    end = min(end or size_bytes, size_bytes)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read here: {error.strerror}; split the model again") from error
    try:
        if os.fstat(handle).st_size != size_bytes:
            raise ArtifactError(f"{path}: its size differs from pipeline.json; split the model again")
        while offset < end:
            data = await asyncio.to_thread(os.pread, handle, min(CHUNK_BYTES, end - offset), offset)
            if not data:
                raise ArtifactError(f"{path}: ended early; was it changed?")
            yield offset, data
            offset += len(data)
    finally:
        os.close(handle)


async def read_unread(reader: Reader, offset: int, end: int) -> Chunks:
    """Yield (offset, bytes) from `offset` to `end` of an artifact; the reader gives these bytes, and perhaps more.

    The reader has a thread of its own, since the network may keep it for long. Raises its RelaylineError, and
    ArtifactError where it ends early.
    """
    ahead: asyncio.Queue[bytes | RelaylineError] = asyncio.Queue(CHUNKS_AHEAD)
    stopped, loop = threading.Event(), asyncio.get_running_loop()

    def put(item: bytes | RelaylineError) -> None:
        # It waits where the stage is slow. A loop that ends, or has ended, takes nothing: then there is no more to do.
        putting = ahead.put(item)
        try:
            asyncio.run_coroutine_threadsafe(putting, loop).result()
        except (RuntimeError, concurrent.futures.CancelledError):
            putting.close()
            stopped.set()

    threading.Thread(target=_read, args=(reader, stopped, put), name="hub-reader", daemon=True).start()
    try:
        while offset < end:
            found = await ahead.get()
            if isinstance(found, RelaylineError):
                raise found
            if not found:
                raise ArtifactError(f"the artifact ended after {offset} of {end} bytes")
            found = found[: end - offset]
            yield offset, found
            offset += len(found)
    finally:
        stopped.set()
        while not ahead.empty():  # a thread that waits for room has it now, and ends
            ahead.get_nowait()


def _read(reader: Reader, stopped: threading.Event, put: Callable[[bytes | RelaylineError], None]) -> None:
    """Put an artifact's bytes, then empty ones; or the error that ended the reading."""
    try:
        for chunk in _chunks(reader(stopped)):
            if stopped.is_set():
                return
            put(chunk)
    except RelaylineError as error:
        end: bytes | RelaylineError = error
    except Exception:  # a bug of ours; the stage must not wait for ever
        log.exception("reading an artifact from the hub failed")
        end = InternalError("the coordinator could not read the artifact from the hub")
    else:
        end = b""
    if not stopped.is_set():
        put(end)


def _chunks(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of CHUNK_BYTES, and a last one."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            room = CHUNK_BYTES - len(held)
            held += view[:room]
            view = view[room:]
            if len(held) == CHUNK_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)
