"""Goal: a pipeline sleeps only while nobody asks anything, and every request wakes it; no request is lost by that."""

from __future__ import annotations

import itertools

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.instructions import Instruction, Tell
from relayline.coordinator.engine.sleep import (
    BATCH_AFTER_S,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    TAKEN_OVER_S,
    WAKE_MAX_S,
    Connect,
    EndEpoch,
    GiveUpMove,
    Refuse,
    Sleep,
    SleepInstruction,
    SleepState,
    TellStages,
)
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.tenants import ANYONE, Level, Tenant
from relayline.wire.common.errors import NotReadyError, StageLostError
from relayline.wire.common.phase import Phase
from tests.coordinator.engine.test_conductor import FACTS, request, sample

S = 1_000_000_000
IDLE_S = 60.0
ENDS, FREE, LOAD, AGAIN = [EndEpoch()], [TellStages(is_asleep=True)], [TellStages(is_asleep=False)], [Connect()]


class World:
    """A conductor that is connected, its sleep, and a clock."""

    def __init__(self, idle_s: float = IDLE_S, takeover_s: float = 0.0, loads_s: float = 0.0) -> None:
        config = ConductorConfig(ScheduleConfig(draft=0), ("a", "b"), 100, lost_wait_s=15.0)
        self.conductor = Conductor(config, lambda _: False, itertools.count(1), 0)
        self.now_ns, self.is_moving, self.is_closing, self.n_loaded = 0, False, False, 0
        self.missing: list[str] = []
        self.sleep = Sleep(
            self.conductor,
            idle_s,
            0,
            is_moving=lambda: self.is_moving,
            is_closing=lambda: self.is_closing,
            missing=lambda: self.missing,
            progress=lambda: self.n_loaded,
            takeover_s=takeover_s,
        )
        self.now_ns = round(loads_s * S)
        self.connect()

    def connect(self) -> list[Instruction]:
        self.conductor.begin_epoch()
        instructions = self.conductor.connected(FACTS, self.now_ns)
        self.sleep.stands(self.now_ns)
        return instructions

    def after(self, seconds: float) -> list[SleepInstruction]:
        """Look once after so long."""
        self.now_ns += round(seconds * S)
        return self.sleep.look(self.now_ns)

    def end(self) -> list[SleepInstruction]:
        """The shell has ended the epoch."""
        self.conductor.lost(NotReadyError("the pipeline goes to sleep"), self.now_ns, is_planned=True)
        return self.sleep.ended(self.now_ns)

    def asleep(self) -> World:
        assert self.after(IDLE_S) == ENDS
        assert self.end() == FREE
        return self

    def asks(self, name: str = "r") -> tuple[int, list[SleepInstruction]]:
        opened, _ = self.conductor.open(request(name), self.now_ns)
        return opened.session_id, self.sleep.came(self.now_ns)

    @property
    def phase(self) -> Phase:
        return self.conductor.availability.phase


def test_its_time_begins_when_it_is_ready_however_long_it_has_loaded() -> None:
    world = World(loads_s=3 * IDLE_S)
    assert world.after(IDLE_S - 1) == []
    assert world.after(1) == ENDS


def test_it_sleeps_after_its_time_without_requests_and_not_before() -> None:
    world = World()
    assert world.after(IDLE_S - 1) == []
    assert world.after(1) == ENDS
    assert world.phase is Phase.READY, "until the epoch has ended"
    assert world.end() == FREE
    assert (world.sleep.state, world.phase) == (SleepState.ASLEEP, Phase.SLEEPING)
    assert world.after(10 * IDLE_S) == [], "it sleeps on"


def test_without_the_setting_it_never_sleeps_by_itself() -> None:
    world = World(idle_s=0)
    assert world.after(1e6) == []


def test_a_request_keeps_it_awake_for_as_long_as_it_runs_and_its_time_after_that() -> None:
    world = World()
    session_id, instructions = world.asks()
    assert instructions == []
    for _ in range(5):
        assert world.after(IDLE_S) == []
    world.conductor.left(session_id, world.now_ns)
    assert world.after(IDLE_S - 1) == []
    assert world.after(1) == ENDS


