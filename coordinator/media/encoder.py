"""The coordinator's end of the process that encodes images, audio and videos. Blocking: for threads, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import threading
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from relayline.coordinator.media.encoding import (
    ENCODED,
    FROM_ENCODER,
    LATER,
    READY,
    REFUSED,
    TO_ENCODER,
    Ready,
    read_exactly,
    read_into,
)
from relayline.coordinator.media.parts import Takes, is_audio_file
from relayline.coordinator.media.segments import Segment
from relayline.coordinator.media.video_script import Sampling
from relayline.wire.common.bounds import AUDIO_ENCODE_S, ENCODER_START_S, IMAGE_ENCODE_S, VIDEO_ENCODE_S, VIDEO_READ_S
from relayline.wire.common.child_command import EXIT_WAIT_S, end_process, ended_loading, module_command
from relayline.wire.common.errors import InternalError, InvalidRequestError, StartError, UsageError

log = logging.getLogger("relayline.coordinator")

_DIED = "the process that encodes images and audio ended; the next file starts another"
_NOT_STARTED = "the process that encodes images and audio did not start again; the next file tries it once more"


class Encoder:
    """Starts the process, asks it, and starts another after it has died."""

    sampling = Sampling()

    def __init__(
        self, projector: Path, vocabulary: Path, n_embd: int, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> None:
        """`vocabulary`: a GGUF file with that of the model. `n_embd`: values of each row.

        `max_tokens`: most rows of an image, where its size can be chosen; 0: as the projector says. `sampling`: of
        videos.
        """
        self.sampling = sampling or self.sampling
        self._files, self._max_tokens = (str(projector), str(vocabulary)), max_tokens
        self.n_embd = n_embd
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._exit_code: int | None = None  # of the latest process that has ended
        self._is_closed = False
        self._asking = threading.Lock()
        self.identity = b""  # of the projector and what it makes of an image, once it has been loaded
        self.takes = Takes()
        self.are_mutual = False  # whether rows of one image attend to each other

    def start(self) -> None:
        """Start the process and wait until it has loaded the projector.

        Raises UsageError, with its reason, where it cannot. Raises StartError where it may the next time: memory was
        missing, or it was killed or took too long.
        """
        ours, theirs = socket.socketpair()
        numbers = (self.n_embd, self._max_tokens, *self.sampling)
        arguments = (str(theirs.fileno()), *self._files, *map(str, numbers))
        command = module_command("relayline.coordinator.media.encoding", *arguments)
        try:
            with theirs:
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        except OSError as error:
            ours.close()
            raise StartError(f"--mmproj: its process cannot be started: {error}") from None
        self._pipe = ours
        ours.settimeout(ENCODER_START_S)
        kind, head, _ = self._receive()
        if kind != READY:
            self._end()
            if head:
                raise (StartError if kind == LATER else UsageError)(head.decode(errors="replace"))
            raise ended_loading(f"--mmproj {self._files[0]}", self._exit_code)
        ready = msgspec.msgpack.decode(head, type=Ready)
        self.takes, self.are_mutual = ready.takes, ready.are_mutual
        self.identity = ready.identity + (str(self._max_tokens).encode() if self._max_tokens else b"")

    def encode(
        self, data: bytes, rows_max: int, *, is_video: bool = False
    ) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        """Return the segments that a file becomes, and its rows: f32 [n, n_embd]; none if they are over `rows_max`.

        Raises InvalidRequestError for a file that cannot be read, InternalError where encoding fails.
        """
        with self._asking:
            return self._encode(data, rows_max, is_video)

    def _encode(self, data: bytes, rows_max: int, is_video: bool) -> tuple[list[Segment], npt.NDArray[np.float32]]:
        if self._is_closed:
            raise InternalError("the coordinator is closing")
        if self._pipe is None:
            self._start_again()
        assert self._pipe is not None
        alone_s = AUDIO_ENCODE_S if is_audio_file(data) else IMAGE_ENCODE_S
        self._pipe.settimeout(VIDEO_READ_S + VIDEO_ENCODE_S if is_video else alone_s)
        try:
            self._pipe.sendall(TO_ENCODER.pack(is_video, rows_max, len(data)))
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
        except (UsageError, StartError) as error:  # no mistake of the client, who gets no path either
            log.warning("the process that encodes images and audio did not start again: %s", error.message)
            raise InternalError(_NOT_STARTED) from error

    def _receive(self) -> tuple[bytes, bytes, npt.NDArray[np.float32]]:
        """Return the kind of an answer, its head and its rows; the kind is empty where the process has died."""
        rows, wait_s = np.empty((0, self.n_embd), np.float32), EXIT_WAIT_S
        try:
            assert self._pipe is not None
            header = read_exactly(self._pipe, FROM_ENCODER.size)
            if header is not None:
                kind, n_head_bytes, n_bytes = FROM_ENCODER.unpack(header)
                head = read_exactly(self._pipe, n_head_bytes)
                rows = np.empty((n_bytes // (4 * self.n_embd), self.n_embd), np.float32)
                if head is not None and (not rows.size or read_into(self._pipe, rows.data.cast("B"))):
                    return kind, bytes(head), rows
        except TimeoutError:
            wait_s = 0.0
        except OSError:  # as if the pipe had ended
            pass
        self._end(wait_s)
        return b"", b"", rows

    def _end(self, wait_s: float = 0.0) -> None:
        pipe, process = self._pipe, self._process
        self._pipe = self._process = None
        if pipe is not None:
            pipe.close()
        if process is not None:
            self._exit_code = end_process(process, wait_s)

    async def rest(self, is_asleep: bool) -> None:
        """Free the process's memory once no file is being encoded; the next file starts another."""
        if is_asleep:
            await asyncio.to_thread(self._rest)

    def _rest(self) -> None:
        with self._asking:
            self._end()

    def close(self) -> None:
        """End the process, from any thread. A call that waits for it raises InternalError."""
        self._is_closed = True
        pipe, process = self._pipe, self._process
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.shutdown(socket.SHUT_RDWR)
        if process is not None:
            process.kill()
        with self._asking:  # the call is over now; before that its socket's number must not be another's
            self._end()
