"""The coordinator's end of the process that encodes images. Blocking: for threads, one at a time."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from relayline.coordinator.images.encoding import (
    ENCODED,
    FROM_ENCODER,
    READY,
    READY_MUTUAL,
    REFUSED,
    TO_ENCODER,
    read_exactly,
    read_into,
)
from relayline.coordinator.images.segments import Segment
from relayline.wire.common.bounds import IMAGE_ENCODE_S, IMAGE_START_S
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import InternalError, InvalidRequestError, UsageError

log = logging.getLogger("relayline.coordinator")

_DIED = "the process that encodes images ended; the next image starts another"
_NOT_STARTED = "the process that encodes images did not start again; the next image tries it once more"


class Encoder:
    """Starts the process, asks it, and starts another after it has died."""

    def __init__(self, projector: Path, vocabulary: Path, n_embd: int, max_tokens: int = 0) -> None:
        """`vocabulary`: a GGUF file with that of the model. `n_embd`: values of each row.

        `max_tokens`: most rows of an image, where its size can be chosen; 0: as the projector says.
        """
        self._files, self._max_tokens = (str(projector), str(vocabulary)), max_tokens
        self.n_embd = n_embd
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._is_closed = False
        self.identity = b""  # of the projector, once it has been loaded
        self.are_mutual = False  # whether rows of one image attend to each other

    def start(self) -> None:
        """Start the process and wait until it has loaded the projector.

        Raises UsageError, with its reason, where it cannot.
        """
        ours, theirs = socket.socketpair()
        arguments = (str(theirs.fileno()), *self._files, str(self.n_embd), str(self._max_tokens))
        command = module_command("relayline.coordinator.images.encoding", *arguments)
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._pipe = ours
        ours.settimeout(IMAGE_START_S)
        kind, head, _ = self._receive()
        if kind not in (READY, READY_MUTUAL):
            self._end()
            raise UsageError(
                head.decode(errors="replace") or f"--mmproj {self._files[0]}: loading it ended the process"
            )
        self.identity, self.are_mutual = head, kind == READY_MUTUAL

    def encode(self, data: bytes, rows_max: int) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        """Return the segments that an image becomes, and its rows: f32 [n, n_embd]; none if they are over `rows_max`.

        Raises InvalidRequestError for a file that is no image, InternalError where encoding fails.
        """
        if self._pipe is None:
            if self._is_closed:
                raise InternalError("the coordinator is closing")
            self._start_again()
        assert self._pipe is not None
        self._pipe.settimeout(IMAGE_ENCODE_S)
        try:
            self._pipe.sendall(TO_ENCODER.pack(rows_max, len(data)))
            self._pipe.sendall(data)
        except OSError:
            self._end()
            raise InternalError(_DIED) from None
        kind, head, rows = self._receive()
        if kind == ENCODED:
            return msgspec.msgpack.decode(head, type=list[Segment]), rows
        if kind == REFUSED:
            raise InvalidRequestError(head.decode(errors="replace"))
        raise InternalError(head.decode(errors="replace") or _DIED)

    def _start_again(self) -> None:
        try:
            self.start()
        except UsageError as error:  # no mistake of the client, who gets no path either
            log.warning("the process that encodes images did not start again: %s", error.message)
            raise InternalError(_NOT_STARTED) from error

    def _receive(self) -> tuple[bytes, bytes, npt.NDArray[np.float32]]:
        """Return the kind of an answer, its head and its rows; the kind is empty where the process has died."""
        rows = np.empty((0, self.n_embd), np.float32)
        with contextlib.suppress(OSError):
            assert self._pipe is not None
            header = read_exactly(self._pipe, FROM_ENCODER.size)
            if header is not None:
                kind, n_head_bytes, n_bytes = FROM_ENCODER.unpack(header)
                head = read_exactly(self._pipe, n_head_bytes)
                rows = np.empty((n_bytes // (4 * self.n_embd), self.n_embd), np.float32)
                if head is not None and (not rows.size or read_into(self._pipe, rows.data.cast("B"))):
                    return kind, bytes(head), rows
        self._end()
        return b"", b"", rows

    def _end(self) -> None:
        pipe, process = self._pipe, self._process
        self._pipe = self._process = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process, from any thread. A call that waits for it raises InternalError."""
        self._is_closed = True
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
