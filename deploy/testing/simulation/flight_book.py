"""The book of flights: which envelopes are under way, and which frames of each are still to be answered."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from relayline.coordinator.sessions.session import OutFrame
from relayline.deploy.testing.simulation.stage import Violation
from relayline.wire.envelopes.frames import Flag

DECODE, PREFILL, GUESS = range(3)  # kinds of flights


def is_guess(frame: OutFrame) -> bool:
    """Return whether every row of a frame is a guess."""
    return frame.n_drafted == len(frame.tokens)


def kind_of(rows: Sequence[OutFrame]) -> int:
    """Return the kind of a flight. Prompt rows in a decode flight come after the decode rows."""
    if rows[0].flags & Flag.PREFILL:
        return PREFILL
    return GUESS if is_guess(rows[0]) else DECODE


def _key(frame: OutFrame) -> tuple[int, int]:
    return frame.session.session_id, frame.position + len(frame.tokens)


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One envelope with rows, from its departure until its last answer."""

    number: int
    kind: int
    """A decode flight counts as one of prompt rows once only such rows of it are under way."""
    sent_ns: int
    is_ridden: bool
    """Whether prompt rows left with decode rows."""
    waiting: set[tuple[int, int]]
    """Frames without an answer: (session id, end of rows)."""
    decoding: set[tuple[int, int]]
    """Those of them that are rows of streams, without prompts."""


class Sent(NamedTuple):
    """A frame in flight."""

    position: int
    end: int
    flight: Flight


class FlightBook:
    """Flights open when they leave, frames settle when they are answered, and a flight lands with its last frame."""

    def __init__(self) -> None:
        self.under_way: dict[int, Flight] = {}  # by number, oldest first
        self.n_of_kind = [0, 0, 0]  # under way
        self.n_guess_flights = 0  # so far
        self.most = 0  # largest number under way at once, what cancelled sessions left there included
        self.most_with_chunks = 0  # the same for flights that may carry chunks of prompts
        self.slowest_ns = 0  # of answered frames
        self.latest_decode_ns = 0  # of the latest decode flight whose streams have their tokens
        self._numbers = itertools.count()
        self._frames: dict[int, collections.deque[Sent]] = {}  # session id -> its frames under way, oldest first
        self._latest: dict[int, Sent] = {}  # session id -> its last answered frame
        self._left_behind: dict[int, int] = {}  # cancelled session, its close in flight -> its frames in flight

    @property
    def n_ridden(self) -> int:
        """Flights under way in which prompt rows ride with decode rows."""
        return sum(1 for flight in self.under_way.values() if flight.is_ridden)

    def oldest_sent_ns(self) -> int | None:
        """Return when the oldest flight under way left, or None if there is none."""
        oldest = next(iter(self.under_way.values()), None)
        return None if oldest is None else oldest.sent_ns

    def has_frames(self, session_id: int) -> bool:
        """Return whether frames of a session are under way."""
        return bool(self._frames.get(session_id))

    def open(self, rows: Sequence[OutFrame], kind: int, now_ns: int) -> Flight:
        """An envelope with these frames leaves. `board` must follow for each of them."""
        is_ridden = kind == DECODE and any(frame.flags & Flag.PREFILL for frame in rows)
        decoding = {_key(frame) for frame in rows if not frame.flags & Flag.PREFILL}
        flight = Flight(next(self._numbers), kind, now_ns, is_ridden, set(map(_key, rows)), decoding)
        self.under_way[flight.number] = flight
        self.n_of_kind[kind] += 1
        self.n_guess_flights += kind == GUESS
        self.most = max(self.most, sum(self.n_of_kind) + sum(self._left_behind.values()))
        n_with_chunks = self.n_of_kind[PREFILL] + self.n_of_kind[DECODE]  # decode flights may carry chunks too
        self.most_with_chunks = max(self.most_with_chunks, n_with_chunks)
        return flight

    def board(self, frame: OutFrame, flight: Flight) -> None:
        """A frame leaves with a flight."""
        sent = Sent(frame.position, frame.position + len(frame.tokens), flight)
        self._frames.setdefault(frame.session.session_id, collections.deque()).append(sent)

    def settles(self, session_id: int, position: int) -> bool:
        """Return whether a sample after this position answers a whole frame, and not a row within one."""
        # Samples of a frame with a wrong guess come after the frame's own answer.
        first = next(iter(self._frames.get(session_id, ())), None)
        if first is not None and first.end == position:
            return True
        within = filter(None, (first, self._latest.get(session_id)))
        return not any(sent.position < position < sent.end for sent in within)

    def settle(self, session_id: int, position: int, now_ns: int, *, is_over: bool) -> None:
        """A frame is answered; `is_over`: its session has ended. Raises Violation out of turn."""
        waiting = self._frames.get(session_id)
        if is_over:  # a stage that has learned of it may have dropped later frames
            while waiting and waiting[0].end != position:
                waiting.popleft()
        if not waiting or waiting[0].end != position:
            raise Violation(f"session {session_id} was answered twice, or out of turn, at position {position}")
        self._latest[session_id] = sent = waiting.popleft()
        was_decoding = bool(sent.flight.decoding)
        if self._land(session_id, sent):
            took_ns = now_ns - sent.flight.sent_ns
            self.slowest_ns = max(self.slowest_ns, took_ns)
            if was_decoding and sent.flight.kind != GUESS:
                self.latest_decode_ns = took_ns

    def cancel(self, session_id: int) -> None:
        """A session is cancelled: no flight waits for its frames, which are still on links and in stages."""
        frames = self._frames.get(session_id, ())
        for sent in frames:
            self._land(session_id, sent)
        if frames:
            self._left_behind[session_id] = len(frames)

    def closed(self, session_id: int) -> None:
        """The last stage has closed a session: its frames have left every stage."""
        self._left_behind.pop(session_id, None)

    def _land(self, session_id: int, sent: Sent) -> bool:
        """Cross a frame off; returns whether its flight is complete for all decoding streams."""
        flight, key = sent.flight, (session_id, sent.end)
        if key not in flight.waiting:
            return False
        flight.waiting.discard(key)
        flight.decoding.discard(key)
        if not flight.waiting:
            del self.under_way[flight.number]
            self.n_of_kind[flight.kind] -= 1
            return flight.kind != PREFILL or not flight.is_ridden
        if flight.kind == DECODE and not flight.decoding:  # prompt rows in it come later
            flight.kind = PREFILL
            self.n_of_kind[DECODE] -= 1
            self.n_of_kind[PREFILL] += 1
            return True
        return False
