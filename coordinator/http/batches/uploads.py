"""Takes a file from a client: multipart/form-data, piece by piece, to the disk. Its size is no matter to the memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from relayline.coordinator.batches.store import MODE, sync_file
from relayline.coordinator.http.edge.body import Request
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.wire.common.errors import InvalidRequestError

PIECE_BYTES = 256 * 1024
FIELD_BYTES_MAX = 1_024  # of a field that is no file
FIELDS_MAX = 16
NAME_CHARS_MAX = 255
_WRONG = "the body must be multipart/form-data with a file and a purpose"


@dataclasses.dataclass(slots=True)
class Uploaded:
    """The fields of a form, and the size of its file."""

    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    filename: str = ""
    n_bytes: int | None = None
    """None: the form had no file."""


async def receive(request: web.Request, path: Path, n_max: int) -> Uploaded:
    """Write the file of a form to `path`, and wait until it is on the disk; after an error it is gone.

    Raises InvalidRequestError, HttpRefusal for one of more than `n_max` bytes or that comes too slowly, and OSError.
    """
    assert isinstance(request, Request)
    if (request.content_length or 0) > n_max + PIECE_BYTES:
        raise _too_large(n_max)
    if request.content_type != "multipart/form-data":
        raise InvalidRequestError(_WRONG)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(415, "a file is sent uncompressed", "unsupported_encoding")
    found = Uploaded()
    async with _new_file(path) as file:
        with request.receiving() as limits:
            await _read_form(request, found, file, _Pace(limits, n_max))
        if found.n_bytes is None:
            raise InvalidRequestError.of_field("file", "is missing")
        await asyncio.to_thread(_finish, file, path)
    return found


async def receive_body(request: web.Request, path: Path, n_max: int) -> None:
    """Write the body of a request to `path`; after an error it is gone.

    Raises HttpRefusal for one of more than `n_max` bytes or that comes too slowly, and OSError.
    """
    assert isinstance(request, Request)
    if (request.content_length or 0) > n_max:
        raise _too_large(n_max)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(415, "the requests of a batch are sent uncompressed", "unsupported_encoding")
    async with _new_file(path) as file:
        with request.receiving() as limits:
            pace = _Pace(limits, n_max)
            while True:
                async with pace.next():
                    piece = await request.content.read(PIECE_BYTES)
                if not piece:
                    return
                pace.count(len(piece))
                await asyncio.to_thread(_write, file, piece)


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """A file to be written within; after an error it is gone. Raises OSError."""
    file = await asyncio.to_thread(_create, path)
    try:
        yield file
    except BaseException:
        await asyncio.to_thread(_remove, path)
        raise
    finally:
        file.close()


class _Pace:
    """How fast a client must send, and how much it may."""

    def __init__(self, limits: HttpLimits, n_max: int) -> None:
        self._limits, self._n_max = limits, n_max
        self._loop = asyncio.get_running_loop()
        self._begun_s, self.n_bytes = self._loop.time(), 0

    @contextlib.asynccontextmanager
    async def next(self) -> AsyncIterator[None]:
        """Wait for the next piece within. Raises HttpRefusal."""
        limits = self._limits
        left_s = self._begun_s + limits.body_grace_s + self.n_bytes / limits.body_rate_min - self._loop.time()
        try:
            async with asyncio.timeout(min(limits.body_stall_s, left_s)):
                yield
        except TimeoutError:
            text = f"the body came too slowly: {self.n_bytes} bytes so far"
            raise HttpRefusal(408, text, "timeout") from None

    def count(self, n_bytes: int) -> None:
        """So many bytes have come. Raises HttpRefusal for more than there may be."""
        self.n_bytes += n_bytes
        if self.n_bytes > self._n_max:
            raise _too_large(self._n_max)


async def _read_form(request: web.Request, found: Uploaded, file: BinaryIO, pace: _Pace) -> None:
    try:
        reader = await request.multipart()
        for _ in range(FIELDS_MAX):
            async with pace.next():
                part = await reader.next()
            if part is None:
                return
            if not isinstance(part, aiohttp.BodyPartReader) or not part.name:
                raise InvalidRequestError(_WRONG)
            if part.name == "file" and found.n_bytes is None:
                name = (part.filename or "file")[:NAME_CHARS_MAX]
                found.filename = name.encode(errors="replace").decode()  # bytes that are no text become question marks
                found.n_bytes = await _read_file(part, file, pace)
            else:
                found.fields[part.name] = await _read_field(part, pace)
    except (ValueError, AssertionError, RuntimeError, LookupError, HttpProcessingError) as error:
        raise InvalidRequestError(f"{_WRONG}, and this one is cut or broken") from error
    raise InvalidRequestError(f"{_WRONG}, and this one has more than {FIELDS_MAX} parts")


async def _read_file(part: aiohttp.BodyPartReader, file: BinaryIO, pace: _Pace) -> int:
    gathered = bytearray()
    while not part.at_eof():
        async with pace.next():
            piece = await part.read_chunk(PIECE_BYTES)
        pace.count(len(piece))
        gathered += piece
        if len(gathered) >= PIECE_BYTES:
            await asyncio.to_thread(_write, file, bytes(gathered))
            gathered.clear()
    await asyncio.to_thread(_write, file, bytes(gathered))
    return pace.n_bytes


async def _read_field(part: aiohttp.BodyPartReader, pace: _Pace) -> str:
    found = bytearray()
    while not part.at_eof():
        async with pace.next():
            found += await part.read_chunk(FIELD_BYTES_MAX)
        if len(found) > FIELD_BYTES_MAX:
            raise InvalidRequestError(f"{_WRONG}; the field {str(part.name)[:40]!r} is too long")
    return found.decode("utf-8", "replace")


def _create(path: Path) -> BinaryIO:
    file = path.open("xb", buffering=0)
    path.chmod(MODE)
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # a disk that is nearly full takes a part


def _remove(path: Path) -> None:
    """Take away a file that is not kept, if it is there. Blocks."""
    with contextlib.suppress(OSError):
        path.unlink()


def _finish(file: BinaryIO, path: Path) -> None:
    file.close()
    sync_file(path)


def _too_large(n_max: int) -> HttpRefusal:
    return HttpRefusal(413, f"the file is larger than {n_max} bytes", "body_too_large")
