"""Prompts that wait to copy a common prefix from others: their order, urgent ones, and orphans."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.groups import GroupPlan, GroupPlanner
from relayline.coordinator.schedule.prompt_line import LOWER_EVERY, PromptLine
from relayline.coordinator.schedule.scheduler import Scheduler
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.prefixes import Prefixes
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.coordinator.sessions.tenants import Level, Tenant
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.examples import thinned

SYSTEM = tuple(range(40))


class Fixed(GroupPlanner):
    """A planner with one plan."""

    def __init__(self, chunk_rows: int, n_flights: int = 1) -> None:
        super().__init__([StageCost(CostCurve([(1, 1e6)]), CostCurve([(1, 1e6)]), 64)])
        self._only = GroupPlan(2, 3, 0.0, n_flights, chunk_rows, 2)

    def plan(self, n_streams: int, **_: object) -> GroupPlan:
        return self._only


def session_of(session_id: int, tokens: tuple[int, ...], max_tokens: int = 3) -> Session:
    request = GenerationRequest(str(session_id), tokens, max_tokens, SamplingParams())
    return Session(session_id, request, lambda _: False)


def test_a_follower_leaves_behind_its_leaders_rows() -> None:
    scheduler = Scheduler(ScheduleConfig(), Fixed(24, n_flights=4))
    leader, follower = session_of(1, (*SYSTEM, 7, 7)), session_of(2, (*SYSTEM, 8))
    scheduler.control(leader.start())
    scheduler.prompt(leader)
    scheduler.control(follower.start())
    follower.follow(leader, len(SYSTEM))
    scheduler.prompt(follower)
    sent = [[(f.session.session_id, f.position, len(f.tokens)) for f in envelope] for envelope in scheduler.take(0)]
    assert sent == [[(1, 0, 0), (2, 0, 0), (1, 0, 24)], [(1, 24, 18)], [(2, 40, 0), (2, 40, 1)]]


def test_whose_rows_others_wait_for_is_as_urgent_as_they() -> None:
    line = PromptLine()
    leader, other = session_of(1, (*SYSTEM, *range(200))), session_of(2, tuple(range(500, 590)))
    follower = session_of(3, (*SYSTEM, 5))
    for session in (leader, other, follower):
        session.start()
        line.add(session, 1)
    assert line.upcoming() is follower
    follower.follow(leader, len(SYSTEM))
    assert line.upcoming() is leader, "41 rows are before the follower's first token, 90 before the other's"
    assert [frame.session for frame in line.next_chunks(30)] == [leader]
    assert line.upcoming() is leader
    assert [frame.session for frame in line.next_chunks(30)] == [leader]
    assert line.upcoming() is other, "the rows that the follower waits for have left"
    assert [(f.session, f.flags, f.argument) for f in line.catch_up()] == [(follower, Flag.COPY_PREFIX, 1)]
    assert line.upcoming() is follower


def test_prompts_of_a_low_level_are_read_after_others_unless_one_of_these_waits_for_them() -> None:
    line = PromptLine()
    sessions = [session_of(at, tuple(range(at * 100, at * 100 + 8))) for at in range(1, 5)]
    low, low_leader, usual, follower = sessions
    for each in (low, low_leader):
        each.request = dataclasses.replace(each.request, tenant=Tenant("night", level=Level.LOW))
    for each in (low, low_leader, usual):
        each.start()
        line.add(each, 0)
    follower.start()
    follower.follow(low_leader, 4)
    line.add(follower, 0)
    order = []
    while line:
        order += [frame.session for frame in line.next_chunks(4)]
        line.catch_up()
    assert low not in order[:-2], "it comes first, and each fourth turn is the oldest's of the best level"
    assert set(order[:4]) <= {low_leader, usual, follower}
    assert order[-2:] == [low, low]


def test_a_prompt_of_a_low_level_is_read_at_last_where_better_ones_never_pause() -> None:
    line = PromptLine()
    batch, low = session_of(-1, tuple(range(8))), session_of(0, tuple(range(8)))
    for each, level in ((batch, Level.BATCH), (low, Level.LOW)):
        each.request = dataclasses.replace(each.request, tenant=Tenant(level.name, level=level))
        each.start()
        line.add(each, 0)
    order = []
    for at in range(1, 3 * LOWER_EVERY):
        usual = session_of(at, (at, 1, 2, 3))
        usual.start()
        line.add(usual, 0)
        order += [frame.session for frame in line.next_chunks(4)]
    assert [turn + 1 for turn, each in enumerate(order) if each is low] == [LOWER_EVERY, 2 * LOWER_EVERY]
    assert low not in line.sessions, "both chunks have been read"
    while len(line) > 1:
        assert batch not in [frame.session for frame in line.next_chunks(4)], (
            "the oldest of all, while others are there"
        )
    assert [frame.session for frame in line.next_chunks(4)] == [batch]


def test_a_line_of_sessions_that_wait_for_others_sends_nothing() -> None:
    line = PromptLine()
    leader, follower = session_of(1, (*SYSTEM, 7)), session_of(2, (*SYSTEM, 8))
    leader.start()
    follower.start()
    follower.follow(leader, len(SYSTEM))
    line.add(follower, 0)
    assert line.next_chunks(8) == []
    assert line.all_chunks(8) == []
    assert line.catch_up() == []
    assert line.orphans() == []
    assert line.upcoming() is follower
    leader.cancel()
    assert line.orphans() == [follower]
    assert line.next_chunks(8) == [], "until it has been started again"


class OneStage:
    """A stage's content; refuses what a real stage would refuse."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.n_rows = 0

    def apply(self, frame: OutFrame) -> None:
        key = frame.session.session_id
        if frame.flags & Flag.OPEN:
            self.held.setdefault(key, [])
        elif frame.flags & Flag.CLOSE:
            del self.held[key]
        elif frame.flags & Flag.COPY_PREFIX:
            assert not self.held[key]
            assert len(self.held[frame.argument]) >= frame.position, "copied before it was there"
            self.held[key] = self.held[frame.argument][: frame.position]
        else:
            assert frame.position <= len(self.held[key]), "a gap"
            self.held[key][frame.position :] = frame.tokens
            self.n_rows += len(frame.tokens)


