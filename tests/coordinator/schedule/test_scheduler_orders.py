"""The scheduler: nothing is lost in any order of events, and the pressure that prompts exert."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.flights import Kind
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.plan_choice import REPLAY_PRESSURE
from relayline.coordinator.schedule.prompt_line import BURST_PRESSURE
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.deploy.testing.simulation.world import staircase
from relayline.wire.envelopes.frames import Flag
from tests.support.examples import thinned
from tests.support.scheduling import Fixed, new_session, row, start


class Machine:
    """Drives a scheduler with random events and compares it with separate books."""

    def __init__(self, mode: str, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        sizes = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 9)
        self.planner = Fixed(*sizes, hold_max_ns=math.inf)  # no row leaves in a flight more than planned
        self.scheduler = Scheduler(ScheduleConfig(mode, n_groups=rng.randint(1, 3), group_rows=2), self.planner)
        self.sessions: dict[int, Session] = {}
        self.sent_rows: dict[int, int] = {}  # positions below have been sent
        self.under_way: list[OutFrame] = []
        self.now_ns = self.n_begun = 0

    def event(self) -> None:
        self.now_ns += self.rng.randint(0, 5_000_000)
        kind = self.rng.random()
        if kind < 0.2:
            self.begin()
        elif kind < 0.3 and self.sessions:
            self.end(self.rng.choice(list(self.sessions.values())), cancel=True)
        elif kind < 0.7 and self.under_way:
            self.answer(self.rng.randrange(len(self.under_way)))
        self.take()
        self.check()

    def begin(self) -> None:
        self.n_begun += 1
        session = new_session(self.n_begun, self.rng.randint(1, 30), self.rng.randint(1, 5))
        self.sessions[self.n_begun], self.sent_rows[self.n_begun] = session, 0
        start(self.scheduler, session)

    def end(self, session: Session, *, cancel: bool) -> None:
        del self.sessions[session.session_id]
        self.scheduler.forget(session.session_id)
        if cancel:
            self.scheduler.control(session.cancel())

    def answer(self, index: int) -> None:
        frame = self.under_way[index]
        earlier = [other for other in self.under_way[:index] if other.session is frame.session]
        if earlier:  # answers of one session come in order
            frame = earlier[0]
        self.under_way.remove(frame)
        session, position = frame.session, frame.position + len(frame.tokens)
        self.scheduler.answered(session.session_id, position, self.now_ns)
        if frame.flags & Flag.WANTS_SAMPLE and session.session_id in self.sessions:
            _, frames = session.sampled(position, 7)
            if session.state is State.DONE:
                self.end(session, cancel=False)
                self.scheduler.control(frames)
            else:
                self.scheduler.decode(frames[0])

    def take(self) -> None:
        for envelope in self.scheduler.take(self.now_ns):
            for frame in envelope:
                if not frame.tokens:
                    continue
                assert frame.position == self.sent_rows[frame.session.session_id], "in order, each row once"
                self.sent_rows[frame.session.session_id] += len(frame.tokens)
                self.under_way.append(frame)

    def check(self) -> None:
        plan, scheduler, flights = self.scheduler.plan(), self.scheduler, self.scheduler._flights
        assert min(map(flights.count, Kind)) >= 0
        assert flights._work_ns >= 0
        if scheduler.config.mode != "drain":
            assert flights.count(Kind.DECODE) <= plan.n_groups
            assert flights.count(Kind.PREFILL) <= plan.prefill_flights
        alive = {(f.session.session_id, f.position + len(f.tokens)) for f in self.under_way}
        assert {key for key in flights._by_key if key[0] in self.sessions} == {
            key for key in alive if key[0] in self.sessions
        }

    def finish(self) -> None:
        self.take()
        while self.under_way:
            self.answer(0)
            self.take()
            self.check()
        assert not self.sessions, "every session has ended"
        scheduler, flights = self.scheduler, self.scheduler._flights
        assert not flights._by_key
        assert not flights._positions
        assert (*map(flights.count, Kind), scheduler.n_decoding) == (0, 0, 0, 0)
        assert flights._work_ns == pytest.approx(0, abs=1e-3)
        assert scheduler.take(0) == []


@settings(max_examples=thinned(80))
@given(st.sampled_from(["auto", "fixed", "drain"]), st.integers(0, 2**32))
def test_nothing_is_lost_whatever_the_order(mode: str, seed: int) -> None:
    machine = Machine(mode, seed)
    for _ in range(120):
        machine.event()
    machine.finish()


class Noting(GroupPlanner):
    """A real planner that notes what prompts were said to count at least, when streams run."""

    def __init__(self) -> None:
        super().__init__([StageCost(staircase(), staircase(), 512) for _ in range(2)])
        self.pressures: list[int] = []

    def plan(self, n_streams: int, *, n_prompts: int, pressure_min: int = 0, **others: Any) -> GroupPlan:
        if n_streams and n_prompts:
            self.pressures.append(pressure_min)
        return super().plan(n_streams, n_prompts=n_prompts, pressure_min=pressure_min, **others)


def test_prompts_of_a_burst_count_twice_until_all_are_read() -> None:
    scheduler = Scheduler(ScheduleConfig(), planner := Noting())
    scheduler.decode(row(1))
    sessions = [new_session(session_id, n_prompt=8) for session_id in (2, 3, 4)]
    for session in sessions:
        start(scheduler, session)
    scheduler.plan()
    assert planner.pressures.pop() == BURST_PRESSURE
    for session in sessions[:2]:
        scheduler.forget(session.session_id)  # as if read: it runs now
        scheduler.decode(row(session.session_id))
    scheduler.plan()
    assert planner.pressures.pop() == BURST_PRESSURE, "three run and one waits; it came when two ran"
    scheduler.forget(4)
    start(scheduler, new_session(5))
    scheduler.plan()
    assert planner.pressures.pop() == 0, "a single arrival is no burst"


def test_prompts_that_take_long_to_read_are_no_burst() -> None:
    scheduler = Scheduler(ScheduleConfig(), planner := Noting())
    scheduler.decode(row(1))
    for session_id in (2, 3, 4):
        start(scheduler, new_session(session_id, n_prompt=400))
    scheduler.plan()
    assert planner.pressures.pop() == 0


def test_paused_streams_count_until_all_of_them_go_on() -> None:
    scheduler = Scheduler(ScheduleConfig(), planner := Noting())
    scheduler.decode(row(1))
    paused = new_session(2, n_prompt=400)
    paused.history.append(7)
    start(scheduler, paused)
    scheduler.plan()
    assert planner.pressures.pop() == REPLAY_PRESSURE
    start(scheduler, new_session(3, n_prompt=400))
    scheduler.plan()
    assert planner.pressures.pop() == REPLAY_PRESSURE
    scheduler.forget(2)  # as if read: it runs now
    scheduler.decode(row(2))
    scheduler.plan()
    assert planner.pressures.pop() == 0, "a new arrival is no replay"
    failed = new_session(4, n_prompt=400)
    failed.history.append(7)
    failed.replays = 1
    start(scheduler, failed)
    scheduler.plan()
    assert planner.pressures.pop() == 0, "one session's own fault slows no other"
