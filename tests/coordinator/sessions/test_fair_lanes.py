"""Goal: one tenant's line keeps no other from the lanes, shares hold in the long run, and one tenant sees nothing new.

Method: the admission that serves, on virtual time. Streams hold lanes for times that hypothesis chooses; for one tenant
a plain list says what first come, first served would do.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayline.coordinator.sessions.admission import LINES_MAX, Admission
from relayline.coordinator.sessions.fair_lanes import FAR_TENANTS_MAX, LOWER_EVERY, NEW_RATE, TURNS, FairLanes
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.tenants import ANYONE, TURN_MAX, Level, Tenant, turn_of
from relayline.wire.common.errors import OverloadedError

ALICE, BATCH = Tenant("alice"), Tenant("batch")
MINUTE_NS = 60_000_000_000


def session(session_id: int, tenant: Tenant = ANYONE, turn: int = 0) -> Session:
    request = GenerationRequest(str(session_id), (0,), 1, SamplingParams(), tenant=tenant, turn=turn)
    return Session(session_id, request, lambda _: False)


class World:
    """Streams on virtual time; how long each holds its lane is asked of `hold_ns`."""

    def __init__(self, n_lanes: int, hold_ns: Callable[[Session], int], waiting_max: int = 1 << 20) -> None:
        self.admission = Admission(n_lanes, 8, waiting_max)
        self.hold_ns, self.now_ns = hold_ns, 0
        self.ids = itertools.count(1)
        self.ends: list[tuple[int, int, int, Session]] = []
        self.served: list[str] = []
        """Whose stream got a lane, in order."""
        self.lane_ns: collections.Counter[str] = collections.Counter()

    def send(self, tenant: Tenant, turn: int = 0) -> Session:
        new = session(next(self.ids), tenant, turn)
        for starting in self.admission.admit(new):
            self._start(starting)
        return new

    def _start(self, started: Session) -> None:
        hold_ns = self.hold_ns(started)
        self.served.append(started.request.tenant.name)
        self.lane_ns[started.request.tenant.name] += hold_ns
        heapq.heappush(self.ends, (self.now_ns + hold_ns, started.session_id, hold_ns, started))

    def end_one(self) -> Session:
        """Let the stream end that ends next."""
        self.now_ns, _, hold_ns, ended = heapq.heappop(self.ends)
        for following in self.admission.leave(ended, hold_ns):
            self._start(following)
        return ended

    def running(self) -> dict[str, int]:
        return {name: running for name, (running, _) in self.admission.of_tenants().items()}


def test_a_batch_leaves_its_lane_to_others_and_goes_below_the_lowest_key() -> None:
    """Four lanes, three of them for batches: a chat starts at once, and a low key's request before the batch's next."""
    world = World(4, lambda _: MINUTE_NS)
    night = Tenant("(batch) alice", streams_max=3, level=Level.BATCH)
    low = Tenant("low", level=Level.LOW)
    for _ in range(40):
        world.send(night)
    assert world.running() == {"(batch) alice": 3}
    world.send(ANYONE)
    assert world.served[-1] == "", "at once, in the lane that batches leave"
    for tenant in (low, ANYONE):
        world.send(tenant)
    world.end_one()
    world.end_one()
    assert world.served[-2:] == ["", "low"], "all others go first, though the batch has waited longer"
    while world.ends:
        world.end_one()
    assert world.served.count("(batch) alice") == 40


def test_one_tenants_batch_does_not_make_another_wait_for_all_of_it() -> None:
    world = World(8, lambda _: MINUTE_NS)
    for _ in range(500):
        world.send(BATCH)
    for _ in range(6):
        world.send(ALICE)
    for _ in range(4):
        world.end_one()
    assert world.served[8:] == ["alice"] * 4, "until both have as many lanes"
    assert world.running() == {"batch": 4, "alice": 4}
    for _ in range(4):
        world.end_one()
        assert abs(world.running()["batch"] - 4) <= 1


def shares_of(world: World, tenants: Sequence[Tenant], n_ends: int) -> dict[str, float]:
    """Return each tenant's part of the lane time while all have something in line."""
    for _, tenant in itertools.product(range(world.admission.n_lanes + 2), tenants):
        world.send(tenant)
    for _ in range(n_ends // 4):
        world.send(world.end_one().request.tenant)
    world.lane_ns.clear()
    for _ in range(n_ends):
        world.send(world.end_one().request.tenant)
    return {tenant.name: world.lane_ns[tenant.name] / world.lane_ns.total() for tenant in tenants}


@settings(max_examples=20)
@given(st.integers(1, 12), st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 1 << 30))
def test_shares_hold_in_the_long_run(n_lanes: int, shares: list[int], seed: int) -> None:
    rng = random.Random(seed)
    world = World(n_lanes, lambda _: rng.randint(1, 20) * MINUTE_NS)
    tenants = [Tenant(str(at), share) for at, share in enumerate(shares)]
    found = shares_of(world, tenants, 800)
    for tenant in tenants:
        assert found[tenant.name] == pytest.approx(tenant.share / sum(shares), rel=0.2, abs=0.02)


