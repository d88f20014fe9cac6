"""Which frames leave for stage 0, and when: groups of decode rows and flights of prefill rows. Pure.

Theory of operation. A *flight* is one envelope on its way through the stages; it has landed when every frame in it has
been answered (a sample, a progress note) or given up. The plan says how many decode flights may be under way and how
many rows each takes. Streams whose token has come back wait in the *pool*; whenever a decode flight is free the oldest
of them leave together. So groups re-form by themselves as streams join, leave and fall behind: fragments meet in the
pool because no more flights than planned may leave. There is no timer; a frame waits only while as many groups as the
curves ask for are already under way.

Prefill uses flights of its own, sized by the plan so that running streams keep their pace; several short prompts may
share one. Opens and closes never wait.

The *drain* mode sends everything at once and leaves batching to the stages' queues; it is the reference to compare
with, and what a plan-less start falls back to.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from coordinator.groups import GroupPlan, GroupPlanner
from coordinator.session import OutFrame, Session, State

ROUND_TRIPS_KEPT = 64  # recent round trips whose smallest excess over the predicted steps is the overhead
DRAIN_CHUNK_ROWS = 64


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """One envelope under way."""

    is_prefill: bool
    waiting_for: set[int]  # session ids not answered yet
    n_rows: int
    sent_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How frames are grouped."""

    mode: str = "auto"
    """auto: groups from the curves; drain: send at once; fixed: n_groups x group_rows by hand."""
    n_groups: int = 0
    """Decode flights under way, in mode fixed."""
    group_rows: int = 0
    """Rows of one decode flight, in mode fixed."""
    chunk_rows: int = 0
    """Largest prefill chunk; 0 leaves it to the plan."""


