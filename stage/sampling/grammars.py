"""Prepares grammars outside the decode thread; a session that waits for one does not hold up the others.

A grammar of some kilobytes takes llguidance 2 ms, one of 64 KiB a tenth of a second, and all streams of a stage share
its decode thread. So two separate threads prepare them (llguidance releases the GIL), each text once. While a session's
grammar is not ready, the frames whose rows are sampled are held back. Its opening, its copies and all of its prompt
except the end go on.
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from relayline.stage.queue_types import QueuedFrame
from relayline.wire.common.bounds import GRAMMAR_ITEMS_MAX, GRAMMAR_LEXER_FUEL_MAX
from relayline.wire.common.grammars import step_items_max
from relayline.wire.envelopes.frames import Flag

STACK_BYTES = (
    64 << 20
)  # of a thread that grammars run in, as far as used: they recurse (coordinator/text/grammar_check.py)
READY_MAX = 64  # grammars that are kept ready, each of at most GRAMMAR_BYTES_MAX as text
READING_MAX = 1_024  # sessions' grammars that have read their tokens, and that no open has taken yet
N_THREADS = 2


class Grammars:
    """The grammars that were used last, ready to be followed from their beginning. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        # Kept with its vocabulary, so that no other object can have the vocabulary's id.
        self._ready: collections.OrderedDict[tuple[int, str], tuple[LLTokenizer, Future[LLMatcher]]]
        self._ready = collections.OrderedDict()
        self._reading: collections.OrderedDict[tuple[int, str, bytes], tuple[LLTokenizer, Future[LLMatcher]]]
        self._reading = collections.OrderedDict()

    def ready(self, vocabulary: LLTokenizer, grammar: str) -> Future[LLMatcher]:
        """Return a matcher that has read nothing, to be copied; it may be one with an error. Begun when first asked."""
        key = (id(vocabulary), grammar)
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
            else:
                self._ready[key] = (vocabulary, self._submit(_made, vocabulary, grammar))
            found = self._ready[key][1]
            while len(self._ready) > READY_MAX:
                self._ready.popitem(last=False)
        return found

    def read(self, vocabulary: LLTokenizer, grammar: str, said: Sequence[int], *, take: bool) -> Future[LLMatcher]:
        """Return a matcher that has read the session's tokens; the first call starts the work.

        `take` removes it here. A thousand tokens take some 50 ms: too long for the decode thread, so other threads read
        them.
        """
        key = (id(vocabulary), grammar, array.array("I", said).tobytes())
        with self._lock:
            if key in self._reading:
                _, found = self._reading.pop(key)
            else:
                ready = self._ready.get(key[:2])
                begun = ready[1].result() if ready is not None and ready[1].done() else None
                found = self._submit(_read, vocabulary, grammar, begun, list(said))
            if not take:
                self._reading[key] = (vocabulary, found)
            while len(self._reading) > READING_MAX:
                self._reading.popitem(last=False)
        return found

    def forget(self, vocabulary: LLTokenizer) -> None:
        """Its engine ends: no session asks for its grammars any more, each of which would keep all of it in memory."""
        gone, kept = id(vocabulary), collections.OrderedDict
        with self._lock:
            self._ready = kept((key, known) for key, known in self._ready.items() if key[0] != gone)
            self._reading = kept((key, known) for key, known in self._reading.items() if key[0] != gone)

    def _submit(self, make: Callable[..., LLMatcher], *arguments: Any) -> Future[LLMatcher]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(N_THREADS, "grammar")
        before_bytes = threading.stack_size(STACK_BYTES)  # of the thread that this may start
        try:
            return self._threads.submit(make, *arguments)
        finally:
            threading.stack_size(before_bytes)


grammars = Grammars()  # of this process


def _made(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    # With llguidance's own limits of time and memory, and errors without a dump of its state.
    limits = LLParserLimits(
        max_items_in_row=GRAMMAR_ITEMS_MAX,
        step_max_items=step_items_max(grammar),
        step_lexer_fuel=GRAMMAR_LEXER_FUEL_MAX,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def _read(vocabulary: LLTokenizer, grammar: str, begun: LLMatcher | None, said: list[int]) -> LLMatcher:
    matcher = _made(vocabulary, grammar) if begun is None else begun.deep_copy()
    matcher.consume_tokens(said)
    return matcher


class Holds:
    """The frames that wait until the grammars of their sessions are ready. Event loop only."""

    def __init__(
        self,
        begin: Callable[[str, Sequence[int]], Future[LLMatcher] | None],
        push: Callable[[list[QueuedFrame]], None],
    ) -> None:
        """`begin` starts to prepare a grammar that reads the session's tokens; None where this stage does not sample.

        `push` takes the frames that were held.
        """
        self._begin, self._push = begin, push
        self._held: dict[tuple[int, int], list[QueuedFrame]] = {}  # sessions that wait for one another share a list

    def __bool__(self) -> bool:
        return bool(self._held)

    def sift(self, frames: list[QueuedFrame]) -> list[QueuedFrame]:
        """Return the frames that may continue now, in order; the others follow once their grammars are ready."""
        return [frame for frame in frames if not self._holds(frame)]

    def drop_route(self, route_id: int) -> None:
        """Drop the waiting frames of a route's sessions."""
        self._held = {key: frames for key, frames in self._held.items() if key[0] != route_id}

    def _holds(self, frame: QueuedFrame) -> bool:
        key = frame.session_key
        grammar = frame.options.grammar if frame.options is not None else ""
        if grammar and not self._held.get(key):  # otherwise it opens again, after the held frames
            self._open(key, grammar, frame.options.said if frame.options is not None else ())
            return False
        if not self._held:
            return False
        source = self._held.get((frame.route_id, frame.argument)) if frame.flags & Flag.COPY_PREFIX else None
        if source:  # the source of its copy is not there yet
            self._held[key] = source
        held = self._held.get(key)
        if held is None or not (source or held or frame.flags & Flag.WANTS_SAMPLE):
            return False
        held.append(frame)
        return True

    def _open(self, key: tuple[int, int], grammar: str, said: Sequence[int]) -> None:
        future = self._begin(grammar, said)
        if future is None or future.done():
            self._held.pop(key, None)
            return
        frames: list[QueuedFrame] = []
        self._held[key] = frames
        loop, releases = asyncio.get_running_loop(), [functools.partial(self._release, frames)]

        def is_ready(_future: Future[LLMatcher]) -> None:
            # The future is kept with its grammar, and keeps this: it must not keep frames, with their route and links.
            release = releases.pop()
            with contextlib.suppress(RuntimeError):  # the stage has ended in the meantime
                loop.call_soon_threadsafe(release)

        future.add_done_callback(is_ready)

    def _release(self, frames: list[QueuedFrame]) -> None:
        keys = [key for key, held in self._held.items() if held is frames]
        for key in keys:
            del self._held[key]
        if keys and frames:
            self._push(frames)
