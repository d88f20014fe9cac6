"""Admission: each new session gets a lane, a place in the line, or a refusal. Pure.

Lanes are counted exactly as the stages count them. A lane is free once its close has been sent, because closes travel
in order with the next open on the same stream.

Sessions get lanes in the order in which they arrived. A session can lose its lane: the stages may come back with fewer
lanes, or share them with another coordinator. It then returns to the front of the line, because it is older than every
session that never had a lane.

Stages refuse opens while another coordinator holds the lanes. Then only sessions with lanes run, and the others keep
their places in the line. Every LANE_TRY_S one of them tries again. After each success twice as many try.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from relayline.coordinator.sessions.session import Session
from relayline.wire.common.errors import ContextLengthError, OverloadedError

LANE_TRY_S = 0.5  # less than the time for which stages keep a lane for a coordinator that was refused it
LANE_TRIES_MAX = 1_200  # of one session; then its request is refused as stages refuse it


class Admission:
    """Lanes of the pipeline and the bounded line before them."""

    def __init__(
        self, n_lanes: int, ctx_tokens: int, waiting_max: int, kept: Callable[[Session], Sequence[int]] = lambda _: ()
    ) -> None:
        """`kept` names the lanes that this session should take last, ordered by which of them to take first."""
        self._kept = kept
        self.n_lanes, self.ctx_tokens, self.waiting_max = n_lanes, ctx_tokens, waiting_max
        self._n_ours = n_lanes  # of these, as many as other coordinators seem to leave us
        self._n_more = 1  # that are tried next
        self.running: dict[int, Session] = {}
        self.waiting: collections.deque[Session] = collections.deque()

    def admit(self, session: Session, wait_s: Callable[[], int] = lambda: 1) -> bool:
        """Admit the session. Returns True when it has a lane, False when it waits for one.

        Raises ContextLengthError when it can never fit, and OverloadedError when the line is full. `wait_s` is the
        expected wait in the line.
        """
        if not self._fits(session):
            raise self.too_long(session)
        if not self.waiting and len(self.running) < self._n_ours:
            self._run(session)
            return True
        self.check_room(wait_s)
        self.waiting.append(session)
        return False

    def check_room(self, wait_s: Callable[[], int]) -> None:
        """Raise OverloadedError if the line is full. `wait_s` is how long it is expected to stay full, in seconds."""
        if (self.waiting or len(self.running) >= self._n_ours) and len(self.waiting) >= self.waiting_max:
            line = f"all {self.n_lanes} lanes are taken and {len(self.waiting)} requests already wait"
            after_s = wait_s()
            raise OverloadedError(f"{line}; try again in about {after_s} s", after_s)

    def _run(self, session: Session) -> None:
        """Give the session the lowest lane that is free: streams that travel together then have neighbouring ones."""
        free, kept = self.free_lanes(), self._kept(session)
        session.lane = next(lane for lane in (*(lane for lane in free if lane not in kept), *kept) if lane in free)
        self.running[session.session_id] = session

    def free_lanes(self) -> list[int]:
        """Return the lanes that no running session has, ascending."""
        taken = {session.lane for session in self.running.values()}
        return [lane for lane in range(self.n_lanes) if lane not in taken]

    def _fits(self, session: Session) -> bool:
        return len(session.request.prompt_tokens) + session.request.max_tokens <= self.ctx_tokens

    def too_long(self, session: Session) -> ContextLengthError:
        """Return what to tell a request that cannot fit."""
        n_prompt, max_tokens = len(session.request.prompt_tokens), session.request.max_tokens
        return ContextLengthError.of_request(self.ctx_tokens, n_prompt, max_tokens)

    def unfit(self) -> list[Session]:
        """Return the sessions that no longer fit after `resize` made the context smaller."""
        return [session for session in (*self.running.values(), *self.waiting) if not self._fits(session)]

    def figures(self) -> dict[str, int]:
        """Return the running and waiting sessions for GET /v1/pipeline. `kv_tokens`: tokens that running ones hold."""
        return {
            "ctx_tokens": self.ctx_tokens,
            "lanes": self.n_lanes,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_tokens": sum(len(session.history) for session in self.running.values()),
        }

    def leave(self, session: Session) -> list[Session]:
        """Remove the session, running or waiting. Returns the waiting sessions that get a lane as a result."""
        if self.running.pop(session.session_id, None) is None:
            if session in self.waiting:
                self.waiting.remove(session)
            return []
        return self._fill_lanes()

    def resize(self, n_lanes: int, ctx_tokens: int) -> list[Session]:
        """Take the number of lanes of a new epoch. Returns the running sessions that must wait for a lane again.

        These are never refused, however long the line is. If there are more lanes, waiting sessions get them.
        """
        self.n_lanes, self.ctx_tokens = n_lanes, ctx_tokens
        self._n_ours, self._n_more = n_lanes, 1
        surplus = sorted(self.running.values(), key=_age)[n_lanes:]
        self._put_back(surplus)
        for session in [session for session in self.running.values() if session.lane >= n_lanes]:
            self._run(session)
        self._fill_lanes()
        return surplus

    @property
    def n_ours(self) -> int:
        """Lanes that this coordinator can have, as far as is known."""
        return self._n_ours

    @property
    def is_short(self) -> bool:
        """Whether other coordinators seem to have lanes: `try_lanes` is to be called every LANE_TRY_S."""
        return self._n_ours < self.n_lanes

    def put_back(self, session: Session) -> bool:
        """Take back a running session that found no lane at the stages. Returns False after LANE_TRIES_MAX times."""
        if session.n_refused >= LANE_TRIES_MAX:
            return False
        session.n_refused += 1
        self._put_back([session])
        self._n_ours, self._n_more = len(self.running), 1
        return True

    def try_lanes(self) -> list[Session]:
        """Return the waiting sessions that should now try to get a lane."""
        self._n_ours = min(self.n_lanes, self._n_ours + self._n_more) if self.waiting else self.n_lanes
        self._n_more *= 2
        return self._fill_lanes()

    def _put_back(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            del self.running[session.session_id]
            self.waiting.append(session)
        self.waiting = collections.deque(sorted(self.waiting, key=_age))

    def _fill_lanes(self) -> list[Session]:
        following: list[Session] = []
        while self.waiting and len(self.running) < self._n_ours:
            session = self.waiting.popleft()
            self._run(session)
            following.append(session)
        return following


def _age(session: Session) -> int:
    """Return a number that is smaller for a session that was admitted earlier."""
    return session.session_id