class Scheduler:
    """Frames in, envelopes out. One per epoch."""

    def __init__(self, config: ScheduleConfig, planner: GroupPlanner) -> None:
        self.config, self.planner = config, planner
        self.n_decoding = 0  # sessions that decode, in the pool or under way
        self._controls: list[OutFrame] = []
        self._pool: collections.deque[OutFrame] = collections.deque()
        self._prompts: collections.OrderedDict[int, Session] = collections.OrderedDict()
        self._flights: dict[int, Flight] = {}  # by session id
        self._n_decode_flights = self._n_prefill_flights = 0
        self._excess_ns: collections.deque[float] = collections.deque(maxlen=ROUND_TRIPS_KEPT)
        self._decoding: set[int] = set()

    # --- events -------------------------------------------------------------------------------------------------------

    def control(self, frames: Iterable[OutFrame]) -> None:
        """Send opens or closes with the next envelopes."""
        self._controls.extend(frames)

    def prompt(self, session: Session) -> None:
        """A session has prompt rows to send; it is asked for chunks until none are left."""
        self._prompts[session.session_id] = session

    def decode(self, frame: OutFrame) -> None:
        """A stream's next row is ready."""
        session_id = frame.session.session_id
        if session_id not in self._decoding:
            self._decoding.add(session_id)
            self.n_decoding += 1
        self._pool.append(frame)

    def answered(self, session_id: int, now_ns: int) -> None:
        """The session's frame under way has been answered."""
        flight = self._flights.pop(session_id, None)
        if flight is None:
            return
        flight.waiting_for.discard(session_id)
        if not flight.waiting_for:
            self._land(flight, now_ns)

    def forget(self, session_id: int, now_ns: int) -> None:
        """The session ended, however: nothing of it waits or counts any more."""
        self.answered(session_id, now_ns)
        self._prompts.pop(session_id, None)
        if session_id in self._decoding:
            self._decoding.discard(session_id)
            self.n_decoding -= 1
            self._pool = collections.deque(f for f in self._pool if f.session.session_id != session_id)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def plan(self) -> GroupPlan:
        """Return the plan for what runs now."""
        if self.config.mode == "fixed":
            rows = self.config.group_rows or self.planner.rows_max
            auto = self.planner.plan(self.n_decoding, has_prefill=bool(self._prompts))
            return dataclasses.replace(auto, n_groups=self.config.n_groups or 1, group_rows=rows)
        return self.planner.plan(self.n_decoding, has_prefill=bool(self._prompts))

    def take(self, now_ns: int) -> list[list[OutFrame]]:
        """Return the envelopes that leave now, in order."""
        envelopes: list[list[OutFrame]] = []
        if self._controls:
            envelopes.append(self._controls)
            self._controls = []
        if self.config.mode == "drain":
            self._take_everything(envelopes, now_ns)
        else:
            self._take_groups(envelopes, now_ns)
        if len(envelopes) > 1 and not envelopes[0][0].tokens:
            envelopes[1] = envelopes.pop(0) + envelopes[0]  # controls ride with the first rows
        return envelopes

    def _take_groups(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        plan = self.plan()
        while self._pool and self._n_decode_flights < plan.n_groups:
            rows = min(len(self._pool), plan.group_rows)
            self._launch(envelopes, [self._pool.popleft() for _ in range(rows)], False, now_ns)
        chunk_rows = min(plan.chunk_rows, self.config.chunk_rows or plan.chunk_rows)
        while self._prompts and self._n_prefill_flights < plan.prefill_flights:
            frames = self._next_chunks(chunk_rows)
            if not frames:
                break
            self._launch(envelopes, frames, True, now_ns)

    def _take_everything(self, envelopes: list[list[OutFrame]], now_ns: int) -> None:
        if self._pool:
            self._launch(envelopes, list(self._pool), False, now_ns)
            self._pool.clear()
        rows = self.config.chunk_rows or min(DRAIN_CHUNK_ROWS, self.planner.rows_max)
        while self._prompts:
            _, session = self._prompts.popitem(last=False)
            frames: list[OutFrame] = []
            while (chunk := session.next_chunk(rows)) is not None:
                frames.append(chunk)
            if frames:
                self._launch(envelopes, frames, True, now_ns)

    def _next_chunks(self, rows: int) -> list[OutFrame]:
        """Return chunks of the oldest prompts, together at most `rows`; a prompt has one chunk under way at a time
        unless it is alone, when its chunks follow each other as a train.
        """
        frames: list[OutFrame] = []
        left = rows
        for session_id, session in list(self._prompts.items()):
            if left == 0:
                break
            if session_id in self._flights and len(self._prompts) > 1:
                continue
            chunk = session.next_chunk(left)
            if chunk is not None:
                frames.append(chunk)
                left -= len(chunk.tokens)
            if session.is_prefilled:
                del self._prompts[session_id]
        return frames

    # --- flights ------------------------------------------------------------------------------------------------------

    def _launch(self, envelopes: list[list[OutFrame]], frames: list[OutFrame], is_prefill: bool, now_ns: int) -> None:
        ids = {frame.session.session_id for frame in frames}
        flight = Flight(is_prefill, ids, sum(len(frame.tokens) for frame in frames), now_ns)
        for session_id in ids:
            self._flights[session_id] = flight
        if is_prefill:
            self._n_prefill_flights += 1
        else:
            self._n_decode_flights += 1
        envelopes.append(frames)

    def _land(self, flight: Flight, now_ns: int) -> None:
        if flight.is_prefill:
            self._n_prefill_flights -= 1
            return
        self._n_decode_flights -= 1
        predicted_ns = sum(s.decode.padded_cost_ns(flight.n_rows, s.rows_max) for s in self.planner.stages)
        self._excess_ns.append(now_ns - flight.sent_ns - predicted_ns)
        if len(self._excess_ns) == ROUND_TRIPS_KEPT:
            overhead_ns = max(0.0, min(self._excess_ns))
            if abs(overhead_ns - self.planner.overhead_ns) > 0.2 * self.planner.overhead_ns + 200_000:
                self.planner.overhead_ns = overhead_ns
                self.planner.forget()


__all__ = ["Flight", "ScheduleConfig", "Scheduler", "State"]