@pytest.mark.parametrize("n_lanes", [1, 2, 8])
def test_whose_streams_take_longer_gets_no_more_lanes(n_lanes: int) -> None:
    world = World(n_lanes, lambda each: MINUTE_NS * (5 if each.request.tenant.name == "batch" else 1))
    assert shares_of(world, [BATCH, ALICE], 2_000)["batch"] == pytest.approx(0.5, abs=0.05)


TENANTS = [Tenant(str(at), 1 + at % 3) for at in range(5)]
EVENTS = st.lists(st.tuples(st.sampled_from(["send", "send", "end", "go"]), st.integers(0, 4)), max_size=80)


@given(EVENTS, st.integers(1, 4), st.integers(0, 4))
def test_nobody_starves(events: list[tuple[str, int]], n_lanes: int, unlucky: int) -> None:
    """Whatever happened before: a tenant in line gets a lane although all others always have more to do."""
    world = World(n_lanes, lambda _: MINUTE_NS)
    for kind, which in events:
        if kind == "send":
            world.send(TENANTS[which])
        elif kind == "end" and world.ends:
            world.end_one()
        elif kind == "go" and (waiting := list(world.admission.waiting)):
            assert world.admission.leave(waiting[which % len(waiting)]) == []
    for tenant in TENANTS:
        world.send(tenant)
    mine = world.send(TENANTS[unlucky])
    before = [each for each in world.admission.waiting if each.request.tenant is TENANTS[unlucky]]
    n_turns = 0
    while mine.session_id not in world.admission.running and n_turns < 1_000:
        n_turns += 1
        world.send(world.end_one().request.tenant)
    # Each turn of another tenant brings it 1 / (3 * TURNS) nearer at least, from a running stream and a credit away.
    assert n_turns <= (len(before) + 1) * len(TENANTS) * 3 * TURNS * 2 + n_lanes


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 40), st.booleans())
@example(n_lanes=1, share=1, n_had=1, n_line=1, is_known=False)
def test_newcomers_without_end_starve_nobody(n_lanes: int, share: int, n_had: int, n_line: int, is_known: bool) -> None:
    """One had streams and waits for the next, while keys come that have had none, or whose lane time is forgotten."""
    world = World(n_lanes, lambda _: MINUTE_NS)
    unlucky = Tenant("unlucky", share)
    for _ in range(n_had):
        world.send(unlucky)
    while world.ends:
        world.end_one()
    names = itertools.cycle(range(2 * FAR_TENANTS_MAX)) if is_known else itertools.count()
    for _ in range(n_lanes + n_line):
        world.send(Tenant(str(next(names))))
    mine = world.send(unlucky)
    lead = n_had / TURNS / share  # lane time that it has had more than they
    n_ends_max = TURNS * lead / NEW_RATE * (n_lanes + n_line + 1 + share) + n_lanes + n_line
    n_ends = 0
    while mine.session_id not in world.admission.running:
        world.end_one()
        world.send(Tenant(str(next(names))))
        n_ends += 1
        assert n_ends <= n_ends_max


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "leave", "resize", "lose", "try"]), st.integers(0, 9)), max_size=60
)


