"""The process that encodes images, audio and videos, as `encoder.py` starts it: a crash there fails one request.

Frames to it: one byte, 1 for a video; a u64 for the most rows, a u64 size, the file. Frames from it: one byte for the
kind, a u32 and a u64 for sizes; then msgpack, and the rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import msgspec

from relayline.coordinator.media.parts import Takes
from relayline.coordinator.media.projector import Projector
from relayline.coordinator.media.video_script import Sampling
from relayline.wire.common.child_command import is_passing
from relayline.wire.common.errors import InvalidRequestError, RelaylineError

TO_ENCODER = struct.Struct("<?QQ")
FROM_ENCODER = struct.Struct("<cIQ")
READY, ENCODED, REFUSED, FAILED = b"R", b"A", b"I", b"E"
LATER = b"L"  # not loaded, but the next process may
_NICENESS = 10  # running answers come first


class Ready(msgspec.Struct):
    """The facts of a loaded projector."""

    identity: bytes
    takes: Takes
    are_mutual: bool  # rows of one image attend to each other


def main() -> None:
    """Load the projector, say so, and encode until the other end closes. Arguments: socket, files, width of rows,
    most rows of an image, frames a second and at most of a video.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the coordinator says when it is over
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as pipe, contextlib.suppress(BrokenPipeError, ConnectionError):
        path, vocabulary, n_embd, max_tokens = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
        sampling = Sampling(float(sys.argv[6]), int(sys.argv[7]))
        try:
            projector = Projector(path, vocabulary, n_embd, max_tokens, sampling)
            identity = _identity(path)
        except (RelaylineError, OSError) as error:
            _send(pipe, LATER if is_passing(error) else FAILED, str(error).encode(errors="replace"))
            return
        _send(pipe, READY, msgspec.msgpack.encode(Ready(identity, projector.takes, projector.are_mutual)))
        _serve(pipe, projector)


def _serve(pipe: socket.socket, projector: Projector) -> None:
    while (head := read_exactly(pipe, TO_ENCODER.size)) is not None:
        is_video, rows_max, size = TO_ENCODER.unpack(head)
        data = read_exactly(pipe, size)
        if data is None:
            return
        try:
            segments, rows = projector.encode(bytes(data), rows_max, is_video=is_video)
        except InvalidRequestError as error:
            _send(pipe, REFUSED, error.message.encode(errors="replace"))
        except RelaylineError as error:
            _send(pipe, FAILED, error.message.encode(errors="replace"))
        except Exception as error:
            _send(pipe, FAILED, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
        else:
            _send(pipe, ENCODED, msgspec.msgpack.encode(segments), rows.data.cast("B") if rows.size else b"")


def _send(pipe: socket.socket, kind: bytes, head: bytes, rows: bytes | memoryview = b"") -> None:
    pipe.sendall(FROM_ENCODER.pack(kind, len(head), len(rows)))
    pipe.sendall(head)
    pipe.sendall(rows)


def _identity(path: Path) -> bytes:
    """Return the sha256 of the projector: media of another one have other rows."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def read_exactly(pipe: socket.socket, size: int) -> bytearray | None:
    """Return so many bytes; None where the other end closes before."""
    data = bytearray(size)
    return data if read_into(pipe, memoryview(data)) else None


def read_into(pipe: socket.socket, view: memoryview) -> bool:
    """Fill a view with bytes; False where the other end closes before."""
    at = 0
    while at < len(view):
        n_read = pipe.recv_into(view[at:])
        if not n_read:
            return False
        at += n_read
    return True


if __name__ == "__main__":
    main()