def test_a_request_that_comes_and_goes_between_two_looks_counts_too() -> None:
    world = World()
    assert world.after(IDLE_S - 1) == []
    session_id, _ = world.asks()
    world.conductor.left(session_id, world.now_ns)
    assert world.after(IDLE_S - 1) == []
    assert world.after(1) == ENDS


def test_a_request_that_comes_while_the_epoch_ends_leaves_everything_loaded() -> None:
    world = World()
    assert world.after(IDLE_S) == ENDS
    assert world.asks()[1] == []
    assert world.end() == AGAIN
    assert world.sleep.state is SleepState.AWAKE
    world.connect()
    assert 1 in world.conductor.admission.running


def test_a_request_wakes_it_waits_and_starts_with_the_next_epoch() -> None:
    world = World().asleep()
    session_id, instructions = world.asks()
    assert instructions == LOAD
    assert world.phase is Phase.WAKING
    assert world.asks("another")[1] == [], "they load once"
    world.now_ns += 7 * S
    assert not world.conductor.dispatch(world.now_ns), "nothing leaves before the stages have loaded"
    world.connect()
    assert (world.phase, world.sleep.woke_ns) == (Phase.READY, 7 * S)
    world.conductor.dispatch(world.now_ns)
    told = [each for each in sample(world.conductor, 3, 7, session_id, world.now_ns) if isinstance(each, Tell)]
    assert [each.session_id for each in told] == [session_id]


def test_a_request_that_leaves_while_it_wakes_is_forgotten_and_it_sleeps_again_later() -> None:
    world = World().asleep()
    session_id, _ = world.asks()
    world.conductor.left(session_id, world.now_ns)
    assert not world.conductor.readers
    world.connect()
    assert world.after(IDLE_S) == ENDS


def test_told_to_sleep_it_waits_for_the_last_request() -> None:
    world = World(idle_s=0)
    session_id, _ = world.asks()
    assert world.sleep.ask(world.now_ns) == []
    assert world.sleep.describe(world.now_ns)["is_asked"]
    world.conductor.left(session_id, world.now_ns)
    assert world.after(1) == ENDS
    world.end()
    assert not world.sleep.is_asked


def test_told_to_sleep_it_takes_nothing_of_batches() -> None:
    world, batch = World(), Tenant("batches", level=Level.BATCH)
    world.sleep.check(batch)
    session_id, _ = world.asks()
    world.sleep.ask(world.now_ns)
    world.sleep.check(ANYONE)
    with pytest.raises(NotReadyError, match="told to sleep, and takes nothing of batches") as refused:
        world.sleep.check(batch)
    assert refused.value.retry_after_s == BATCH_AFTER_S
    world.conductor.left(session_id, world.now_ns)
    assert world.after(1) == ENDS
    assert world.end() == FREE
    world.sleep.check(batch)


def test_told_to_wake_it_forgets_that_it_was_told_to_sleep() -> None:
    world = World(idle_s=0)
    session_id, _ = world.asks()
    world.sleep.ask(world.now_ns)
    world.sleep.wake(world.now_ns)
    world.conductor.left(session_id, world.now_ns)
    assert world.after(1) == []


def test_told_to_wake_it_stays_awake_as_long_as_after_a_request() -> None:
    world = World()
    assert world.after(IDLE_S - 1) == []
    assert world.sleep.wake(world.now_ns) == []
    assert world.after(IDLE_S - 1) == []
    assert world.after(1) == ENDS


def test_told_to_wake_while_the_epoch_ends_it_stays_awake() -> None:
    world = World()
    assert world.after(IDLE_S) == ENDS
    assert world.sleep.wake(world.now_ns) == []
    assert world.end() == AGAIN
    world.connect()
    assert world.after(IDLE_S) == ENDS
    assert world.end() == FREE, "to wake counts once"


