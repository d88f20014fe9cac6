"""The coordinator's end of the process that drafts: starts it, carries messages, starts another after it has died."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from relayline.coordinator.drafting.messages import (
    FROM_DRAFTER,
    SIZE,
    FromDrafter,
    Guessed,
    Ready,
    Refused,
    ToDrafter,
    framed,
)
from relayline.wire.common.bounds import (
    DRAFT_BACKLOG_BYTES_MAX,
    DRAFT_FRAME_BYTES_MAX,
    DRAFT_RESTART_PAUSE_S,
    DRAFT_RESTARTS_MAX,
    DRAFT_START_S,
)
from relayline.wire.common.child_command import EXIT_WAIT_S, end_process, ended_loading, module_command
from relayline.wire.common.errors import StartError, UsageError

log = logging.getLogger("relayline.coordinator")


class DraftLink:
    """One draft model beside a coordinator. Everything here runs on the event loop."""

    def __init__(self, model: Path, vocabulary: Path, n_cells: int, n_threads: int, gpu_layers: int) -> None:
        """`vocabulary`: a GGUF file with that of the served model. The rest as DraftSettings."""
        self._files = str(model), str(vocabulary)
        self._numbers = str(n_cells), str(n_threads), str(gpu_layers)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._awake = asyncio.Event()  # not while the pipeline sleeps
        self._awake.set()
        self._has_rested = False  # whether the process ended because of that
        self._n_failed = 0  # starts in a row that brought no guess
        self.on_guessed: Callable[[Sequence[Guessed]], None] = lambda guesses: None
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the process has died: it knows nothing any more."""
        self.on_back: Callable[[], None] = lambda: None
        """Called when another one has been started."""

    async def start(self) -> None:
        """Start the process and wait until it has loaded the model.

        Raises UsageError, with its reason, where it cannot. Raises StartError where it may the next time: memory was
        missing, or it was killed or took too long.
        """
        ours, theirs = socket.socketpair()
        arguments = (str(theirs.fileno()), *self._files, *self._numbers)
        command = module_command("relayline.coordinator.drafting.process", *arguments)
        try:
            with theirs:
                self._process = await asyncio.to_thread(_started, command, theirs.fileno())
        except OSError as error:
            ours.close()
            raise StartError(f"--draft-model: its process cannot be started: {error}") from None
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        first, wait_s = list[FromDrafter](), 0.0
        try:
            first = await asyncio.wait_for(self._read(), DRAFT_START_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            wait_s = EXIT_WAIT_S
        except (TimeoutError, msgspec.MsgspecError):
            pass
        if not first or not isinstance(first[0], Ready):
            exit_code = await self._end(wait_s)
            if first and isinstance(first[0], Refused):
                raise (StartError if first[0].may_pass else UsageError)(f"--draft-model {first[0].why}")
            raise ended_loading(f"--draft-model {self._files[0]}", exit_code)

    def send(self, messages: list[ToDrafter]) -> None:
        """Send messages; none arrive while no process runs."""
        if self._writer is None or self._writer.is_closing():
            return
        for message in messages:
            self._writer.write(framed([message]))
        if self._writer.transport.get_write_buffer_size() > DRAFT_BACKLOG_BYTES_MAX:
            log.warning("the process that drafts reads nothing any more, and is started again")
            self._writer.transport.abort()

    async def run(self) -> None:
        """Take guesses until cancelled. A process that died is started again, DRAFT_RESTARTS_MAX times in a row.

        One that ended with `rest` is started once that is over.
        """
        while True:
            try:
                if self._awake.is_set():
                    await self._listen()
            except Exception:  # a bug of ours: it must not end the guesses in silence
                log.exception("taking the guesses of the process that drafts failed")
            await self._end()
            self.on_lost()
            if not await self._start_again():
                return
            self.on_back()

    async def _listen(self) -> None:
        while True:
            try:
                messages = await self._read()
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except msgspec.MsgspecError as error:
                log.warning("the process that drafts says what cannot be read, and is started again: %s", error)
                return
            for refused in (each for each in messages if isinstance(each, Refused)):
                log.warning("the process that drafts: %s", refused.why)
            if guesses := [each for each in messages if isinstance(each, Guessed)]:
                self._n_failed = 0
                self.on_guessed(guesses)

    async def _start_again(self) -> bool:
        while self._n_failed < DRAFT_RESTARTS_MAX:
            await self._awake.wait()
            if self._has_rested:
                self._has_rested = False
            else:
                self._n_failed += 1
                log.warning(
                    "the process that drafts ended; answers go on without its guesses until another has started"
                )
                await asyncio.sleep(DRAFT_RESTART_PAUSE_S)
            try:
                await self.start()
            except (UsageError, StartError) as error:
                if not self._has_rested:  # while it loaded
                    log.warning("the process that drafts did not start again: %s", error.message)
            else:
                return True
        log.error("the process that drafts ended %d times; there are no guesses of it any more", self._n_failed)
        return False

    async def _read(self) -> list[FromDrafter]:
        assert self._reader is not None
        (size,) = SIZE.unpack(await self._reader.readexactly(SIZE.size))
        if size > DRAFT_FRAME_BYTES_MAX:
            raise ConnectionError("a frame that is too large")
        return FROM_DRAFTER.decode(await self._reader.readexactly(size))

    async def _end(self, wait_s: float = 0.0) -> int | None:
        """End the process; returns its exit code. One that ends by itself has so many seconds."""
        writer, process = self._writer, self._process
        self._writer = self._reader = self._process = None
        if writer is not None:
            writer.transport.abort()
        return await asyncio.to_thread(end_process, process, wait_s) if process is not None else None

    async def rest(self, is_asleep: bool) -> None:
        """End the process, so that its memory is free, or let `run` start another."""
        if not is_asleep:
            self._awake.set()
            return
        self._awake.clear()
        self._has_rested = True
        if self._writer is not None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """End the process."""
        await self._end()


def _started(command: list[str], fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL)
