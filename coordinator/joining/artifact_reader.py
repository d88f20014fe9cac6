"""Reads an artifact in pieces for a stage that fetches it, without holding up the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from relayline.wire.common.errors import ArtifactError

# Large enough that reading and the surrounding message cost little. Small enough that a cut link loses almost nothing,
# and that many fetching stages hold only a few of them each.
CHUNK_BYTES = 256 * 1024


async def read_chunks(path: Path, offset: int, size_bytes: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield (offset, bytes) from `offset` to the end of a file that must have `size_bytes`. Raises ArtifactError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read here: {error.strerror}; split the model again") from error
    try:
        if os.fstat(handle).st_size != size_bytes:
            raise ArtifactError(f"{path}: its size differs from pipeline.json; split the model again")
        while offset < size_bytes:
            data = await asyncio.to_thread(os.pread, handle, min(CHUNK_BYTES, size_bytes - offset), offset)
            if not data:
                raise ArtifactError(f"{path}: ended early; was it changed?")
            yield offset, data
            offset += len(data)
    finally:
        os.close(handle)
