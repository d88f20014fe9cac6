"""Traces of passes: assigns passes to windows of one second, sums them up, and decides when a window is over. Pure.

A pass is one envelope's way through all stages. The passes of one second are one trace, called a *window*. A window
also ends at WINDOW_SPANS_MAX spans. Its first pass opens it, so no window is empty. Its root span is made after all its
passes have come back, because its sums are not known earlier.

Windows are sampled like requests. In a window that is not sampled, passes with rows of a sampled request are still
recorded, and the root with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.frames import Flag

WINDOW_NS = 1_000_000_000
WINDOW_SPANS_MAX = 1_000  # a trace viewer still draws these quickly; passes under way may add some
COORDINATOR_SPANS = 2  # of a pass: its sending and its return
ANSWER_WAIT_NS = (
    60_000_000_000  # for what left in a window: a prompt's chunk at slow stages; then the root goes without
)
WINDOWS_MAX = 64  # under way; beyond that the oldest waits no longer

RecordOf: TypeAlias = "Callable[[int], SessionRecord]"


@dataclasses.dataclass(slots=True, eq=False)
class Window:
    """One trace of passes. Times are this process's monotonic clock."""

    root: bytes  # 25 bytes: the context of its root, sampled
    is_sampled: bool
    started_ns: int
    last_ns: int  # of the last thing seen of it
    n_stages: int
    n_passes: int = 0  # recorded ones; so is all below
    n_rows: int = 0
    n_tokens: int = 0
    streams_max: int = 0
    is_closed: bool = False  # no further pass will be of it
    closed_ns: int = 0
    streams: set[int] = dataclasses.field(default_factory=set)
    waiting: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Frames on their way: session, and the position after the frame's last row."""
    has_grants: bool = False
    """Whether stages make passes of it by themselves. Then it stays until none has come for WINDOW_NS."""
    lost: str = ""  # why the pipeline was lost while it was under way

    @property
    def trace_id(self) -> bytes:
        """The 16 bytes that all its spans share."""
        return self.root[: trace_context.TRACE_ID_BYTES]

    @property
    def n_spans(self) -> int:
        """About how many spans it has so far."""
        return self.n_passes * (self.n_stages + COORDINATOR_SPANS)

    def is_full(self, now_ns: int) -> bool:
        """Return whether the next pass belongs to another window."""
        return now_ns - self.started_ns >= WINDOW_NS or self.n_spans >= WINDOW_SPANS_MAX


