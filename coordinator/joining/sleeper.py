"""Puts a pipeline to sleep and wakes it: feeds `coordinator.engine.sleep` and carries out its instructions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.engine.sleep import (
    Connect,
    EndEpoch,
    GiveUpMove,
    Refuse,
    Sleep,
    SleepInstruction,
    SleepState,
    TellStages,
)
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.observe.observer import Observer
from relayline.wire.common import bounds
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, UsageError
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import cancel_all, end_task, set_within, start_among

log = logging.getLogger("relayline.coordinator")

Rests = Callable[[bool], Awaitable[None]]
"""Lets a helper of the coordinator free its memory (True), or load again."""

CONNECT_S = 10.0  # for an epoch to begin where all stages have loaded; `wake` waits for it no longer
FREE_S = 10.0  # for stages to free their memory; that they do is not waited for longer

FIXED = (
    "stages at given addresses do not sleep: others may use them; let them join the coordinator (`up`, or "
    "`serve --join-listen`)"
)


class Sleeper:
    """The sleep of one pipeline. Event loop only."""

    def __init__(self, pipeline: Pipeline, roster: JoinedRoster | None, observer: Observer) -> None:
        """Raises UsageError for a pipeline that is to sleep and cannot: its stages do not join."""
        idle_s = pipeline.config.serving.sleep_idle_s
        if roster is None and idle_s:
            raise UsageError(f"--sleep-idle-seconds: {FIXED}")
        self._pipeline, self._roster, self._observer = pipeline, roster, observer
        self.sleep = Sleep(
            pipeline.conductor,
            idle_s,
            time.monotonic_ns(),
            is_moving=lambda: pipeline.moves.is_open,
            is_closing=lambda: pipeline.epochs.connection is not None,
            missing=self._missing,
            progress=self._progress,
            takeover_s=pipeline.config.serving.takeover_s,
        )
        self._n_slept = 0  # sleeps that the observer knows of
        self._service: JoinService | None = None
        self.helpers: list[Rests] = []
        """What else holds much memory and can do without it meanwhile."""
        self._changed = asyncio.Event()  # set, and replaced, at each change of the state
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, service: JoinService) -> None:
        """Get to know what stages join at, after the mover did: changes of layers come first."""
        pipeline = self._pipeline
        epochs, ended, stands = pipeline.epochs, pipeline.epochs.on_ended, pipeline.epochs.on_stands
        self._service, service.resting.listener = service, self

        def on_ended() -> None:
            ended()
            self._carry(self.sleep.ended(time.monotonic_ns()))

        def on_stands() -> None:
            stands()
            if self.sleep.stands(time.monotonic_ns()):
                self._woke()

        epochs.on_ended, epochs.on_stands, epochs.rested = on_ended, on_stands, self._rested
        pipeline.on_opened = lambda: self._carry(self.sleep.came(time.monotonic_ns()))
        pipeline.describe_sleep, pipeline.check_awake = self.sleep.describe, self.sleep.check
        start_among(self._tasks, self._look())

    def _missing(self) -> list[str]:
        """Return the names of the stages that hold layers and are not here."""
        if self._roster is None:
            return []
        places = [self._roster.places[at] for at in self._roster.holders]
        return [place.name for place in places if place.member is None]

    def _progress(self) -> object:
        """Return how far each stage is that holds layers."""
        places = [self._roster.places[at] for at in self._roster.holders] if self._roster is not None else []
        return [(place.state, place.done_bytes) for place in places]

    # --- what people ask ----------------------------------------------------------------------------------------------

    async def ask(self) -> dict[str, object]:
        """Sleep as soon as no request runs, and return the state: at once while some do, else when it sleeps.

        Then the stages have freed their memory, or some of them took longer than FREE_S.

        Raises InvalidRequestError where the stages do not sleep, NotReadyError before they have all been there.
        """
        self._check_able()
        pipeline = self._pipeline
        if self.sleep.state is SleepState.AWAKE and not (pipeline.is_ready() or pipeline.phase.is_paused):
            raise NotReadyError(f"the pipeline is {pipeline.phase}; it can sleep once it is ready")
        self._carry(self.sleep.ask(time.monotonic_ns()))
        while self.sleep.state is SleepState.FALLING:
            await self._changed.wait()
        if self._service is not None and self.sleep.is_asleep:
            await set_within(self._service.resting.done, FREE_S)
        return self.describe()

    async def wake(self) -> dict[str, object]:
        """Wake, and return the state once requests can start.

        Raises NotReadyError where that fails, and where it is to wait for a stage that is not here.
        """
        self._check_able()
        self._carry(self.sleep.wake(time.monotonic_ns()))
        while self.sleep.state in (SleepState.FALLING, SleepState.WAKING):
            await self._changed.wait()
        if self.sleep.state is SleepState.ASLEEP:
            raise NotReadyError(f"the pipeline cannot wake: {self.sleep.problem}")
        await self._connected()
        return self.describe()

    async def _connected(self) -> None:
        """Return once requests can start: if no stage is missing, they can in a moment. Raises NotReadyError."""
        pipeline = self._pipeline
        if not self._missing():
            await set_within(pipeline.epochs.ready, CONNECT_S)
        if not pipeline.is_ready():
            missing = ", ".join(self._roster.missing()) if self._roster is not None else ""
            raise NotReadyError(f"the pipeline is {pipeline.phase}" + (f"; it waits for {missing}" if missing else ""))

    def describe(self) -> dict[str, object]:
        """Return the state, JSON-ready; `requests`: how many run or wait."""
        n_requests = len(self._pipeline.conductor.readers)
        described = self.sleep.describe(time.monotonic_ns())
        return {"is_sleeping": self.sleep.is_asleep, "requests": n_requests, **described}

    def _check_able(self) -> None:
        if self._service is None:
            raise InvalidRequestError(FIXED)

    # --- events -------------------------------------------------------------------------------------------------------

    def failed(self, name: str, why: str) -> None:
        """A stage cannot load again."""
        self._carry(self.sleep.failed(f"{name}: {why}", time.monotonic_ns()))

    def left(self, name: str) -> None:
        """A stage that holds layers has left."""
        self.sleep.left(name, time.monotonic_ns())
        self._note_change()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            self._carry(self.sleep.look(time.monotonic_ns()))

    async def _rested(self) -> None:
        """Return once all stages hold their layers again, or are waited for like lost ones."""
        while self.sleep.state in (SleepState.ASLEEP, SleepState.WAKING):
            changed = asyncio.create_task(self._changed.wait())
            present = asyncio.create_task(self._present())
            try:
                await first_of(changed, present)
            finally:
                await end_task(changed)
                await end_task(present)
            if not present.cancelled():
                return

    async def _present(self) -> None:
        """Wait for all stages, while they load."""
        if self.sleep.state is not SleepState.WAKING or self._roster is None:
            await asyncio.Event().wait()
        else:
            await self._roster.present()

    def _woke(self) -> None:
        took_s = self.sleep.woke_ns / 1e9
        self._observer.woke(took_s, time.monotonic_ns())
        fields = {"took_s": f"{took_s:.3f}"}
        log.info("pipeline woke", extra={"fields": fields})
        self._note_change()

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry(self, instructions: Iterable[SleepInstruction]) -> None:
        epochs = self._pipeline.epochs
        if self.sleep.n_sleeps != self._n_slept:
            self._n_slept = self.sleep.n_sleeps
            self._observer.slept()
        for instruction in instructions:
            match instruction:
                case EndEpoch():
                    log.info("pipeline goes to sleep%s", ", as it was told to" if self.sleep.is_asked else "")
                    epochs.is_planned = True
                    epochs.lose(NotReadyError("the pipeline goes to sleep"))
                case TellStages(is_asleep):
                    self._tell(is_asleep=is_asleep)
                case GiveUpMove(why):
                    self._give_up_move(why)
                case Refuse(error):
                    log.warning("the pipeline cannot wake, and sleeps again: %s", self.sleep.problem)
                    self._pipeline.carry(self._pipeline.conductor.fail_all(error, time.monotonic_ns()))
                case Connect():
                    pass  # the next epoch is being begun
            self._note_change()

    def _give_up_move(self, why: str) -> None:
        move = self._pipeline.moves.latest
        if move is not None and self._service is not None and self._service.changes is not None:
            self._service.changes.failed(move.number, f"the pipeline sleeps again: {why}")

    def _tell(self, *, is_asleep: bool) -> None:
        assert self._service is not None
        if is_asleep:
            self._pipeline.epochs.give_up()
        else:
            log.info("pipeline wakes: its stages load their layers")
        start_among(
            self._tasks, self._service.resting.tell(is_asleep=is_asleep, route_id=self._pipeline.epochs.route_id)
        )
        for rests in self.helpers:
            start_among(self._tasks, _rest(rests, is_asleep=is_asleep))

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop looking."""
        await cancel_all(self._tasks)


async def _rest(rests: Rests, *, is_asleep: bool) -> None:
    try:
        await rests(is_asleep)
    except Exception:  # a bug of ours: the pipeline sleeps and wakes all the same
        log.exception("a helper of the coordinator neither sleeps nor wakes")