@dataclasses.dataclass
class World:
    """Scheduler and prefixes as the pipeline drives them, over one stage that answers on request."""

    scheduler: Scheduler
    stage: OneStage
    running: dict[int, Session]
    prefixes: Prefixes
    flights: list[list[OutFrame]]
    n_lanes_kept: int = 0

    @classmethod
    def of(cls, mode: str, chunk_rows: int) -> World:
        running: dict[int, Session] = {}
        prefixes = Prefixes(None, itertools.count(1_000), list, running)
        prefixes.renew(8, is_per_lane=False)
        return cls(Scheduler(ScheduleConfig(mode), Fixed(chunk_rows)), OneStage(), running, prefixes, [])

    def start(self, session: Session) -> None:
        self.running[session.session_id] = session
        self.scheduler.control(self.prefixes.start(session))
        self.scheduler.prompt(session)

    def send(self) -> None:
        for orphan in self.scheduler.orphans():
            self.start(orphan)
        for envelope in self.scheduler.take(0):
            for frame in envelope:
                self.stage.apply(frame)
            self.flights.append(envelope)

    def answer(self, flight: list[OutFrame]) -> None:
        self.flights.remove(flight)
        for frame in flight:
            session, end = frame.session, frame.position + len(frame.tokens)
            if not frame.tokens or session.session_id not in self.running:
                continue
            self.scheduler.answered(session.session_id, end, 0)
            if frame.flags & Flag.WANTS_SAMPLE:
                _, frames = session.sampled(end, 900 + end)
                if session.state is State.DONE:
                    self.end(session, frames)
                else:
                    for following in frames:
                        self.scheduler.decode(following)

    def end(self, session: Session, frames: list[OutFrame]) -> None:
        del self.running[session.session_id]
        self.scheduler.forget(session.session_id)
        self.scheduler.control(frames)

    def begin_again(self, session: Session) -> None:
        """After its own fault."""
        self.scheduler.forget(session.session_id)
        session.replays += 1
        self.start(session)

    def give_way(self, session: Session) -> None:
        """A stage had no lane for it: it waits in line, and has one again at once."""
        self.scheduler.forget(session.session_id)
        self.scheduler.control(session.give_way())
        self.start(session)


