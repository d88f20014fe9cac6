"""Moves layers while the pipeline serves: feeds `coordinator.engine.moves` and carries out its instructions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from relayline.coordinator.engine.moves import Cut, Drop, MoveInstruction, MoveState, Prepare, Settle, Switch
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.joining.service import JoinService, Split
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.same_slice import same_slices
from relayline.coordinator.planner.imbalance import Imbalance
from relayline.coordinator.planner.rebalance import Rebalancer
from relayline.wire.common import bounds
from relayline.wire.common.errors import ArtifactError, InvalidRequestError, NotReadyError, RelaylineError, UsageError
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.coordinator")

CutModel = Callable[[tuple[int, ...]], Awaitable[Path]]
"""Splits the model that is served at these layers, and returns where. Raises RelaylineError."""


def rebalancer_of(serving: ServingSettings, *, can_move: bool) -> Rebalancer | None:
    """Return what decides that layers move by themselves, if they are to. Raises UsageError where they cannot."""
    if serving.rebalance != "auto":
        return None
    if not can_move:
        raise UsageError(
            "--rebalance auto moves layers between stages that have joined, of a model that is known here; use `up`, "
            "or `serve --join-listen` with --model FILE"
        )
    return Rebalancer(round(serving.rebalance_every_s * 1e9))


class LayerMover:
    """The planned changes of one pipeline. Event loop only."""

    def __init__(
        self,
        pipeline: Pipeline,
        cut_model: CutModel | None,
        *,
        rebalancer: Rebalancer | None = None,
        on_moved: Callable[[tuple[int, ...]], None] = lambda cuts: None,
    ) -> None:
        """Without `cut_model` no change can be begun: this process does not know the model that was split.

        With a `rebalancer` layers move by themselves too. `on_moved` gets the cuts of each switch, off the event loop.
        """
        self._pipeline, self._moves, self._cut_model = pipeline, pipeline.moves, cut_model
        self._rebalancer, self._on_moved = rebalancer, on_moved
        self._is_own = False  # whether the latest change was asked for by nobody
        self._before: tuple[int, ...] = ()  # the cuts that it began with
        self._service: JoinService | None = None
        self._next: Split | None = None
        self._switching = 0  # the change that is due when the epoch has ended
        self._tasks: set[asyncio.Task[None]] = set()
        pipeline.on_settling = self._look
        pipeline.epochs.on_ended, pipeline.epochs.on_stands = self._on_ended, self._on_stands
        if rebalancer is not None:
            balance = pipeline.epochs.balance
            balance.on_reported, balance.moves_in_s = self._rebalance, self._moves_in_s

    def attach(self, service: JoinService) -> None:
        """Get to know what stages join at."""
        self._service, service.changes = service, self

    def describe(self) -> dict[str, object]:
        """Return the layers of each stage and how far the latest change is, JSON-ready."""
        now_ns = time.monotonic_ns()
        own = self._rebalancer.describe(self._moves.cuts, now_ns) if self._rebalancer is not None else None
        return {**self._moves.describe(now_ns), "rebalance": own}

    def move(self, cuts: tuple[int, ...]) -> None:
        """Begin to give the stages other layers: from `cuts`, the first layer of each but the first.

        `describe` shows the progress. Raises InvalidRequestError for a change that this pipeline can never make,
        NotReadyError for one that it cannot make now.
        """
        if self._service is None:
            raise InvalidRequestError(
                "stages at given addresses keep their layers; let them join the coordinator (`serve --join-listen`, or "
                "`up` with a manifest)"
            )
        if self._cut_model is None:
            raise InvalidRequestError("this coordinator does not know the unsplit model; give it with --model")
        instructions = self._moves.begin(cuts, time.monotonic_ns())
        self._before, self._is_own = self._pipeline.file.cuts, False
        if missing := self._service.unmovable():
            why = f"{', '.join(missing)}: not here, or of a version whose layers do not move while it serves"
            self._moves.failed(self._number, why, time.monotonic_ns())
            raise NotReadyError(why)
        log.info("moving layers", extra={"fields": {"from": _text(self._pipeline.file.cuts), "to": _text(cuts)}})
        self._carry(instructions)

    def _rebalance(self, found: Imbalance) -> None:
        """Another cut would be clearly faster: move to it, if it is time."""
        assert self._rebalancer is not None
        if self._service is None or self._moves.is_open or not self._pipeline.is_ready() or self._service.unmovable():
            return
        now_ns, cuts = time.monotonic_ns(), self._moves.cuts
        wanted = self._rebalancer.wanted(found, cuts, now_ns)
        if not wanted:
            return
        log.info("layers move by themselves for about %.0f %% more tokens", 100 * found.gain)
        try:
            self.move(wanted)
        except RelaylineError as error:
            self._rebalancer.failed(wanted, now_ns)
            log.warning("layers were not moved, and nothing has changed: %s", error.message)
        else:
            self._is_own = True

    def _moves_in_s(self, now_ns: int) -> float | None:
        assert self._rebalancer is not None
        return self._rebalancer.wait_ns(self._moves.cuts, now_ns) / 1e9

    @property
    def _number(self) -> int:
        return self._moves.latest.number if self._moves.latest is not None else 0

    async def close(self) -> None:
        """Stop any change in progress."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- events -------------------------------------------------------------------------------------------------------

    def prepared(self, number: int, index: int) -> None:
        """A stage is ready to switch."""
        self._carry(self._moves.prepared(number, index, time.monotonic_ns()))

    def failed(self, number: int, why: str) -> None:
        """Something of the change cannot be done."""
        instructions = self._moves.failed(number, why, time.monotonic_ns())
        self._log_failure(number)
        self._carry(instructions)

    def left(self, index: int) -> None:
        """A stage left or restarted."""
        was_open = self._moves.is_open
        instructions = self._moves.left(index, time.monotonic_ns())
        if was_open:
            self._log_failure(self._number)
        self._carry(instructions)

    def _log_failure(self, number: int) -> None:
        move = self._moves.latest
        if move is not None and move.number == number and move.state is MoveState.FAILED:
            log.warning("layers were not moved, and nothing has changed: %s", move.problem)
            if self._rebalancer is not None:
                self._rebalancer.failed(move.cuts, time.monotonic_ns())

    def _look(self) -> None:
        self._carry(self._moves.look(time.monotonic_ns()))

    def _on_ended(self) -> None:
        """Everything of the epoch is closed: if the new layers are due, they hold from here on."""
        self._carry(self._moves.lost(time.monotonic_ns()))
        if not self._switching or self._service is None or self._next is None:
            return
        number, self._switching = self._switching, 0
        self._pipeline.epochs.file, self._next = self._next.file, None
        self._pipeline.conductor.availability.changes_engines()
        self._service.switch()
        self._spawn(asyncio.to_thread(self._on_moved, self._pipeline.file.cuts))
        self._spawn(self._service.tell_switch(number))

    def _on_stands(self) -> None:
        if self._switching or not self._moves.connected(time.monotonic_ns()):
            return
        move = self._moves.latest
        assert move is not None
        if self._rebalancer is not None:
            self._rebalancer.moved(self._before, move.cuts, time.monotonic_ns(), is_own=self._is_own)
        fields = {"cuts": _text(move.cuts), "paused_s": f"{move.paused_ns / 1e9:.3f}"}
        log.info("layers moved", extra={"fields": fields})

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry(self, instructions: Iterable[MoveInstruction]) -> None:
        service = self._service
        if service is None:
            return
        for instruction in instructions:
            match instruction:
                case Cut(number, cuts):
                    self._spawn(self._cut(number, cuts))
                case Prepare(number):
                    move = self._moves.latest
                    assert move is not None
                    assert self._next is not None
                    self._spawn(service.prepare(number, self._next, move.keeps))
                    self._spawn(self._tick(number))
                case Drop(number):
                    self._next = None
                    self._spawn(service.drop(number))
                case Settle(after_s):
                    asyncio.get_running_loop().call_later(after_s, self._look)
                case Switch(number):
                    self._switching = number
                    self._end_epoch()

    def _end_epoch(self) -> None:
        epochs = self._pipeline.epochs
        if epochs.connection is None:  # none stands: between two of them
            if not self._pipeline.ready.is_set():
                self._on_ended()
        elif not epochs.lost.done():
            epochs.is_planned = True
            epochs.lose(NotReadyError("layers move"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cut(self, number: int, cuts: tuple[int, ...]) -> None:
        """Split the model again, in a separate process, and find the stages that keep their slice."""
        try:
            assert self._cut_model is not None
            directory = await self._cut_model(cuts)
            self._next, keeps = await asyncio.to_thread(self._new_split, directory, cuts)
        except RelaylineError as error:
            self.failed(number, error.message)
        except Exception as error:  # a bug of ours; nobody may wait for ever
            log.exception("splitting the model again failed")
            self.failed(number, f"the model could not be split: {error}")
        else:
            self._carry(self._moves.cut(number, keeps, time.monotonic_ns()))

    def _new_split(self, directory: Path, cuts: tuple[int, ...]) -> tuple[Split, tuple[bool, ...]]:
        assert self._service is not None
        held, file = self._service.split, load_pipeline(directory)
        if file.cuts != cuts or file.source.sha256 != held.file.source.sha256:
            raise ArtifactError(f"{directory} is not a split of the model that is served; give that one with --model")
        return Split.at(directory, file), same_slices((held.directory, held.file), (directory, file))

    async def _tick(self, number: int) -> None:
        """Look at the clock for as long as stages prepare."""
        while self._number == number and self._moves.latest and self._moves.latest.state is MoveState.PREPARING:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            instructions = self._moves.tick(time.monotonic_ns())
            if instructions:
                self._log_failure(number)
            self._carry(instructions)


def _text(cuts: Iterable[int]) -> str:
    return ",".join(map(str, cuts)) or "none"