@given(STEPS, st.integers(1, 4), st.integers(0, 3))
def test_with_one_tenant_it_is_first_come_first_served(steps: list[tuple[str, int]], n_lanes: int, n_max: int) -> None:
    admission = Admission(n_lanes, 8, n_max)
    line: list[Session] = []
    running: list[Session] = []
    n_ours, n_more = n_lanes, 1

    def fill() -> list[Session]:
        following = []
        while line and len(running) < n_ours:
            running.append(line.pop(0))
            following.append(running[-1])
        return following

    for at, (kind, which) in enumerate(steps):
        if kind == "enter":
            new = session(at)
            try:
                starting = admission.admit(new)
            except OverloadedError:
                assert len(line) >= n_max
                assert line or len(running) >= n_ours
                continue
            has_lane = not line and len(running) < n_ours
            assert starting == ([new] if has_lane else [])
            (running if has_lane else line).append(new)
        elif kind == "resize":
            n_lanes = n_ours = 1 + which % 4
            n_more = 1
            running.sort(key=lambda each: each.session_id)
            surplus, running[n_lanes:] = running[n_lanes:], []
            line[:] = sorted([*line, *surplus], key=lambda each: each.session_id)
            assert admission.resize(n_lanes, 8) == surplus
            fill()
        elif kind == "try":
            n_ours = min(n_lanes, n_ours + n_more) if line else n_lanes
            n_more *= 2
            assert admission.try_lanes() == fill()
        elif kind == "lose" and running:
            lost = running.pop(which % len(running))
            line[:] = sorted([*line, lost], key=lambda each: each.session_id)
            n_ours, n_more = len(running), 1
            assert admission.put_back(lost)
        elif kind == "leave" and (line or running):
            leaving = [*running, *line][which % len([*running, *line])]
            had_lane = leaving in running
            (running if had_lane else line).remove(leaving)
            assert admission.leave(leaving, 1 + which) == (fill() if had_lane else [])
        assert (list(admission.waiting), [*admission.running.values()]) == (line, running) or (
            sorted(admission.running) == sorted(each.session_id for each in running) and list(admission.waiting) == line
        )


def test_those_who_lost_their_lane_go_before_everyone() -> None:
    world = World(2, lambda _: MINUTE_NS)
    batch = [world.send(BATCH) for _ in range(4)]
    high = world.send(Tenant("boss", level=Level.HIGH))
    assert world.admission.resize(1, 8) == [batch[1]]
    assert list(world.admission.waiting) == [batch[1], batch[2], batch[3], high]
    assert world.admission.leave(batch[0]) == [batch[1]]
    assert world.admission.leave(batch[1]) == [high]


def test_one_that_lost_its_lane_and_leaves_waits_no_more() -> None:
    world = World(2, lambda _: MINUTE_NS)
    batch = [world.send(BATCH) for _ in range(3)]
    assert world.admission.resize(1, 8) == [batch[1]]
    assert world.admission.leave(batch[1]) == []
    assert world.admission.of_tenants() == {"batch": (1, 1)}
    assert not world.admission.waiting.remove(batch[1]), "it has gone"
    assert world.admission.leave(batch[0]) == [batch[2]]


def test_a_tenants_part_of_the_line_is_by_its_share_among_those_who_wait() -> None:
    line = FairLanes()
    twice = Tenant("twice", 2)
    line.add(session(1, ALICE))
    line.add(session(2, twice))
    assert [line.part_of(tenant, 9) for tenant in (ALICE, twice, Tenant("new", 6))] == [3, 6, 6]
    assert [line.part_of(ALICE, n_places) for n_places in (0, 1, 2)] == [0, 1, 1]
    line.add(session(3, Tenant("twice", 5)))
    assert line.part_of(ALICE, 12) == 2, "options that the latest request brought hold"
    assert line._shares == 6
    assert line.may_run(Tenant("unknown", streams_max=1))


def test_low_ones_wait_while_others_do_and_high_ones_go_first() -> None:
    world = World(1, lambda _: MINUTE_NS)
    low, high = Tenant("night", level=Level.LOW), Tenant("boss", level=Level.HIGH)
    for tenant in (low, low, ALICE, high, ALICE, high):
        world.send(tenant)
    for _ in range(5):
        world.end_one()
    assert world.served == ["night", "boss", "boss", "alice", "alice", "night"]