@pytest.mark.parametrize("mode", ["auto", "drain"])
@given(seed=st.integers(0, 2**32), chunk_rows=st.integers(1, 60))
@settings(max_examples=thinned(120))
def test_whoever_leaves_or_begins_again_all_others_are_read_and_nothing_is_copied_too_early(
    mode: str, seed: int, chunk_rows: int
) -> None:
    rng = random.Random(seed)
    world, ids = World.of(mode, chunk_rows), itertools.count(1)
    docs = [SYSTEM, (*SYSTEM, *range(100, 150)), (*SYSTEM, *range(100, 190)), tuple(range(300, 380))]
    n_done = n_left = 0
    for _ in range(120):
        act = rng.random()
        victim = rng.choice(list(world.running.values())) if world.running else None
        if act < 0.25 and next(ids) < 40:
            world.start(
                session_of(next(ids), (*rng.choice(docs), *(rng.randrange(50) for _ in range(rng.choice([1, 20])))))
            )
        elif act < 0.3 and victim:
            world.end(victim, victim.cancel())
            n_left += 1
        elif act < 0.34 and victim and not victim.replays:
            world.begin_again(victim)
        elif act < 0.38 and victim:
            world.give_way(victim)
        elif act < 0.7:
            world.send()
        elif world.flights:
            world.answer(rng.choice(world.flights) if mode == "drain" else world.flights[0])
        for session in world.running.values():
            if session.leader is None and session.state is not State.PREFILL:
                assert (
                    world.stage.held[session.session_id] == session.history[: len(world.stage.held[session.session_id])]
                )
    while world.running:
        n_before = sum(session.n_sent + len(session.history) for session in world.running.values())
        world.send()
        assert world.flights, f"stuck with {n_before}"
        for flight in list(world.flights):
            world.answer(flight)
        n_done += 1
        assert n_done < 2_000
    world.send()
    assert world.stage.held == {}


def test_a_burst_with_one_system_prompt_reads_it_once() -> None:
    world = World.of("auto", 16)
    for session_id in range(1, 9):
        world.start(session_of(session_id, (*SYSTEM, *range(60 + session_id, 63 + session_id)), max_tokens=1))
    while world.running:
        world.send()
        world.answer(world.flights[0])
    assert world.stage.n_rows == len(SYSTEM) + 8 * 3


def test_of_those_left_behind_one_reads_for_all() -> None:
    world = World.of("auto", 16)
    sessions = [session_of(number, (*SYSTEM, number, 7), max_tokens=1) for number in range(1, 6)]
    for session in sessions:
        world.start(session)
    world.send()
    world.end(sessions[0], sessions[0].cancel())
    while world.running:
        world.send()
        world.answer(world.flights[0])
    assert world.stage.n_rows == 16 + len(SYSTEM) + 4 * 2


def test_a_held_prefix_is_used_at_once_where_a_leader_would_add_little() -> None:
    world = World.of("auto", 60)
    first = session_of(1, (*SYSTEM, *range(100, 150)))
    world.start(first)
    world.send()
    second = session_of(2, first.request.prompt_tokens)
    assert (first.n_held, first.leader) == (60, None)
    world.start(second)
    assert (second.leader, second.n_copied) == (None, 60), "29 rows are sooner read than waited for"


def test_sessions_do_not_wait_for_each_other_in_a_circle() -> None:
    world = World.of("auto", 8)
    first, second, third = (session_of(number, (*SYSTEM, number)) for number in (1, 2, 3))
    for session in (first, second):
        world.start(session)
    assert second.leader is first
    world.give_way(first)
    assert first.leader is None, "second waits for it"
    world.start(third)
    assert third.leader is first
    world.end(first, first.cancel())
    world.start(second)
    assert second.leader is None, (
        "third is an orphan itself: a session that waited for it would be at the end of a chain"
    )
    world.send()
    assert (third.leader, second.n_sent) == (second, 8)


