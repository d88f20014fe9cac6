"""Admission: each new session gets a lane, a place in the line, or a refusal. Pure.

Lanes are counted exactly as the stages count them. A lane is free once its close has been sent, because closes travel
in order with the next open on the same stream.

`fair_lanes` decides which session gets the next lane: tenants take turns, and sessions of one tenant get lanes in the
order in which they arrived. A session can lose its lane: the stages may come back with fewer lanes, or share them with
another coordinator. It then returns to the front of the line, before every session that never had a lane.

The line has room for `waiting_max` sessions. If it is full, a tenant with less than its part of it may still have its
part, so that nobody's line keeps others out. LINES_MAX times as many are the bound of all.

Stages refuse opens while another coordinator holds the lanes. Then only sessions with lanes run, and the others keep
their places in the line. Every LANE_TRY_S one of them tries again. After each success twice as many try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from relayline.coordinator.sessions.fair_lanes import FairLanes, age_of
from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.tenants import ANYONE as ANYONE
from relayline.coordinator.sessions.tenants import Tenant as Tenant
from relayline.wire.common.errors import ContextLengthError, OverloadedError
from relayline.wire.common.texts import counted, plural

LANE_TRY_S = 0.5  # less than the time for which stages keep a lane for a coordinator that was refused it
LANE_TRIES_MAX = 1_200  # of one session; then its request is refused as stages refuse it
LINES_MAX = 2  # times `waiting_max` sessions wait at most, besides those that lost their lane


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
        self.waiting = FairLanes()

    def admit(self, session: Session, wait_s: Callable[[], int] = lambda: 1) -> list[Session]:
        """Admit the session. Returns the sessions that get a lane as a result: this one, or none while it waits.

        Where its tenant may now run more streams than before, those of its sessions that waited are among them.
        Raises ContextLengthError when it can never fit, and OverloadedError when the line is full; then nothing has
        changed. `wait_s` is the expected wait in the line.
        """
        if not self._fits(session):
            raise self.too_long(session)
        self.check_room(wait_s, session.request.tenant)
        self.waiting.add(session)
        return self._fill_lanes()

    def check_room(self, wait_s: Callable[[], int], tenant: Tenant = ANYONE) -> None:
        """Raise OverloadedError if the line is full for the tenant. `wait_s`: for how many seconds it is expected."""
        line = self.waiting
        n_all, n_own = len(line), line.n_waiting_of(tenant)
        is_own_full = tenant.waiting_max is not None and n_own >= tenant.waiting_max
        is_full = n_all >= self.waiting_max and (
            n_own >= line.part_of(tenant, self.waiting_max) or n_all >= LINES_MAX * self.waiting_max
        )
        may_run = len(self.running) < self._n_ours and line.may_run(tenant)  # then the line does not grow
        if may_run or not (is_own_full or is_full):
            return
        after_s = wait_s()
        lanes = plural(self.n_lanes, "the one lane is", f"all {self.n_lanes} lanes are")
        text = f"{lanes} taken and {counted(n_all, 'request already waits', 'requests already wait')}"
        if is_own_full:
            n_running = line.n_running_of(tenant)
            runs = plural(n_running, "request of this API key runs", "requests of this API key run")
            text = f"{n_running} {runs}, and {counted(n_own, 'waits', 'wait')}, as many as may"
        raise OverloadedError(f"{text}; try again in about {after_s} s", after_s)

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

    def of_tenants(self) -> dict[str, tuple[int, int]]:
        """Return how many sessions of each tenant run, and how many wait, by its name, of those that have any."""
        return self.waiting.figures()

    def figures(self) -> dict[str, int]:
        """Return the running and waiting sessions for GET /v1/pipeline. `kv_tokens`: tokens that running ones hold."""
        return {
            "ctx_tokens": self.ctx_tokens,
            "lanes": self.n_lanes,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_tokens": sum(len(session.history) for session in self.running.values()),
        }

    def leave(self, session: Session, held_ns: int = 0) -> list[Session]:
        """Remove the session, running or waiting. Returns the waiting sessions that get a lane as a result.

        `held_ns`: how long it held a lane; 0: not known.
        """
        if self.running.pop(session.session_id, None) is None:
            self.waiting.remove(session)
            return []
        self.waiting.ended(session, held_ns)
        return self._fill_lanes()

    def resize(self, n_lanes: int, ctx_tokens: int) -> list[Session]:
        """Take the number of lanes of a new epoch. Returns the running sessions that must wait for a lane again.

        These are never refused, however long the line is. If there are more lanes, waiting sessions get them.
        """
        self.n_lanes, self.ctx_tokens = n_lanes, ctx_tokens
        self._n_ours, self._n_more = n_lanes, 1
        surplus = sorted(self.running.values(), key=age_of)[n_lanes:]
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
            self.waiting.put_back(session)

    def _fill_lanes(self) -> list[Session]:
        following: list[Session] = []
        while len(self.running) < self._n_ours and (session := self.waiting.next()) is not None:
            self._run(session)
            following.append(session)
        return following
