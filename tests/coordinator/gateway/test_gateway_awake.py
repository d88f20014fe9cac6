"""Which pipelines of a gateway are awake: places, turns, bounds, and any order of events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.coordinator.gateway import awake
from relayline.coordinator.gateway.awake import Awake, Decision, GiveUp, Go, PutToSleep, Told
from relayline.coordinator.gateway.bounds import (
    FALL_MAX_S,
    RETRY_AFTER_S,
    SLEEP_AGAIN_MAX_S,
    SLEEP_AGAIN_S,
    TURN_S,
    WAIT_MAX_S,
)

NS = 1_000_000_000


class World:
    """Pipelines that do what they are told, as a gateway sees them."""

    def __init__(self, names: str, limit: int) -> None:
        self.core, self.now_ns = Awake(limit), NS
        self.is_asleep = dict.fromkeys(names, True)
        self.n_others = dict.fromkeys(names, 0)
        self.falling: set[str] = set()  # told to sleep, and not answered
        self.later: set[str] = set()
        self.lost: set[str] = set()
        self.places: dict[int, str] = {}  # of requests that wait or run
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.given_up: list[int] = []
        self.errors: list[str] = []
        for name in names:
            self.poll(name)

    def take(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Go(number):
                    name = self.places[number]
                    assert name not in self.falling | self.later, "no request goes to one that falls asleep"
                    if self.is_asleep[name] and name not in self.lost:
                        assert sum(not each for each in self.is_asleep.values()) < self.core.limit
                    self.is_asleep[name] &= name in self.lost
                    self.waiting.remove(number)
                    self.running.append(number)
                case GiveUp(number, error):
                    self.waiting.remove(number)
                    self.given_up.append(number)
                    self.errors.append("" if error is None else error.message)
                case PutToSleep(name):
                    assert isinstance(name, str)
                    assert name not in self.falling | self.later
                    assert name not in map(self.places.get, self.running), "nothing is cut"
                    self.falling.add(name)

    def asks(self, name: str) -> int:
        number, decisions = self.core.came(name, self.now_ns)
        self.places[number] = name
        self.waiting.append(number)
        self.take(decisions)
        return number

    def ends(self, number: int) -> None:
        held = self.running if number in self.running else self.waiting
        held.remove(number)
        self.take(self.core.ended(number, self.now_ns))

    def answers(self, name: str, outcome: Told = Told.ASLEEP) -> None:
        self.falling.remove(name)
        if outcome is Told.ASLEEP and self.n_others[name]:
            outcome = Told.LATER
        self.is_asleep[name] |= outcome is Told.ASLEEP
        if outcome is Told.LATER:
            self.later.add(name)
        self.take(self.core.told(name, outcome, self.now_ns))

    def poll(self, name: str) -> None:
        if name in self.later and not self.n_others[name]:
            self.later.remove(name)
            self.is_asleep[name] = True
        asleep, others = self.is_asleep[name], self.n_others[name] > 0
        self.take(self.core.heard(name, self.now_ns, is_asleep=asleep, is_busy=others, asked_ns=self.now_ns))

    def dies(self, name: str) -> None:
        """With what runs there, and with the answer that it owed."""
        self.lost.add(name)
        self.is_asleep[name], self.n_others[name] = True, 0
        self.later.discard(name)
        self.take(self.core.lost(name, self.now_ns))
        for number in [each for each in self.running if self.places[each] == name]:
            self.ends(number)
        if name in self.falling:
            self.answers(name, Told.AWAKE)

    def comes_back(self, name: str) -> None:
        """Awake by itself, or woken by somebody else."""
        self.lost.discard(name)
        if name not in self.falling | self.later:
            self.is_asleep[name] = False
        self.poll(name)

    def passes(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS)
        self.take(self.core.look(self.now_ns))


def test_one_that_is_idle_makes_room_and_the_request_waits_until_it_sleeps() -> None:
    world = World("abc", 2)
    first, second = world.asks("a"), world.asks("b")
    assert world.running == [first, second], "there is room for two"
    world.now_ns += 1
    world.ends(second)
    world.now_ns += 1
    world.ends(first)
    third = world.asks("c")
    assert (world.waiting, world.falling) == ([third], {"b"}), "idle for longer"
    world.answers("b")
    assert world.running == [third]
    assert world.core.counts("b").n_sleeps == world.core.counts("c").n_waited == 1
    again = world.asks("a")
    assert world.running == [third, again], "one that is awake answers at once"


def test_one_that_fell_asleep_by_itself_holds_no_place() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.now_ns += 1
    world.is_asleep["a"] = True
    world.poll("a")
    other = world.asks("b")
    assert (world.running, world.falling) == ([other], set())


def test_a_busy_pipeline_ends_its_requests_before_it_sleeps() -> None:
    world = World("ab", 1)
    long = world.asks("a")
    other = world.asks("b")
    short = world.asks("a")
    assert (world.running, world.waiting, world.falling) == ([long, short], [other], set())
    world.passes(TURN_S)
    late = world.asks("a")
    assert world.waiting == [other, late], "it takes no new ones"
    world.ends(short)
    assert not world.falling
    world.ends(long)
    assert world.falling == {"a"}
    world.answers("a")
    assert (world.running, world.waiting) == ([other], [late])
    world.ends(other)
    assert world.falling == {"b"}, "the turn of those that came meanwhile"
    world.answers("b")
    assert world.running == [late]


def test_one_whose_turn_has_just_come_is_not_closed_at_once() -> None:
    world = World("ab", 1)
    long, other = world.asks("a"), world.asks("b")
    world.passes(TURN_S)
    late = world.asks("a")
    world.passes(2 * TURN_S)
    world.ends(long)
    world.answers("a")
    again = world.asks("b")
    assert (world.running, world.waiting) == ([other, again], [late]), "though `late` has waited long"
    world.passes(TURN_S - 1)
    assert not world.core.is_shut("b")
    world.passes(1)
    last = world.asks("b")
    assert world.waiting == [late, last]


def test_the_one_that_has_been_awake_longest_is_closed_first_and_as_many_as_others_wait_for() -> None:
    world = World("abcd", 2)
    for name in "ab":
        world.asks(name)
        world.now_ns += 1
    world.passes(TURN_S)
    world.asks("c")
    world.passes(TURN_S)
    assert [name for name in "ab" if world.core.is_shut(name)] == ["a"]
    world.asks("d")
    world.passes(TURN_S)
    assert [name for name in "ab" if world.core.is_shut(name)] == ["a", "b"]


def test_only_as_many_are_put_to_sleep_as_are_wanted() -> None:
    world = World("abc", 2)
    for name in "ab":
        world.ends(world.asks(name))
        world.now_ns += 1
    world.asks("c")
    assert world.falling == {"a"}
    world.passes(1)
    assert world.falling == {"a"}, "its place becomes free"


def test_no_busy_one_is_closed_where_another_has_just_become_idle() -> None:
    world = World("abc", 2)
    world.asks("a")
    short = world.asks("b")
    world.asks("c")
    world.passes(TURN_S - 1)
    world.now_ns += NS
    world.ends(short)
    assert world.falling == {"b"}
    assert not world.core.is_shut("a")


def test_whether_there_is_a_place_for_one_more() -> None:
    assert Awake(0).has_place, "there is no limit"
    world = World("abc", 2)
    world.asks("a")
    assert world.core.has_place
    world.asks("b")
    assert not world.core.has_place
    for _ in range(2):
        world.asks("c")
    world.core.came("c", world.now_ns, is_start=True)
    assert (world.core.counts("c").n_waiting, world.core.counts("a").n_waiting) == (2, 0), "a start is no request"
    world.core.limit = 3
    assert not world.core.has_place, "it is for the one that waits"


def test_when_nobody_waits_any_more_the_busy_one_takes_requests_again() -> None:
    world = World("ab", 1)
    long, other = world.asks("a"), world.asks("b")
    world.passes(TURN_S)
    late = world.asks("a")
    world.ends(other)
    assert (world.running, world.waiting) == ([long, late], [])


def test_waiting_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "WAITING_MAX", 2)
    world = World("ab", 1)
    world.asks("a")
    held = [world.asks("b"), world.asks("b")]
    surplus = world.asks("b")
    assert (world.waiting, world.given_up) == (held, [surplus])
    assert "too many requests wait" in world.errors[0]
    assert awake._refusal(1, "x").retry_after_s == RETRY_AFTER_S
    world.passes(WAIT_MAX_S - 1)
    assert world.waiting == held
    world.passes(1)
    assert world.given_up == [surplus, *held]
    assert "1 of the pipelines here may be awake at once; this one has waited 300 s" in world.errors[-1]


def test_others_requests_keep_a_pipeline_awake_until_they_have_ended() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.n_others["a"] = 1  # they came after its last report
    other = world.asks("b")
    world.answers("a")
    world.passes(1)
    world.poll("a")
    assert world.waiting == [other]
    world.n_others["a"] = 0
    world.poll("a")
    assert world.running == [other]


def test_one_that_does_not_fall_asleep_serves_and_is_told_again_later() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    other = world.asks("b")
    world.answers("a", Told.AWAKE)
    mine = world.asks("a")
    assert (world.running, world.waiting) == ([mine], [other])
    world.ends(mine)
    assert not world.falling
    world.passes(SLEEP_AGAIN_S)
    assert world.falling == {"a"}
    world.answers("a", Told.LATER)
    world.later.clear()
    world.passes(FALL_MAX_S)
    late = world.asks("a")
    assert world.running == [late]


def test_one_that_never_falls_asleep_is_told_more_and_more_seldom() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.asks("b")
    told_s: list[float] = []
    for second in range(290):
        if world.falling:
            told_s.append(second)
            world.answers("a", Told.AWAKE)
        world.passes(1)
    assert told_s == [0, 5, 15, 35, 75, 155, 275]


def test_one_whose_requests_do_not_end_is_told_again_much_later() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.n_others["a"] = 1  # of a batch, say
    world.asks("b")
    world.answers("a")
    world.passes(FALL_MAX_S - 1)
    assert world.core.is_shut("a"), "it may still fall asleep"
    world.passes(1)
    world.later.clear()
    mine = world.asks("a")
    assert mine in world.running, "it serves meanwhile"
    world.n_others["a"] = 0
    world.poll("a")
    world.ends(mine)
    world.passes(SLEEP_AGAIN_MAX_S - 1)
    assert not world.falling
    world.passes(1)
    assert world.falling == {"a"}


def test_a_pipeline_that_is_lost_holds_no_place_and_nobody_waits_for_it() -> None:
    world = World("ab", 1)
    mine, other = world.asks("a"), world.asks("b")
    world.ends(mine)
    world.is_asleep["a"] = True  # it dies while it is told to sleep
    world.lost.add("a")
    world.take(world.core.lost("a", world.now_ns))
    assert world.running == [other]
    world.answers("a", Told.AWAKE)  # too late
    late = world.asks("a")
    assert world.running == [other, late], "it fails there at once, and says so"


def test_those_who_wait_for_a_pipeline_that_is_lost_are_told() -> None:
    world = World("ab", 1)
    world.asks("a")
    other = world.asks("b")
    world.take(world.core.lost("b", world.now_ns))
    assert (world.given_up, world.errors) == ([other], [""])


def test_one_that_others_have_woken_counts_and_the_one_idle_longest_sleeps() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.now_ns += 1
    world.is_asleep["b"] = False
    world.poll("b")
    assert world.falling == {"a"}


def test_a_busy_one_is_closed_for_nobody_who_has_just_come() -> None:
    world = World("ab", 1)
    world.asks("a")
    world.passes(10 * TURN_S)
    world.asks("b")
    world.passes(TURN_S - 1)
    assert not world.core.is_shut("a")
    world.passes(1)
    assert world.core.is_shut("a")


def test_a_report_from_before_it_was_told_to_sleep_later_frees_no_place() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    world.n_others["a"] = 1
    other, asked_ns = world.asks("b"), world.now_ns
    world.now_ns += 1
    world.answers("a")
    assert world.later == {"a"}
    world.take(world.core.heard("a", world.now_ns, is_asleep=True, is_busy=False, asked_ns=asked_ns))
    assert world.waiting == [other]
    world.n_others["a"] = 0
    world.poll("a")
    assert world.running == [other]


def test_no_busy_one_is_closed_for_a_request_that_gets_another_place() -> None:
    world = World("abc", 2)
    mine = world.asks("a")
    world.ends(world.asks("b"))
    other = world.asks("c")
    assert world.falling == {"b"}
    world.passes(TURN_S)
    assert not world.core.is_shut("a"), "b falls asleep, if slowly"
    world.answers("b")
    assert world.running == [mine, other]


def test_the_place_of_one_too_many_is_nobodys_turn() -> None:
    world = World("abc", 1)
    mine = world.asks("a")
    world.is_asleep["b"] = False
    world.poll("b")
    assert world.falling == {"b"}, "two are awake where one may be"
    other = world.asks("c")
    world.passes(TURN_S)
    assert world.core.is_shut("a"), "the place of b does not become free for c"
    world.ends(mine)
    world.answers("b")
    assert other in world.waiting
    world.answers("a")
    assert other in world.running


def test_one_that_falls_asleep_holds_its_place_until_its_memory_is_free() -> None:
    world = World("ab", 1)
    world.ends(world.asks("a"))
    other = world.asks("b")
    world.now_ns += 1
    world.take(world.core.heard("a", world.now_ns, is_asleep=True, is_busy=False, asked_ns=world.now_ns))
    assert world.waiting == [other], "it says so before its stages have freed theirs"
    world.answers("a")
    assert world.running == [other]


def test_a_report_from_before_a_request_is_not_believed() -> None:
    world = World("ab", 1)
    asked_ns = world.now_ns
    world.now_ns += 1
    world.ends(world.asks("a"))
    world.take(world.core.heard("a", world.now_ns, is_asleep=True, is_busy=False, asked_ns=asked_ns))
    other = world.asks("b")
    assert (world.waiting, world.falling) == ([other], {"a"})


def test_a_start_waits_for_a_place_though_its_pipeline_does_not_answer() -> None:
    world = World("ab", 1)
    world.take(world.core.lost("b", world.now_ns))
    world.ends(world.asks("a"))
    number, decisions = world.core.came("b", world.now_ns, is_start=True)
    assert decisions == [PutToSleep("a")]
    assert world.core.told("a", Told.ASLEEP, world.now_ns) == [Go(number)]
    world.core.lost("b", world.now_ns)  # not there yet
    world.core.heard("b", world.now_ns, is_asleep=False, is_busy=False, asked_ns=world.now_ns)
    world.core.ended(number, world.now_ns)
    assert world.core.came("a", world.now_ns)[1] == [PutToSleep("b")], "it counts as awake"


def test_a_removed_pipelines_requests_are_given_up_and_its_place_is_free() -> None:
    world = World("ab", 1)
    mine, other = world.asks("a"), world.asks("b")
    world.take(world.core.removed("b", world.now_ns))
    assert world.given_up == [other]
    last = world.asks("b")
    world.is_asleep["a"] = True
    world.take(world.core.removed("a", world.now_ns))
    assert world.running == [mine, last]
    assert world.core.told("a", Told.ASLEEP, world.now_ns) == [], "nobody waits for what it says"


def test_an_answer_of_one_that_was_not_told_counts_for_nothing() -> None:
    world = World("ab", 1)
    mine = world.asks("a")
    world.asks("b")
    assert world.core.told("a", Told.ASLEEP, world.now_ns) == []
    assert (world.running, world.core.counts("a").n_sleeps) == ([mine], 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that happens; `at` chooses among those to which it can."""

    what: str
    at: int