def test_those_that_a_leader_leaves_behind_follow_one_of_them_and_no_chain() -> None:
    world = World.of("auto", 8)
    leader, *others = (session_of(number, (*SYSTEM, *range(number, number + 9))) for number in range(1, 9))
    for session in (leader, *others):
        world.start(session)
    assert {session.leader for session in others} == {leader}
    world.end(leader, leader.cancel())
    world.send()
    assert [session.leader for session in others] == [None] + [others[0]] * (len(others) - 1)


def test_a_follower_of_an_orphan_is_no_source() -> None:
    world = World.of("auto", 8)
    first, second, third, fourth = (session_of(number, (*SYSTEM, number)) for number in range(1, 5))
    world.start(first)
    world.start(second)
    third.start()
    third.follow(second, 8)
    world.running[3] = third
    world.end(first, first.cancel())
    assert (second.is_orphan, third.is_orphan, third.waits_in_vain, third.reader) == (True, False, True, first)
    world.start(fourth)
    assert fourth.leader is None


@pytest.mark.parametrize("asks", [0, 1])
def test_an_uncached_session_neither_follows_nor_leads(asks: int) -> None:
    world = World.of("auto", 8)
    pair = [session_of(number, (*SYSTEM, number)) for number in (1, 2)]
    pair[asks].request = dataclasses.replace(pair[asks].request, cache_prompt=False)
    for session in pair:
        world.start(session)
    assert pair[1].leader is None
    off = Prefixes(0, itertools.count(1_000), list, world.running)
    late = session_of(3, (*SYSTEM, 3))
    off.start(late)
    assert late.leader is None


def test_a_running_answer_is_copied_up_to_its_last_token() -> None:
    world = World.of("auto", 60)
    first = session_of(1, SYSTEM, max_tokens=9)
    world.start(first)
    world.send()
    world.answer(world.flights[0])
    assert first.state is State.DECODE
    second = session_of(2, (*first.history, 7))
    world.start(second)
    assert second.n_copied == len(first.history) - 1, "the row of its last token may not have left"
    world.send()


def test_no_stream_waits_for_a_restarted_streams_answer() -> None:
    """It keeps the history of its restart: later tokens are in its history, but no session may wait for them."""
    world = World.of("auto", 60)
    first = session_of(1, SYSTEM, max_tokens=99)
    world.start(first)
    world.send()
    world.start(first)  # after its own fault, within the epoch
    assert first.is_restarted
    while first.n_generated < 40:
        world.send()
        world.answer(world.flights[0])
    assert first.state is State.DECODE
    assert first.n_held < len(first.history) - 33
    second = session_of(2, (*first.history, 7))
    world.start(second)
    world.send()
    assert second.leader is None
    assert second.prefill_left == 0, "no other session reads, so all of it has left"


def test_a_session_that_sent_no_row_expects_no_old_answer() -> None:
    world = World.of("auto", 8)
    first, second, third = (session_of(number, (*SYSTEM, number), max_tokens=9) for number in (1, 2, 3))
    for session in (first, second, third):
        world.start(session)
    assert (second.leader, third.leader) == (first, first)
    first.cancel()
    assert world.scheduler.orphans() == [second, third]
    world.start(second)
    assert not second.is_restarted
    world.start(second)
    assert second.is_restarted, "started once more it may have sent some"


def test_a_session_without_a_lane_is_no_leader() -> None:
    world = World.of("auto", 8)
    first, second, third = (session_of(number, (*SYSTEM, number)) for number in (1, 2, 3))
    for session in (first, second):
        world.start(session)
    world.scheduler.forget(1)
    world.scheduler.control(first.give_way())
    assert world.scheduler.orphans() == [second]
    world.send()
    assert (second.leader, second.n_sent) == (None, 8)
    second.give_way()
    world.start(third)
    assert third.leader is None, "neither of them reads"