class Passes:
    """The windows of one coordinator: at most one takes passes, the others wait for answers."""

    def __init__(self, is_sampled: Callable[[bytes], bool], done: Callable[[Window], None]) -> None:
        """`is_sampled(root)` decides for a new window. `done(window)` is called once for each window with passes."""
        self._is_sampled, self._done = is_sampled, done
        self._windows: dict[bytes, Window] = {}  # by trace id, oldest first
        self._current: Window | None = None
        self.n_stages = 0

    @property
    def is_busy(self) -> bool:
        """Whether any window is under way."""
        return bool(self._windows)

    def leaves(self, frames: Sequence[Frame], now_ns: int, record_of: RecordOf) -> bytes:
        """An envelope leaves: return the context that it carries; NONE if it is not recorded.

        `record_of(session_id)` returns a session's record.
        """
        rows = [frame for frame in frames if frame.tokens]
        extends = not rows and any(frame.flags & Flag.EXTEND for frame in frames)
        if not (rows or extends):
            return trace_context.NONE
        window = self._current
        if window is None or window.is_full(now_ns):
            window = self._open(now_ns)
        window.has_grants |= extends or any(frame.argument and not frame.flags & Flag.PREFILL for frame in rows)
        if extends:  # passes that stages make by themselves are of this window from now on
            return window.root if window.is_sampled else trace_context.NONE
        records = [record_of(frame.session_id) for frame in rows]
        traced = [record for record in records if trace_context.is_sampled(record.trace.context)]
        if not (window.is_sampled or traced):
            return trace_context.NONE
        sessions = {frame.session_id for frame in rows}
        window.n_passes += 1
        window.n_rows += sum([len(frame.tokens) for frame in rows])
        window.streams |= sessions
        window.streams_max = max(window.streams_max, len(sessions))
        window.last_ns = now_ns
        window.waiting.update([(f.session_id, f.position + len(f.tokens)) for f in rows])
        for record in traced:
            record.trace.passes.add(window.root)
        return window.root

    def _open(self, now_ns: int) -> Window:
        self._close(now_ns)  # not finished here: the answer that made room for this pass may still have to be counted
        root = trace_context.new_root()
        window = self._current = Window(root, self._is_sampled(root), now_ns, now_ns, self.n_stages)
        self._windows[window.trace_id] = window
        while len(self._windows) > WINDOWS_MAX:
            self._finish(next(iter(self._windows.values())))
        return window

    def window_of(self, context: bytes) -> Window | None:
        """Return the window that a context is of, while it is under way."""
        return self._windows.get(context[: trace_context.TRACE_ID_BYTES])

    def returned(
        self,
        context: bytes,
        answered: Iterable[tuple[int, int]],
        n_tokens: int,
        now_ns: int,
        granted: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Answers have come for frames: (session, position after the last row). Without a context, of any window.

        granted: those of rows under a grant. A pass of rows that did not leave here was made by the stages themselves.
        """
        window = self.window_of(context)
        if window is not None:
            if n_rows := sum(1 for key in granted if key not in window.waiting):
                window.n_passes += 1
                window.n_rows += n_rows
            window.n_tokens += n_tokens
            window.last_ns = max(window.last_ns, now_ns)
        keys = list(answered)
        for each in [window] if window is not None else list(self._windows.values()):
            each.waiting.difference_update(keys)
        self._finish_those_over(now_ns)

    def forget(self, session_id: int) -> None:
        """A session has ended: no more answers will come for it.

        Its windows stay until the next answer or look: the answer that ended it is still to be counted.
        """
        for window in self._windows.values():
            if session_id in window.streams:
                window.waiting = {key for key in window.waiting if key[0] != session_id}

    def close(self, now_ns: int) -> None:
        """Close the current window for new passes, and finish it if no answers are to come."""
        window = self._close(now_ns)
        if window is not None:
            self._finish_if_over(window, now_ns)

    def _close(self, now_ns: int) -> Window | None:
        window, self._current = self._current, None
        if window is not None:
            window.is_closed, window.closed_ns = True, now_ns
        return window

    def look(self, now_ns: int) -> None:
        """Close the current window after its second, and finish windows whose answers do not come."""
        if self._current is not None and now_ns - self._current.started_ns >= WINDOW_NS:
            self.close(now_ns)
        self._finish_those_over(now_ns)
        for window in list(self._windows.values()):
            if window.is_closed and now_ns - window.closed_ns >= ANSWER_WAIT_NS:
                self._finish(window)

    def lost(self, why: str, now_ns: int) -> None:
        """The pipeline was lost: no more answers will come."""
        for window in self._windows.values():
            window.lost, window.last_ns = why, now_ns
        self.end(now_ns)

    def end(self, now_ns: int) -> None:
        """Finish all windows in their present state."""
        self.close(now_ns)
        for window in list(self._windows.values()):
            self._finish(window)

    def _finish_those_over(self, now_ns: int) -> None:
        for window in list(self._windows.values()):
            self._finish_if_over(window, now_ns)

    def _finish_if_over(self, window: Window, now_ns: int) -> None:
        if not window.is_closed or window.waiting:
            return
        if not window.has_grants or now_ns - max(window.closed_ns, window.last_ns) >= WINDOW_NS:
            self._finish(window)

    def _finish(self, window: Window) -> None:
        if self._windows.pop(window.trace_id, None) is None:
            return
        if window is self._current:
            self._current = None
        if window.n_passes:
            self._done(window)
