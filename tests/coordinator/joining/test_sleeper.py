"""Goal: those who put a pipeline to sleep, or wake it, hear what came of it, and the log says why a wake failed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.sleep import WAKE_MAX_S, SleepState
from relayline.coordinator.joining import sleeper as sleeping
from relayline.coordinator.joining.sleeper import Sleeper
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.tenants import Level, Tenant
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    InvalidRequestError,
    NotReadyError,
    RelaylineError,
    StageLostError,
    UsageError,
)
from relayline.wire.common.phase import HostState, Phase
from tests.coordinator.engine.test_conductor import FACTS, request
from tests.coordinator.engine.test_reconnect import joined, serve
from tests.support.polling import pause

WAIT_S = 60
NAMES = ("a", "b")


class FakePipeline:
    """A conductor with its epochs, which end and begin as the test says."""

    def __init__(self, idle_s: float = 0.0) -> None:
        serving = SimpleNamespace(sleep_idle_s=idle_s, takeover_s=0.0)
        self.config = SimpleNamespace(serving=serving)
        config = ConductorConfig(ScheduleConfig(draft=0), NAMES, 100, lost_wait_s=15.0)
        self.conductor = Conductor(config, lambda _: False, itertools.count(1), 0)
        self.moves = SimpleNamespace(is_open=False, latest=None)
        self.n_given_up, self.ends_at_once = 0, True
        self.others: list[str] = []
        """What those heard who attached before."""
        self.epochs: Any = SimpleNamespace(
            on_ended=lambda: self.others.append("ended"),
            on_stands=lambda: self.others.append("stands"),
            ready=asyncio.Event(),
            connection=None,
            route_id=7,
            lose=self._lose,
            give_up=self._give_up,
        )

    @property
    def phase(self) -> Phase:
        return self.conductor.availability.phase

    def is_ready(self) -> bool:
        return self.phase is Phase.READY

    def carry(self, instructions: object) -> None:
        """There are no clients."""

    def connect(self) -> None:
        self.conductor.begin_epoch()
        self.conductor.connected(FACTS, 0)
        self.epochs.connection = object()
        self.epochs.on_stands()
        self.epochs.ready.set()

    def _give_up(self) -> None:
        self.n_given_up += 1

    def _lose(self, error: RelaylineError) -> None:
        self.epochs.ready.clear()
        self.conductor.lost(error, 0, is_planned=isinstance(error, NotReadyError))
        if self.ends_at_once:
            self.end()

    def end(self) -> None:
        """Everything of the epoch that was lost is closed."""
        self.epochs.connection = None
        self.epochs.on_ended()


class Listening(Observer):
    """Notes what it hears of sleeps, and for how long stages loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str | float] = []

    def slept(self) -> None:
        self.heard.append("slept")

    def woke(self, took_s: float, now_ns: int) -> None:
        self.heard.append(took_s)


class World:
    """A pipeline of the stages a and b that sleeps, and what its stages were told."""

    def __init__(self) -> None:
        self.roster = joined(*NAMES)
        self.tickets = {name: serve(self.roster, name) for name in NAMES}
        self.pipeline: Any = FakePipeline()
        self.observer = Listening()
        self.sleeper = Sleeper(self.pipeline, self.roster, self.observer)
        self.told: list[bool] = []
        done = asyncio.Event()
        done.set()
        self.freed = done
        """Set once the stages have freed their memory."""
        resting = SimpleNamespace(listener=None, done=done, tell=self._tell)
        self.failed_moves: list[int] = []
        changes = SimpleNamespace(failed=lambda number, why: self.failed_moves.append(number))
        self.sleeper.attach(SimpleNamespace(resting=resting, changes=changes))  # type: ignore[arg-type]

    async def _tell(self, *, is_asleep: bool, route_id: int) -> None:
        self.told.append(is_asleep)

    async def until_told(self, *orders: bool) -> None:
        while self.told != [*orders]:
            await pause()


@contextlib.asynccontextmanager
async def asleep() -> AsyncIterator[World]:
    world = World()
    async with asyncio.timeout(WAIT_S):
        world.pipeline.connect()
        assert (await world.sleeper.ask())["is_sleeping"]
        await world.until_told(True)
        try:
            yield world
        finally:
            await world.sleeper.close()


