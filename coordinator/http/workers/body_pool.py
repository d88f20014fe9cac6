"""Worker processes for bodies, and their schedule. The smallest bodies need none. Short ones have a separate worker, so
that they never wait for long ones; a body that takes it too long is done again among the long ones. Grammars have
separate workers too. Each line is bounded, and fair between clients (`fair_line.py`). A client that goes away while it
waits leaves the line; one that goes away while a worker is busy with its body has that worker ended, and the next one
forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from pathlib import Path
from typing import cast

import msgspec

from relayline.coordinator.answers.syntax import HERMES
from relayline.coordinator.answers.template import ToolStyle
from relayline.coordinator.http.workers.body_worker import (
    ANSWERED,
    CPU_S_MAX,
    ENTERED,
    EXHAUSTED,
    FAILED,
    FROM_WORKER,
    PHASE_OF,
    QUICK_CPU_S_MAX,
    TEMPLATE_CPU_S_MAX,
    TO_WORKER,
    Failure,
    Terms,
)
from relayline.coordinator.http.workers.forks import fork_server
from relayline.coordinator.http.workers.prepared import Asked, Phase, Setting, Style
from relayline.coordinator.http.workers.preparing import Preparer
from relayline.coordinator.http.workers.turns import Turns
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RelaylineError,
    StartError,
    from_wire,
)

# The smallest bodies are read on the event loop: for them another process costs a busy machine more. Their cost is
# bounded by their size: at most this many pieces of text. llama.cpp starts each piece from zero, and some vocabularies
# take 5 ms to start one; with those nothing is read here. Chats are not read here either: their template may do
# anything.
INLINE_BYTES_MAX = 256
INLINE_START_S_MAX = 50e-6
QUICK_BYTES_MAX = 16 * 1024  # of a body that has the short ones' worker
N_LONG, N_GRAMMAR = 2, 2  # workers; a client alone has all but one
GRAMMAR_CPU_S_MAX = 5.0  # to make one; trying it has separate bounds (coordinator/text/grammar_check.py)
NICENESS = 10  # of workers for long bodies: running answers come first
WALL_S_MAX = 60.0  # of one request, once it has a worker; the bounds of a body are of processor time
KEEP_BYTES_MAX = 1024 * 1024  # a worker that had more than this in hand is not kept: its memory is given back
PIECE_BYTES = 128 * 1024  # of a body, copied to the pipe at once; the next ones wait until it has room
_ANSWER_BYTES_MAX = 256 * 1024 * 1024


class _WorkerDiedError(Exception):
    """A worker went over a bound."""

    def __init__(self, phase: Phase | None) -> None:
        super().__init__(phase)
        self.phase = phase  # the worker's activity; None if it had not begun


class _Worker(asyncio.Protocol):
    """The coordinator's end of the pipe to a worker. Only an answer wakes its waiter."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pipe = cast("asyncio.Transport", None)  # until it is connected
        self._came = bytearray()
        self._phase: Phase | None = None  # the activity with the body that was sent last
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.is_lost = False

    def send(self, *parts: bytes | memoryview) -> None:
        """Send frames."""
        self._pipe.writelines(parts)

    async def talk(self, asked: bytes, raw: bytes) -> tuple[bytes, bytes]:
        """Send a body. Return the kind of the answer and the answer. Raises _WorkerDiedError."""
        self._phase = None
        answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            if self.is_lost:
                self._died()
            else:
                await self._send_body(asked, memoryview(raw))
            return await answer
        finally:
            answer.cancel()  # where it is not awaited any more

    async def _send_body(self, asked: bytes, raw: memoryview) -> None:
        self.send(TO_WORKER.pack(len(asked), len(raw)), asked, raw[:PIECE_BYTES])
        for begin in range(PIECE_BYTES, len(raw), PIECE_BYTES):
            await self._may_write.wait()
            if self.is_lost:
                return
            self.send(raw[begin : begin + PIECE_BYTES])

    def pause_writing(self) -> None:
        """The pipe is full."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """The pipe has room again."""
        self._may_write.set()

    def end(self) -> None:
        """End the worker at once."""
        fork_server.end(self._number)
        self._pipe.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the pipe."""
        self._pipe = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take a part of the worker's answer."""
        came = self._came
        came += data
        while len(came) >= FROM_WORKER.size:
            kind, size = FROM_WORKER.unpack_from(came)
            end = FROM_WORKER.size + size
            if size <= _ANSWER_BYTES_MAX and len(came) < end:
                return
            with memoryview(came) as view:  # copied once: an answer repeats the items of a body
                content = bytes(view[FROM_WORKER.size : end])
            del came[:end]
            if kind == ENTERED and content in PHASE_OF:
                self._phase = PHASE_OF[content]
            elif kind in (ANSWERED, FAILED) and size <= _ANSWER_BYTES_MAX:
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result((kind, content))
            else:
                self._died()

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker has ended, or its pipe was closed."""
        self.is_lost = True
        self._may_write.set()
        self._died()

    def _died(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_WorkerDiedError(self._phase))


class _Workers:
    """A few alike, and the line before them."""

    def __init__(self, setting: bytes, tokenizer: Path, n_workers: int, terms: Terms) -> None:
        self._setting, self._tokenizer, self._terms = setting, tokenizer, msgspec.msgpack.encode(terms)
        self._turns = Turns(n_workers)
        self._idle: list[_Worker] = []
        self._is_closed = False

    async def ask(self, client: str, asked: bytes, raw: bytes) -> bytes:
        """Return the answer; raises the worker's error, _WorkerDiedError where it died, OverloadedError."""
        async with self._turns.turn(client, len(raw)):
            try:
                kind, answer = await self._talk(asked, raw)
            except _WorkerDiedError as died:
                if died.phase is not None:
                    raise
                kind, answer = await self._talk(asked, raw)  # the body was not its reason: it was killed before
        if kind == FAILED:
            raise _raised(msgspec.msgpack.decode(answer, type=Failure))
        return answer

    async def _talk(self, asked: bytes, raw: bytes) -> tuple[bytes, bytes]:
        worker = self._fit() or await self._new()
        is_fit = False
        try:
            async with asyncio.timeout(WALL_S_MAX):
                kind, answer = await worker.talk(asked, raw)
            is_fit = kind in (ANSWERED, FAILED) and len(raw) + len(answer) <= KEEP_BYTES_MAX
        except TimeoutError:
            raise OverloadedError("this host is too busy to read the body in time; try again") from None
        finally:
            if is_fit and not self._is_closed:
                self._idle.append(worker)
            else:
                worker.end()
        return kind, answer

    def close(self) -> None:
        """End the idle workers; the others end with their requests."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().end()

    def _fit(self) -> _Worker | None:
        """Return an idle worker, if there is one. Killed ones are left out: they die with the fork server, too."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_lost:
                return worker
            worker.end()
        return None

    async def _new(self) -> _Worker:
        try:
            number, pipe = fork_server.fork(self._tokenizer)
        except OSError as error:
            raise OverloadedError(f"no process to read the body with: {error.strerror or error}") from error
        try:
            pipe.setblocking(False)
            worker = _Worker(number)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=pipe)
        except BaseException:
            fork_server.end(number)
            pipe.close()
            raise
        worker.send(TO_WORKER.pack(len(self._terms), len(self._setting)), self._terms, self._setting)
        return worker


