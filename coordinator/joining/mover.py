"""Moves layers while the pipeline serves: feeds `coordinator.engine.moves` and carries out its instructions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from relayline.coordinator.engine.moves import (
    Cut,
    Drop,
    Fetch,
    MoveInstruction,
    MoveState,
    Prepare,
    Settle,
    Switch,
)
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.joining.config import PoolState
from relayline.coordinator.joining.hand_over import hand_over_ns
from relayline.coordinator.joining.hosts import Hosts
from relayline.coordinator.joining.hosts import ReadShape as ReadShape
from relayline.coordinator.joining.own_moves import OwnMoves
from relayline.coordinator.joining.service import JoinService, Split
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.same_slice import same_slices
from relayline.coordinator.planner.rebalance import Rebalancer
from relayline.wire.common import bounds
from relayline.wire.common.errors import ArtifactError, InvalidRequestError, NotReadyError, RelaylineError, UsageError
from relayline.wire.common.tasks import cancel_all, start_among
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.coordinator")

CutModel = Callable[[tuple[int, ...]], Awaitable[Path]]
"""Splits the model that is served at these layers, and returns where. Raises RelaylineError."""
ExplainMove = Callable[[PoolState], dict[str, Any] | None]
"""Returns why those that hold layers now have theirs; None where that is not known."""


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
        read_shape: ReadShape | None = None,
        takeover_s: float = 0.0,
        known: PoolState | None = None,
        on_moved: Callable[[PoolState], None] = lambda state: None,
        explain_move: ExplainMove = lambda state: None,
    ) -> None:
        """Without `cut_model` no change can be begun: this process does not know the model that was split.

        With a `rebalancer` layers move by themselves too. With `read_shape` others take over from stages that are
        drained, or lost for longer than `takeover_s` (0: never); `known` is who held layers before this process.
        `on_moved` gets the holders and their layers after each change, and `explain_move` returns why, both off the
        event loop.
        """
        self._pipeline, self.moves, self._cut_model = pipeline, pipeline.moves, cut_model
        self._on_moved, self._explain_move = on_moved, explain_move
        self._read_shape, self._takeover_s, self._known = read_shape, takeover_s, known
        self._hosts: Hosts | None = None
        self._keeping = asyncio.Lock()  # the last one kept counts
        self._before: tuple[int, ...] = ()  # the cuts that it began with
        self._service: JoinService | None = None
        self._next: Split | None = None
        self._switching = 0  # the change that is due when the epoch has ended
        self._tasks: set[asyncio.Task[None]] = set()
        pipeline.on_settling = self._look
        pipeline.epochs.on_ended, pipeline.epochs.on_stands = self._on_ended, self._on_stands
        self._own: OwnMoves | None = None
        if rebalancer is not None:
            own = self._own = OwnMoves(rebalancer, pipeline.moves, self._may_move, self.move)
            pipeline.epochs.balance.on_reported, pipeline.epochs.balance.moves_in_s = own.found, own.moves_in_s

    def attach(self, service: JoinService) -> None:
        """Get to know what stages join at."""
        self._service, service.changes = service, self
        if self._read_shape is None or self._cut_model is None:
            return
        drained, added = (self._known.drained, self._known.added) if self._known is not None else ((), ())
        self._hosts = Hosts(
            self._pipeline,
            self,
            service,
            self._read_shape,
            takeover_s=self._takeover_s,
            drained=drained,
            on_changed=lambda state: self._spawn(self._keep(state)),
        )
        self._hosts.was_added(added)
        self._pipeline.describe_hosts = self._hosts.describe
        self._spawn(self._hosts.run())

    def describe(self) -> dict[str, object]:
        """Return the layers of each stage and how far the latest change is, JSON-ready."""
        now_ns = time.monotonic_ns()
        own = self._own.describe(now_ns) if self._own is not None else None
        hosts = self._hosts.describe(now_ns) if self._hosts is not None else {}
        return {**self.moves.describe(now_ns), "rebalance": own, "hosts": hosts}

    async def drain(self, name: str, *, is_drained: bool) -> None:
        """Free a stage of its layers, or offer it layers again; see `Hosts.drain`."""
        await self._known_hosts.drain(name, is_drained=is_drained)

    def add(self, name: str, *, is_spare: bool) -> None:
        """Make a place for one more stage; see `Hosts.add`."""
        self._known_hosts.add(name, is_spare=is_spare)

    @property
    def _known_hosts(self) -> Hosts:
        if self._hosts is None:
            raise InvalidRequestError(
                "stages come and go where they have joined a coordinator that knows the model: `up` with a manifest, "
                "or `serve --join-listen` with --model FILE"
            )
        return self._hosts

    async def _keep(self, state: PoolState) -> None:
        async with self._keeping:
            await asyncio.to_thread(self._on_moved, state)
            self._pipeline.planned = await asyncio.to_thread(self._explain_move, state)

    def move(self, cuts: tuple[int, ...], holders: tuple[int, ...] = ()) -> None:
        """Begin to give the stages other layers: from `cuts`, the first layer of each but the first.

        `holders`: the places that are to hold them, in layer order; by default those that do. `describe` shows the
        progress. Raises InvalidRequestError for a change that this pipeline can never make, NotReadyError for one that
        it cannot make now.
        """
        if self._service is None:
            raise InvalidRequestError(
                "stages at given addresses keep their layers; let them join the coordinator (`serve --join-listen`, or "
                "`up` with a manifest)"
            )
        if self._cut_model is None:
            raise InvalidRequestError("this coordinator does not know the unsplit model; give it with --model")
        switching = self.moves.latest if self.moves.is_switching else None
        instructions = self.moves.begin(cuts, time.monotonic_ns(), holders)
        if switching is not None:  # its layers hold already, but a stage did not come back
            log.warning("layers moved to %s, but %s; others take them over", _text(switching.cuts), switching.problem)
            if self._own is not None:
                self._own.failed(switching.cuts)
        self._before = self._pipeline.file.cuts
        if self._own is not None:
            self._own.begun()
        if missing := self._service.unmovable(holders or self.moves.holders):
            why = f"{', '.join(missing)}: not here, or of a version whose layers do not move while it serves"
            self.moves.failed(self._number, why, time.monotonic_ns())
            raise NotReadyError(why)
        log.info("moving layers", extra={"fields": {"from": _text(self._pipeline.file.cuts), "to": _text(cuts)}})
        self._carry(instructions)

    def _may_move(self) -> bool:
        service = self._service
        return service is not None and self._pipeline.is_ready() and not service.unmovable()

    @property
    def _number(self) -> int:
        return self.moves.latest.number if self.moves.latest is not None else 0

    async def close(self) -> None:
        """Stop any change in progress."""
        await cancel_all(self._tasks)

    # --- events -------------------------------------------------------------------------------------------------------

    def prepared(self, number: int, index: int) -> None:
        """A stage is ready to switch."""
        self._carry(self.moves.prepared(number, index, time.monotonic_ns()))

    def fetching(self, number: int, index: int, fetch: Fetch) -> None:
        """A stage is that far with its new layers."""
        self.moves.fetching(number, index, fetch)

    def failed(self, number: int, why: str) -> None:
        """Something of the change cannot be done."""
        instructions = self.moves.failed(number, why, time.monotonic_ns())
        self._log_failure(number)
        self._carry(instructions)

    def left(self, index: int) -> None:
        """A stage left or restarted."""
        if self._hosts is not None:
            self._hosts.left(index)
        was_open = self.moves.is_open
        instructions = self.moves.left(index, time.monotonic_ns())
        if was_open:
            self._log_failure(self._number)
        self._carry(instructions)

    def came(self, index: int) -> None:
        """A stage has joined and has its order."""
        if self._hosts is not None:
            self._hosts.came(index)

    def _log_failure(self, number: int) -> None:
        move = self.moves.latest
        if move is not None and move.number == number and move.state is MoveState.FAILED:
            log.warning("layers were not moved, and nothing has changed: %s", move.problem)
            if self._own is not None:
                self._own.failed(move.cuts)
            if self._hosts is not None:
                self._hosts.failed(move)

    def _look(self) -> None:
        self._carry(self.moves.look(time.monotonic_ns()))

    def _on_ended(self) -> None:
        """Everything of the epoch is closed: if the new layers are due, they hold from here on."""
        self._carry(self.moves.lost(time.monotonic_ns()))
        if not self._switching or self._service is None or self._next is None:
            return
        number, self._switching = self._switching, 0
        epochs = self._pipeline.epochs
        epochs.file, self._next = self._next.file, None
        places = self._service.switch()
        names = tuple(self._service.place(at).name for at in self.moves.holders)
        epochs.stage_names = names
        self._pipeline.conductor.availability.changes_engines(names)
        if self._hosts is not None:
            self._hosts.moved()
        else:
            self._spawn(self._keep(PoolState(epochs.file.cuts, names)))
        self._spawn(self._service.tell_switch(number, places, hand_over_ns(self._pipeline.conductor)))

    def _on_stands(self) -> None:
        if self._switching or not self.moves.connected(time.monotonic_ns()):
            return
        move = self.moves.latest
        assert move is not None
        if self._own is not None:
            self._own.moved(self._before, move.cuts)
        names = ",".join(self.moves.describe(0)["stages"])  # type: ignore[arg-type]
        fields = {"cuts": _text(move.cuts), "stages": names, "paused_s": f"{move.paused_ns / 1e9:.3f}"}
        log.info("layers moved", extra={"fields": fields})

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry(self, instructions: Iterable[MoveInstruction]) -> None:
        service = self._service
        if service is None:
            return
        for instruction in instructions:
            match instruction:
                case Cut(number, cuts):
                    assert self.moves.latest is not None
                    self._spawn(self._cut(number, cuts, self.moves.latest.holders))
                case Prepare(number):
                    move = self.moves.latest
                    assert move is not None
                    assert self._next is not None
                    self._spawn(service.prepare(number, self._next, move.keeps, move.holders))
                    self._spawn(self._tick(number))
                case Drop(number):
                    self._next = None
                    self._spawn(service.drop(number))
                    self._pipeline.dispatch()  # rows that were held back for the switch leave after all
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
        start_among(self._tasks, work)

    async def _cut(self, number: int, cuts: tuple[int, ...], holders: tuple[int, ...]) -> None:
        """Split the model again, in a separate process, and find the stages that keep their slice.

        That takes long. The change may have been given up by the time it is done, and another one begun.
        """
        try:
            assert self._cut_model is not None
            assert self._service is not None
            is_cut = cuts == self._pipeline.file.cuts  # others are to hold the same slices
            directory = self._service.split.directory if is_cut else await self._cut_model(cuts)
            had = self._service.roster.holders
            before = [had.index(at) if at in had else None for at in holders]
            made, keeps = await asyncio.to_thread(_next_split, self._service.split, directory, cuts, before)
        except RelaylineError as error:
            self.failed(number, error.message)
        except Exception as error:  # a bug of ours; no request may wait for ever
            log.exception("splitting the model again failed")
            self.failed(number, f"the model could not be split: {error}")
        else:
            if instructions := self.moves.cut(number, keeps, time.monotonic_ns()):
                self._next = made
            self._carry(instructions)

    async def _tick(self, number: int) -> None:
        """Look at the clock for as long as stages prepare."""
        while self._number == number and self.moves.latest and self.moves.latest.state is MoveState.PREPARING:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            instructions = self.moves.tick(time.monotonic_ns())
            if instructions:
                self._log_failure(number)
            self._carry(instructions)


def _text(cuts: Iterable[int]) -> str:
    return ",".join(map(str, cuts)) or "none"


def _next_split(
    held: Split, directory: Path, cuts: tuple[int, ...], before: Sequence[int | None]
) -> tuple[Split, tuple[bool, ...]]:
    """Read the split that was made, and find the stages that keep their slice. Reads files; blocks.

    before: for each stage of the new split, which stage of the present one the same place holds. Raises ArtifactError.
    """
    file = load_pipeline(directory)
    if file.cuts != cuts or file.source.sha256 != held.file.source.sha256:
        raise ArtifactError(f"{directory} is not a split of the model that is served; give that one with --model")
    return Split.at(directory, file), same_slices((held.directory, held.file), (directory, file), before)