def test_it_does_not_sleep_while_layers_move() -> None:
    world = World()
    world.is_moving = True
    assert world.after(2 * IDLE_S) == []
    world.is_moving = False
    assert world.after(1) == ENDS


def test_while_a_lost_stage_is_waited_for_the_others_free_their_memory_too() -> None:
    world = World()
    world.conductor.lost(StageLostError("a stage was lost"), world.now_ns)
    world.is_closing = True
    assert world.after(IDLE_S) == [], "its epoch is still being closed"
    world.is_closing = False
    assert world.after(1) == FREE
    assert (world.sleep.state, world.phase, world.sleep.n_sleeps) == (SleepState.ASLEEP, Phase.SLEEPING, 1)
    world.missing = ["b"]
    assert world.asks()[1] == LOAD
    world.conductor.fail_all(NotReadyError("it is away"), world.now_ns)
    assert world.after(IDLE_S) == FREE, "and again after a wake without it"


def test_a_recovery_is_no_use_of_a_pipeline() -> None:
    world = World()
    assert world.after(IDLE_S - 1) == []
    world.conductor.lost(StageLostError("a link was lost"), world.now_ns)
    world.connect()
    assert world.after(1) == ENDS


def test_told_to_sleep_it_does_not_wait_for_a_lost_stage() -> None:
    world = World(idle_s=0)
    world.conductor.lost(StageLostError("a stage was lost"), world.now_ns)
    session_id, _ = world.asks()
    assert world.sleep.ask(world.now_ns) == []
    world.conductor.left(session_id, world.now_ns)
    assert world.after(1) == FREE


def test_others_take_over_from_a_lost_stage_before_it_sleeps() -> None:
    world = World(takeover_s=2 * IDLE_S, loads_s=3 * IDLE_S)
    world.conductor.lost(StageLostError("a stage was lost"), world.now_ns)
    assert world.after(2 * IDLE_S + TAKEN_OVER_S - 1) == []
    assert world.after(1) == FREE


def test_a_wake_that_fails_ends_the_requests_and_is_tried_again_with_a_bound() -> None:
    world = World().asleep()
    waits_s = []
    for number in range(6):
        assert world.asks(f"r{number}")[1] == LOAD
        refuse, free = world.sleep.failed("b: not enough memory", world.now_ns)
        assert free == FREE[0]
        assert isinstance(refuse, Refuse)
        assert "b: not enough memory" in str(refuse.error)
        world.conductor.fail_all(refuse.error, world.now_ns)
        assert not world.conductor.readers
        assert refuse.error.retry_after_s is not None
        waits_s.append(refuse.error.retry_after_s)
        with pytest.raises(NotReadyError, match="cannot wake: b: not enough memory; try again in"):
            world.asks("too early")
        world.after(waits_s[-1])
    assert waits_s == [RETRY_FIRST_S, 10, 20, 40, RETRY_MAX_S, RETRY_MAX_S]
    assert world.asks("again")[1] == LOAD
    world.connect()
    assert world.sleep.problem == ""
    world.conductor.fail_all(NotReadyError("enough"), world.now_ns)
    world.asleep()
    world.asks()
    refuse = world.sleep.failed("again", world.now_ns)[0]
    assert isinstance(refuse, Refuse)
    assert refuse.error.retry_after_s == RETRY_FIRST_S, "a wake that succeeded ends the doubling"


def test_stages_that_take_for_ever_to_load_fail_the_wake() -> None:
    world = World().asleep()
    world.asks()
    assert world.after(WAKE_MAX_S - 1) == []
    assert [type(each) for each in world.after(1)] == [Refuse, TellStages]


def test_stages_may_take_long_to_load_as_long_as_they_get_on() -> None:
    world = World().asleep()
    world.asks()
    for _ in range(5):
        world.n_loaded += 1
        assert world.after(WAKE_MAX_S - 1) == []
    world.connect()
    assert world.phase is Phase.READY