def test_lower_levels_are_served_at_last_where_better_ones_never_pause() -> None:
    """One of LOWER_EVERY lanes is for a level that could have had each of them; without it nothing changes."""
    world = World(2, lambda _: MINUTE_NS)
    low, high = Tenant("night", level=Level.LOW), Tenant("boss", level=Level.HIGH)
    for tenant in (high, high, *[low] * 9, *[ALICE] * 9):
        world.send(tenant)
    n_lanes = 4 * LOWER_EVERY
    for _ in range(n_lanes):
        world.send(high)
        world.end_one()
    served = world.served[2:]
    for name in ("night", "alice"):
        turns = [at for at, each in enumerate(served) if each == name]
        assert len(turns) >= n_lanes // LOWER_EVERY - 1, name
        assert max(later - turn for turn, later in itertools.pairwise([-1, *turns])) <= LOWER_EVERY + 1
    assert served.count("boss") >= n_lanes - 2 * (n_lanes // LOWER_EVERY)


def hours_of(level: Level, hold_ns: Callable[[Session], int], n_ends: int = 2_000) -> World:
    """Return four lanes after `high` and one of this level have always had requests in line."""
    world = World(4, hold_ns)
    high, other = Tenant("boss", level=Level.HIGH), Tenant("night", level=level)
    for tenant in (high, other):
        for _ in range(8):
            world.send(tenant)
    for _ in range(n_ends):
        ended = world.end_one()
        world.send(ended.request.tenant)
        assert world.running().get("night", 0) <= 1, "one lane at most that better ones want"
    return world


def test_long_answers_of_a_low_level_hold_one_lane_that_others_want_and_not_always() -> None:
    """Turns are counted in lanes: where its streams take 120 times as long, four of them would run most of the time."""
    world = hours_of(Level.LOW, lambda each: MINUTE_NS * (120 if each.request.tenant.name == "night" else 1))
    assert world.served.count("night") > 1
    assert world.lane_ns["night"] < 0.3 * world.lane_ns.total(), "one of four lanes, with the last one not ended"
    turns = [at for at, each in enumerate(world.served) if each == "night"]
    assert min(later - turn for turn, later in itertools.pairwise(turns)) > LOWER_EVERY, "not at once after its last"


def test_batches_never_have_a_turn_that_somebody_else_wants() -> None:
    assert "night" not in hours_of(Level.BATCH, lambda _: MINUTE_NS).served


def test_a_turn_that_nobody_took_is_not_kept_for_the_next_one() -> None:
    world = World(1, lambda _: MINUTE_NS)
    high, low = Tenant("boss", level=Level.HIGH), Tenant("night", level=Level.LOW)
    world.send(high)
    gone = world.send(low)
    for _ in range(LOWER_EVERY - 1):
        world.send(high)
        world.end_one()
    world.admission.leave(gone)
    for _ in range(3):
        world.send(high)
        world.end_one()
    world.send(low)
    world.send(high)
    world.end_one()
    assert world.served == ["boss"] * len(world.served)


def test_a_key_whose_class_changes_while_it_runs_counts_for_its_new_one() -> None:
    line = FairLanes()
    line.add(session(1, Tenant("team", level=Level.LOW)))
    first = line.next()
    assert first is not None
    line.add(session(2, Tenant("team", level=Level.NORMAL)))
    assert [line._n_running[level] for level in (Level.NORMAL, Level.LOW)] == [1, 0]
    line.ended(first, 1)
    assert not any(line._n_running)


def test_a_bound_of_streams_leaves_lanes_to_others() -> None:
    world = World(4, lambda _: MINUTE_NS)
    bound = Tenant("batch", streams_max=2)
    for _ in range(6):
        world.send(bound)
    assert world.running() == {"batch": 2}
    assert world.send(ALICE).session_id in world.admission.running
    assert world.send(bound).session_id not in world.admission.running, "a lane is free, and not for this one"
    world.end_one()
    assert world.running() == {"batch": 2, "alice": 1}
    world.send(Tenant("batch", streams_max=4))  # the file was read again
    assert world.running() == {"batch": 3, "alice": 1}, "as many as there are lanes, and at once"


@pytest.mark.parametrize("waiting_max", [None, 3])
def test_a_greater_bound_of_streams_leaves_no_lane_idle(waiting_max: int | None) -> None:
    """The file was read again, or two gateways say different things of one key."""
    admission = Admission(8, 8, 64)
    before, now = (Tenant("batch", streams_max=limit, waiting_max=waiting_max) for limit in (1, 8))
    sent = [session(at, before) for at in range(4)]
    assert [admission.admit(each) for each in sent] == [sent[:1], [], [], []]
    new = session(4, now)
    admission.check_room(lambda: 1, now)
    assert admission.admit(new) == [*sent[1:], new]
    assert [admission.admit(session(at, before)) for at in (5, 6)] == [[], []]
    others = session(7, ALICE)
    assert admission.admit(others) == [others], "a key at its bound keeps none from the lanes"


def test_a_refusal_leaves_a_keys_options_as_they_were() -> None:
    admission = Admission(1, 8, 0)
    admission.admit(session(0, BATCH))
    with pytest.raises(OverloadedError):
        admission.admit(session(1, Tenant("batch", 7)))
    assert admission.waiting._own["batch"].tenant.share == admission.waiting._shares == 1


def test_a_tenants_own_line_can_be_bounded() -> None:
    admission = Admission(4, 8, 256)
    bound = Tenant("batch", streams_max=1, waiting_max=1)
    assert [len(admission.admit(session(at, bound))) for at in range(2)] == [1, 0]
    with pytest.raises(OverloadedError, match="1 request of this API key runs, and 1 waits, as many as may; try again"):
        admission.admit(session(2, bound), lambda: 7)
    admission.check_room(lambda: 1, ALICE)
    with pytest.raises(OverloadedError):
        admission.check_room(lambda: 1, bound)


def test_a_full_line_has_room_for_those_with_less_than_their_part() -> None:
    admission = Admission(1, 8, 8)
    ids = itertools.count()
    for _ in range(9):
        admission.admit(session(next(ids), BATCH))
    for _ in range(4):
        assert admission.admit(session(next(ids), ALICE)) == []
    for tenant in (ALICE, BATCH):
        with pytest.raises(OverloadedError, match="the one lane is taken and 12 requests already wait"):
            admission.admit(session(next(ids), tenant))
    for at in range(LINES_MAX * 8 - 12):
        assert admission.admit(session(next(ids), Tenant(f"other {at}"))) == []
    with pytest.raises(OverloadedError):
        admission.admit(session(next(ids), Tenant("one more")))


def test_a_requests_turn_counts_among_its_tenants_only() -> None:
    world = World(1, lambda _: MINUTE_NS)
    world.send(ALICE)
    order = [turn_of(0, "flex"), turn_of(5, None), 0, turn_of(-1, None), turn_of(TURN_MAX * 9, "priority")]
    sent = [world.send(BATCH, turn) for turn in order]
    mine = world.send(ALICE)
    started = []
    while world.admission.running:
        (running,) = world.admission.running.values()
        started += world.admission.leave(running, MINUTE_NS)
    assert [each for each in started if each is not mine] == sent[::-1]
    assert started.index(mine) <= 1


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    world = World(1, lambda _: MINUTE_NS)
    for at in range(FAR_TENANTS_MAX + 9):
        world.send(Tenant(str(at)))
        world.end_one()
    line = world.admission.waiting
    assert (len(line._far), len(line._own), len(line), line._ready) == (FAR_TENANTS_MAX, 0, 0, [])
    assert line._shares == 0


@given(EVENTS, st.integers(1, 4))
def test_no_lane_stays_free_while_somebody_may_have_it(events: list[tuple[str, int]], n_lanes: int) -> None:
    bounds = [None, 1, 2, None, 1]
    tenants = [Tenant(str(at), 1 + at % 3, streams_max=bounds[at], level=Level(at % 3)) for at in range(len(bounds))]
    world = World(n_lanes, lambda _: MINUTE_NS)
    for kind, which in events:
        if kind == "send":
            world.send(tenants[which])
        elif kind == "end" and world.ends:
            world.end_one()
        elif kind == "go" and (waiting := list(world.admission.waiting)):
            world.admission.leave(waiting[which % len(waiting)])
        figures, running = world.admission.of_tenants(), world.admission.running
        assert sum(each for each, _ in figures.values()) == len(running) <= n_lanes
        assert sum(each for _, each in figures.values()) == len(world.admission.waiting)
        for tenant in tenants:
            n_running, n_waiting = figures.get(tenant.name, (0, 0))
            is_full = tenant.streams_max is not None and n_running >= tenant.streams_max
            assert n_running <= (tenant.streams_max or n_lanes)
            assert not n_waiting or is_full or len(running) == n_lanes