async def test_stages_at_given_addresses_do_not_sleep() -> None:
    pipeline: Any = FakePipeline()
    fixed = Sleeper(pipeline, None, Observer())
    for asked in (fixed.ask, fixed.wake):
        with pytest.raises(InvalidRequestError, match="stages at given addresses do not sleep"):
            await asked()
    never: Any = FakePipeline(idle_s=5.0)
    with pytest.raises(UsageError, match="--sleep-idle-seconds: stages at given addresses do not sleep"):
        Sleeper(never, None, Observer())
    assert Sleeper(never, joined(*NAMES), Observer()).describe()["after_s"] == 5.0


async def test_others_that_follow_the_epochs_go_on_doing_so() -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        world.pipeline.connect()
        await waking
        assert world.pipeline.others == ["stands", "ended", "stands"]


async def test_a_request_wakes_it() -> None:
    async with asleep() as world:
        assert world.pipeline.describe_sleep(0)["state"] == "asleep"
        world.pipeline.on_opened()
        await world.until_told(True, False)


async def test_told_to_sleep_while_a_request_runs_it_does_so_by_itself_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BEAT_EVERY_S", 0.001)
    world = World()
    async with asyncio.timeout(WAIT_S):
        world.pipeline.connect()
        opened, _ = world.pipeline.conductor.open(request("r"), 0)
        found = await world.sleeper.ask()
        assert (found["is_sleeping"], found["requests"], found["is_asked"]) == (False, 1, True)
        world.pipeline.conductor.left(opened.session_id, 0)
        await world.until_told(True)
        await world.sleeper.close()


async def test_helpers_free_their_memory_too_and_one_that_fails_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asleep() as world:
        rested: list[bool] = []

        async def helps(is_asleep: bool) -> None:
            rested.append(is_asleep)

        async def fails(is_asleep: bool) -> None:
            raise ValueError("a bug")

        world.sleeper.helpers += [fails, helps]
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        world.pipeline.connect()
        await waking
        await world.sleeper.ask()
        await world.until_told(True, False, True)
        while rested != [False, True]:
            await pause()
    assert caplog.messages.count("a helper of the coordinator neither sleeps nor wakes") == 2


async def test_awake_is_said_only_once_requests_can_start() -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        assert not waking.done()
        world.pipeline.connect()
        assert (await waking)["state"] == "awake"


async def test_a_wake_without_a_stage_says_which_one_is_missing() -> None:
    async with asleep() as world:
        world.roster.leave(world.tickets["b"], "gone")
        with pytest.raises(NotReadyError, match="the pipeline is recovering; it waits for b"):
            await world.sleeper.wake()
        await world.until_told(True, False)


async def test_a_wake_of_a_pipeline_that_does_not_connect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "CONNECT_S", 0.0)
    async with asleep() as world:
        world.pipeline.conductor.availability.lost(0, StageLostError("a link was lost"))
        world.sleeper.sleep.wake(0)
        world.sleeper.left("b")
        with pytest.raises(NotReadyError, match=r"the pipeline is recovering$"):
            await world.sleeper.wake()


async def test_told_to_sleep_while_it_wakes_no_memory_is_free() -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        found = await world.sleeper.ask()
        assert (found["is_sleeping"], found["state"]) == (False, "waking")
        world.pipeline.connect()
        await waking
        assert world.sleeper.sleep.is_asked, "it sleeps again"


async def test_told_to_sleep_it_says_so_once_its_stages_have_freed_their_memory() -> None:
    world = World()
    world.freed.clear()
    async with asyncio.timeout(WAIT_S):
        world.pipeline.connect()
        asking = asyncio.create_task(world.sleeper.ask())
        await world.until_told(True)
        await pause()
        assert not asking.done()
        world.freed.set()
        assert (await asking)["is_sleeping"]
        await world.sleeper.close()


async def test_told_to_sleep_and_to_wake_it_waits_for_the_epoch_to_end() -> None:
    world = World()
    world.pipeline.ends_at_once = False
    async with asyncio.timeout(WAIT_S):
        world.pipeline.connect()
        asking = asyncio.create_task(world.sleeper.ask())
        while world.sleeper.sleep.state is not SleepState.FALLING:
            await pause()
        waking = asyncio.create_task(world.sleeper.wake())
        await pause()
        assert not asking.done()
        assert not waking.done()
        world.pipeline.end()
        world.pipeline.connect()
        assert ((await asking)["is_sleeping"], (await waking)["state"]) == (False, "awake")
        await world.sleeper.close()


async def test_told_to_wake_while_it_connects_it_says_awake_once_it_has() -> None:
    world = World()
    async with asyncio.timeout(WAIT_S):
        world.pipeline.connect()
        world.pipeline.epochs.lose(StageLostError("a link was lost"))
        waking = asyncio.create_task(world.sleeper.wake())
        await pause()
        assert not waking.done()
        world.pipeline.connect()
        assert (await waking)["state"] == "awake"
        await world.sleeper.close()