def test_a_stage_that_is_lost_while_it_wakes_is_waited_for_like_any_lost_one() -> None:
    world = World().asleep()
    world.asks()
    world.sleep.left("b", world.now_ns)
    assert (world.sleep.state, world.phase) == (SleepState.AWAKE, Phase.RECOVERING)
    world.now_ns += 15 * S
    told = [each for each in world.conductor.look(world.now_ns) if isinstance(each, Tell)]
    assert [type(each.event) for each in told] == [NotReadyError], "after --lost-wait"
    world.connect()
    assert world.phase is Phase.READY


def test_a_stage_that_cannot_load_while_another_is_lost_sleeps_with_the_pipeline() -> None:
    world = World().asleep()
    world.asks()
    world.sleep.left("b", world.now_ns)
    assert [type(each) for each in world.sleep.failed("a: not enough memory", world.now_ns)] == [Refuse, TellStages]
    assert world.phase is Phase.SLEEPING


def test_a_change_of_layers_is_given_up_before_stages_sleep_again() -> None:
    world = World().asleep()
    world.missing = ["b"]
    world.asks()
    world.is_moving = True  # others take over from b
    instructions = world.sleep.failed("a: not enough memory", world.now_ns)
    assert instructions[0] == GiveUpMove("a: not enough memory")
    assert [type(each) for each in instructions[1:]] == [Refuse, TellStages]


def test_a_stage_that_is_away_when_it_wakes_is_waited_for_like_any_lost_one() -> None:
    world = World().asleep()
    world.missing = ["b"]
    assert world.asks()[1] == LOAD
    assert (world.sleep.state, world.phase) == (SleepState.AWAKE, Phase.RECOVERING)


def test_reports_that_come_too_late_change_nothing() -> None:
    world = World()
    assert world.sleep.failed("b: not enough memory", world.now_ns) == []
    assert world.sleep.ended(world.now_ns) == []
    world.sleep.left("b", world.now_ns)
    assert (world.sleep.state, world.phase) == (SleepState.AWAKE, Phase.READY)


def test_it_says_how_it_is_and_how_often_it_has_slept() -> None:
    world = World(loads_s=2.5)
    fresh = Sleep(world.conductor, IDLE_S, world.now_ns)
    assert fresh.describe(world.now_ns) == {
        "state": "awake",
        "state_s": 0,
        "after_s": IDLE_S,
        "idle_s": 0,
        "is_asked": False,
        "sleeps": 0,
        "wakes": 0,
        "failed": 0,
        "woke_in_s": None,
        "problem": "",
    }, "before its stages were ever there"
    world.asleep()
    world.now_ns += 3 * S
    slept = world.sleep.describe(world.now_ns)
    assert (slept["state"], slept["state_s"], slept["idle_s"], slept["sleeps"]) == ("asleep", 3, IDLE_S + 3, 1)
    world.asks()
    world.sleep.failed("b: not enough memory", world.now_ns)
    failed = world.sleep.describe(world.now_ns)
    assert (failed["failed"], failed["problem"], failed["woke_in_s"]) == (1, "b: not enough memory", None)
    world.conductor.fail_all(NotReadyError("enough"), world.now_ns)
    world.now_ns += 10 * S
    world.asks()
    world.now_ns += round(1.5 * S)
    world.connect()
    world.now_ns += 2 * S
    awake = world.sleep.describe(world.now_ns)
    assert (awake["state"], awake["state_s"], awake["wakes"], awake["woke_in_s"]) == ("awake", 2, 1, 1.5)
    assert awake["idle_s"] == 0, "a request runs"


def test_a_wake_is_said_to_be_complete_once() -> None:
    world = World().asleep()
    world.asks()
    world.conductor.begin_epoch()
    world.conductor.connected(FACTS, world.now_ns)
    assert world.sleep.stands(world.now_ns)
    assert not world.sleep.stands(world.now_ns), "the next epoch is another matter"