class BodyPool:
    """All workers of one application. Event loop only."""

    def __init__(self, setting: Setting, tokenizer: Tokenizer) -> None:
        """No process is started yet."""
        sent, path = msgspec.msgpack.encode(setting), tokenizer.path
        self._inline = Preparer(setting, tokenizer) if _starts_quickly(tokenizer) else None
        self._quick = _Workers(sent, path, 1, Terms(QUICK_CPU_S_MAX, template_cpu_s_max=TEMPLATE_CPU_S_MAX))
        self._long = _Workers(sent, path, N_LONG, Terms(CPU_S_MAX, NICENESS, TEMPLATE_CPU_S_MAX))
        self._grammars = _Workers(sent, path, N_GRAMMAR, Terms(GRAMMAR_CPU_S_MAX, NICENESS))

    async def ask(self, client: str, asked: Asked, raw: bytes) -> bytes:
        """Return a worker's answer to a body.

        Raises the body's error; InvalidRequestError where it takes too much time or memory; OverloadedError where too
        many wait.
        """
        is_small = len(raw) <= INLINE_BYTES_MAX <= asked.ctx_tokens and asked.route == "completions"
        if is_small and self._inline is not None:
            return self._inline.answer(asked, raw, lambda phase: None)
        message = msgspec.msgpack.encode(asked)
        if asked.route == "grammar":
            return await self._bounded(self._grammars, client, message, raw, asked)
        if len(raw) <= QUICK_BYTES_MAX:
            with contextlib.suppress(_WorkerDiedError):
                return await self._quick.ask(client, message, raw)
        return await self._bounded(self._long, client, message, raw, asked)

    def close(self) -> None:
        """End the workers."""
        for workers in (self._quick, self._long, self._grammars):
            workers.close()

    async def _bounded(self, workers: _Workers, client: str, message: bytes, raw: bytes, asked: Asked) -> bytes:
        try:
            return await workers.ask(client, message, raw)
        except _WorkerDiedError as died:
            raise _too_much(asked, died.phase) from None