async def test_no_epoch_is_begun_with_stages_that_sleep_or_load() -> None:
    async with asleep() as world:
        beginning = asyncio.create_task(world.pipeline.epochs.rested())
        await pause()
        assert not beginning.done(), "they sleep"
        world.roster.leave(world.tickets["b"], "it starts again")
        world.sleeper.sleep._missing = list  # it is back, and not ready yet
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        await pause()
        assert not beginning.done(), "they load"
        world.sleeper.left("b")
        await beginning  # from here on it is waited for like any lost one
        with contextlib.suppress(NotReadyError):
            await waking
        await world.pipeline.epochs.rested()


async def test_telemetry_and_the_log_hear_of_sleeps_and_of_how_long_wakes_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with asleep() as world:
        assert world.observer.heard == ["slept"]
        assert world.pipeline.epochs.is_planned, "the end of its epoch is no loss"
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        world.sleeper.sleep.since_ns -= 3_000_000_000
        world.pipeline.connect()
        await waking
        await world.sleeper.ask()
        first, woke_s, second = world.observer.heard
        assert (first, second) == ("slept", "slept")
    assert 3 <= float(woke_s) < 3 + WAIT_S
    lines = [vars(each)["fields"] for each in caplog.records if each.message == "pipeline woke"]
    assert lines == [{"took_s": f"{float(woke_s):.3f}"}]


async def test_a_stage_that_leaves_ends_the_wait_for_its_load() -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        world.roster.leave(world.tickets["b"], "gone")
        world.sleeper.left("b")
        with pytest.raises(NotReadyError, match="the pipeline is recovering; it waits for b"):
            await waking


async def test_told_to_sleep_its_pipeline_takes_nothing_of_batches() -> None:
    async with asleep() as world:
        batch = Tenant("batches", level=Level.BATCH)
        world.pipeline.check_awake(batch)
        world.sleeper.sleep.is_asked = True
        with pytest.raises(NotReadyError, match="takes nothing of batches"):
            world.pipeline.check_awake(batch)


async def test_told_to_sleep_while_a_stage_is_lost_the_others_free_their_memory() -> None:
    world = World()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(NotReadyError, match="the pipeline is loading"):
            await world.sleeper.ask()
        world.pipeline.connect()
        world.roster.leave(world.tickets["b"], "gone")
        world.pipeline.epochs.lose(StageLostError("b is gone"))
        assert (await world.sleeper.ask())["is_sleeping"]
        await world.until_told(True)
        assert world.pipeline.n_given_up == 1, "no epoch is being begun with stages that sleep"
        await world.sleeper.close()


async def test_a_wake_that_fails_gives_up_the_epoch_and_the_move_that_were_being_begun() -> None:
    async with asleep() as world:
        world.roster.leave(world.tickets["b"], "gone")
        with contextlib.suppress(NotReadyError):
            await world.sleeper.wake()
        world.pipeline.moves = SimpleNamespace(is_open=True, latest=SimpleNamespace(number=3))
        before = world.pipeline.n_given_up
        world.sleeper.failed("a", "no memory")
        assert world.sleeper.sleep.is_asleep
        assert (world.failed_moves, world.pipeline.n_given_up) == ([3], before + 1)


async def test_a_load_that_gets_on_keeps_a_wake_from_failing() -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        now_ns = world.sleeper.sleep.since_ns
        for n_bytes in (1, 2, 3):
            world.roster.progress(world.tickets["a"], HostState.LOADING, n_bytes, 10)
            now_ns += int(WAKE_MAX_S * 1e9)
            assert world.sleeper.sleep.look(now_ns) == []
        world.pipeline.connect()
        await waking


@pytest.mark.parametrize("says_so", [True, False])
async def test_the_log_says_why_a_wake_failed(caplog: pytest.LogCaptureFixture, says_so: bool) -> None:
    async with asleep() as world:
        waking = asyncio.create_task(world.sleeper.wake())
        await world.until_told(True, False)
        if says_so:
            world.sleeper.failed("b", "no memory")
        else:
            world.sleeper._carry(world.sleeper.sleep.look(world.sleeper.sleep.since_ns + int(WAKE_MAX_S * 1e9)))
        with pytest.raises(NotReadyError, match="the pipeline cannot wake: "):
            await waking
        why = "b: no memory" if says_so else "no stage has got on with its load"
        lines = [each for each in caplog.messages if each.startswith("the pipeline cannot wake, and sleeps again")]
        assert len(lines) == 1
        assert why in lines[0]