STEPS = st.builds(
    Step,
    st.sampled_from(["asks", "asks", "ends", "leaves", "answers", "refuses", "others", "alone", "poll", "passes"]),
    st.integers(0, 11),
)


def play(world: World, step: Step, names: str) -> None:
    name = names[step.at % len(names)]
    falling = sorted(world.falling)
    match step.what:
        case "asks":
            world.asks(name)
        case "ends" if world.running:
            world.ends(world.running[step.at % len(world.running)])
        case "leaves" if world.waiting:
            world.ends(world.waiting[step.at % len(world.waiting)])
        case "answers" if falling:
            world.answers(falling[step.at % len(falling)])
        case "refuses" if falling:
            world.answers(falling[step.at % len(falling)], Told.AWAKE)
        case "others" if not world.is_asleep[name]:
            world.n_others[name] += 1
        case "alone":
            world.n_others[name] = 0
        case "poll":
            world.poll(name)
        case "passes":
            world.passes(step.at)
    world.now_ns += 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(STEPS, max_size=60))
def test_no_more_are_awake_and_every_request_is_answered_in_any_order_of_events(limit: int, steps: list[Step]) -> None:
    names = "abcd"
    world = World(names, limit)
    for step in steps:
        play(world, step, names)
        n_awake = sum(not each for each in world.is_asleep.values())
        assert n_awake <= limit
    for _ in range(40):  # everybody does what is due, in time
        for number in world.running[:]:
            world.ends(number)
        for name in names:
            world.n_others[name] = 0
            if name in world.falling:
                world.answers(name)
            world.poll(name)
        world.passes(TURN_S / 2)
    assert not world.waiting, "none waits for ever"
    assert all("has waited" in error for error in world.errors), "no other reason to give up"


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(STEPS, st.sampled_from(["", "", "dies", "comes_back"])), max_size=60))
def test_nothing_is_lost_where_pipelines_die_and_wake_by_themselves(limit: int, steps: list[tuple[Step, str]]) -> None:
    names = "abcd"
    world = World(names, limit)
    n_asked = 0
    for step, event in steps:
        name = names[step.at % len(names)]
        if event == "dies" and name not in world.lost:
            world.dies(name)
        elif event == "comes_back":
            world.comes_back(name)
        elif not (world.lost and step.what in ("poll", "alone", "others")):
            play(world, step, names)
        n_asked = len(world.places)
    for name in world.lost.copy():
        world.comes_back(name)
    for _ in range(40):
        for number in world.running[:]:
            world.ends(number)
        for name in names:
            world.n_others[name] = 0
            if name in world.falling:
                world.answers(name)
            world.poll(name)
        world.passes(TURN_S / 2)
    assert len(world.places) == n_asked
    assert not world.waiting
    assert sum(not each for each in world.is_asleep.values()) <= limit, "the surplus sleeps in the end"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=20))
def test_everybody_gets_a_turn_while_all_are_kept_busy(names: list[str]) -> None:
    world = World("abc", 1)
    numbers = [world.asks(name) for name in names]
    ages: dict[int, int] = {}
    for at in range(len(names) * 10):
        for number in world.running[:]:
            ages[number] = at
            world.asks(world.places[number])  # somebody always asks for what is awake
            world.ends(number)
        for name in sorted(world.falling):
            world.answers(name)
        world.passes(TURN_S / 3)
    assert set(numbers) <= set(ages) | set(world.given_up)
    assert not set(numbers) & set(world.given_up), "nobody came to his bound"