def _starts_quickly(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary begins with a piece of text soon, at the best of a few times."""
    if not tokenizer.has_text:
        return True
    best_s = math.inf
    for _ in range(5):
        start_s = time.perf_counter()
        tokenizer.encode("a b")
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s <= INLINE_START_S_MAX


def _too_much(asked: Asked, phase: Phase | None) -> RelaylineError:
    if phase is None:
        return InternalError("the process that reads bodies does not start; the coordinator's tokenizer file is needed")
    if asked.route == "grammar":
        return InvalidRequestError("the grammar of the answer takes too much time or memory to make")
    if phase == "template":
        text = "the model's chat template takes too much time or memory for this chat"
        return InvalidRequestError(text, param="messages")
    if phase == "tokens":
        param = {"chat": "messages", "template": "messages", "tokenize": "content"}.get(asked.route, "prompt")
        text = "it takes too much time or memory to tokenise; a word of many kilobytes may be the reason"
        return InvalidRequestError.of_field(param, text)
    return InvalidRequestError("the body takes too much time or memory to read; it has too many values")


def find_style(setting: Setting, tokenizer: Path) -> Style:
    """Return how a template writes tools, found in a separate process.

    Not for a running event loop. Raises StartError if no process can be started.
    """
    try:
        number, pipe = fork_server.fork(tokenizer)
    except OSError as error:
        raise StartError(f"cannot start a process that reads bodies: {error.strerror or error}") from error
    first, sent = msgspec.msgpack.encode(Terms(TEMPLATE_CPU_S_MAX)), msgspec.msgpack.encode(setting)
    asked = msgspec.msgpack.encode(Asked("style"))
    with pipe, contextlib.closing(pipe.makefile("rb")) as answers:
        pipe.settimeout(WALL_S_MAX)
        try:
            pipe.sendall(TO_WORKER.pack(len(first), len(sent)) + first + sent)
            pipe.sendall(TO_WORKER.pack(len(asked), 0) + asked)
            kind = ENTERED
            while kind == ENTERED:
                kind, size = FROM_WORKER.unpack(answers.read(FROM_WORKER.size))
                answer = answers.read(size)
        except (OSError, struct.error):  # it has ended
            kind = EXHAUSTED
        finally:
            fork_server.end(number)
    if kind == ANSWERED:
        return msgspec.msgpack.decode(answer, type=Style)
    return Style.of(ToolStyle(HERMES), "this model's chat template takes too much time or memory; use /v1/completions")


def _raised(failure: Failure) -> RelaylineError:
    error = from_wire(failure.label, failure.message)
    if isinstance(error, InvalidRequestError):
        error.param = failure.param
    if isinstance(error, OverloadedError):
        error.retry_after_s = failure.retry_after_s
    return error
