"""Stages that come, go, are drained or lost for long: takes events to `coordinator.engine.pool`, and moves layers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from relayline.coordinator.engine.moves import Move, Moves
from relayline.coordinator.engine.pipeline import Pipeline
from relayline.coordinator.engine.pool import Pool
from relayline.coordinator.joining.config import JoiningStage, PoolState
from relayline.coordinator.joining.service import JoinService
from relayline.coordinator.planner.instance import Load, ModelShape
from relayline.coordinator.planner.memory import HEADROOM, stage_memory
from relayline.coordinator.planner.running_plan import ROWS_COMPARED
from relayline.coordinator.planner.share_out import Holder, share_out
from relayline.wire.common import bounds
from relayline.wire.common.errors import InvalidRequestError, NotReadyError, RelaylineError, UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.common.texts import named_stage
from relayline.wire.settings.table import PREFIX_MEMORY_AUTO, EngineSettings

log = logging.getLogger("relayline.coordinator")

ReadShape = Callable[[], ModelShape]
"""Returns the sizes of the model that is served. Blocks; raises RelaylineError."""


class Layers(Protocol):
    """The one that moves layers."""

    @property
    def moves(self) -> Moves:
        """The changes of the pipeline."""

    def move(self, cuts: tuple[int, ...], holders: tuple[int, ...] = ()) -> None:
        """Begin a change. Raises InvalidRequestError, NotReadyError."""


class Hosts:
    """The places of one pipeline, and who of them is to hold layers. Event loop only."""

    def __init__(
        self,
        pipeline: Pipeline,
        layers: Layers,
        service: JoinService,
        read_shape: ReadShape,
        *,
        takeover_s: float,
        drained: Sequence[str] = (),
        on_changed: Callable[[PoolState], None] = lambda state: None,
    ) -> None:
        """`on_changed` gets the holders of layers and the drained places whenever they have changed.

        It must not block.
        """
        self._pipeline, self._layers, self._service = pipeline, layers, service
        self._read_shape, self._on_changed = read_shape, on_changed
        self._shape: ModelShape | None = None  # read when it is needed first
        roster = self._roster = service.roster
        names = roster.names()
        spares = [at for at in range(len(names)) if service.place(at).is_spare]
        drained_at = [names.index(name) for name in drained if name in names]
        self._pool = Pool(names, spares, round(takeover_s * 1e9), drained=drained_at)
        roster.idle_state = lambda place: HostState.DRAINED if self._pool.is_drained(place.index) else HostState.SPARE
        self._added: list[str] = []
        self._is_planning = False
        self._logged_trouble = ""  # the latest line about an impossible change

    def was_added(self, names: Sequence[str]) -> None:
        """These came while an earlier coordinator served."""
        self._added += names

    # --- events -------------------------------------------------------------------------------------------------------

    def came(self, index: int) -> None:
        """A stage is at its place and has its order."""
        self._pool.came(index, time.monotonic_ns())

    def left(self, index: int) -> None:
        """It has gone, or comes again."""
        now_ns = time.monotonic_ns()
        self._pool.left(index, now_ns)
        due_ns = self._takeover_in_ns(index, now_ns)
        if due_ns is not None and not self._roster.is_closing:
            fields = {"stage": self._roster.names()[index], "in_s": f"{due_ns / 1e9:.0f}"}
            log.info("other stages take over its layers unless it comes back", extra={"fields": fields})

    def failed(self, move: Move) -> None:
        """A change has failed: a place that it should have drained still holds its layers, and is not drained."""
        self._pool.failed(time.monotonic_ns())
        for index in set(self._layers.moves.holders) - set(move.holders):
            if self._pool.is_drained(index):
                self._pool.drain(index, is_drained=False)
                log.warning("%s is not drained: %s", self._roster.names()[index], move.problem)
                self.keep()

    def moved(self) -> None:
        """Layers have moved."""
        self._pool.moved()
        self._logged_trouble = ""
        self.keep()

    def keep(self) -> None:
        """Report the present holders of layers."""
        names, moves = self._roster.names(), self._layers.moves
        drained = tuple(name for at, name in enumerate(names) if self._pool.is_drained(at))
        spares = tuple(name for name in self._added if self._pool.is_spare(names.index(name)))
        holders = tuple(names[at] for at in moves.holders)
        self._on_changed(PoolState(moves.cuts, holders, drained, tuple(self._added), spares))

    async def run(self) -> None:
        """Check again and again whether other stages should hold layers."""
        while True:
            await asyncio.sleep(bounds.BEAT_EVERY_S)
            try:
                await self.look()
            except Exception:  # a bug of ours: the pipeline keeps serving, and the next look may succeed
                log.exception("choosing the stages that hold layers failed; trying again")
                self._pool.failed(time.monotonic_ns())

    async def look(self) -> None:
        """Look once, and begin the change that is due."""
        moves, phase, now_ns = self._layers.moves, self._pipeline.phase, time.monotonic_ns()
        freed = self._pool.freed(moves.holders, now_ns)
        is_busy = self._is_planning or (moves.is_open and not (moves.is_switching and freed))
        if is_busy or not (phase is Phase.READY or (phase.is_paused and freed)):
            return
        holders = self._pool.wanted(moves.holders, self._pipeline.file.n_layers, now_ns)
        if not holders:
            return
        names = self._roster.names()
        gone, new = set(moves.holders) - set(holders), set(holders) - set(moves.holders)
        try:
            # Without a command, no stage gets more layers than are known to fit.
            await self._change(holders, must_be_known=bool(gone))
        except RelaylineError as error:
            self._pool.failed(time.monotonic_ns())
            if error.message != self._logged_trouble:
                log.warning("layers were not moved: %s", error.message)
            self._logged_trouble = error.message
        else:
            fields = {"from": _named(names, gone), "to": _named(names, new)}
            log.info("layers change hands", extra={"fields": fields})

    # --- what people ask ----------------------------------------------------------------------------------------------

    async def drain(self, name: str, *, is_drained: bool) -> None:
        """Free a stage of its layers, which others take; or offer it layers again.

        Returns once that has begun. Raises InvalidRequestError for a name that is none, NotReadyError where others
        have no room, or not now.
        """
        index = self._index(name)
        if self._pool.is_drained(index) is is_drained:
            return
        moves = self._layers.moves
        if moves.is_open or self._is_planning:
            raise NotReadyError("layers are already being moved; wait until that ends")
        self._pool.drain(index, is_drained=is_drained)
        try:
            if is_drained and index in moves.holders:
                await self._free(name)
        except RelaylineError:
            self._pool.drain(index, is_drained=False)
            raise
        place = self._roster.places[index]
        if index not in moves.holders:
            self._roster.stands_by(place)
        log.info("stage is drained" if is_drained else "stage may hold layers again", extra={"fields": {"stage": name}})
        self.keep()

    async def _free(self, name: str) -> None:
        moves, now_ns = self._layers.moves, time.monotonic_ns()
        holders = self._pool.wanted(moves.holders, self._pipeline.file.n_layers, now_ns)
        if not holders:
            others = [at for at in moves.holders if not self._pool.is_drained(at)]
            away = [self._roster.names()[at] for at in others if not self._pool.is_here(at)]
            if away:
                raise NotReadyError(f"{', '.join(away)} is not here to take layers; wait for it, or drain it too")
            raise NotReadyError(f"{name} is the only stage that can hold layers; let another stage join first")
        await self._change(holders)

    def add(self, stage: str, *, is_spare: bool) -> None:
        """Make a place for a stage that was not named at the start. Raises InvalidRequestError."""
        if stage in self._roster.names():
            raise InvalidRequestError(f"there already is {named_stage(stage)}")
        like = self._service.place(self._layers.moves.holders[0])
        try:
            self._service.add(JoiningStage(stage, like.engine, like.telemetry, is_spare=is_spare))
        except UsageError as error:
            raise InvalidRequestError(error.message) from error
        self._layers.moves.add(stage)
        self._pool.add(stage, is_spare=is_spare)
        self._added.append(stage)
        log.info("a stage may join", extra={"fields": {"stage": stage}})
        self.keep()

    def _index(self, name: str) -> int:
        names = self._roster.names()
        if name not in names:
            raise InvalidRequestError(f"there is no stage {name}; the stages are {', '.join(names)}")
        return names.index(name)

    def describe(self, now_ns: int) -> dict[str, dict[str, object]]:
        """Return of every place whether it is a spare, drained, and when its layers are given to others."""
        described: dict[str, dict[str, object]] = {}
        for at, name in enumerate(self._roster.names()):
            takeover_ns = self._takeover_in_ns(at, now_ns)
            described[name] = {
                "spare": self._pool.is_spare(at),
                "drained": self._pool.is_drained(at),
                "here": self._pool.is_here(at),
                "takeover_in_s": None if takeover_ns is None else round(takeover_ns / 1e9, 1),
            }
        return described

    def _takeover_in_ns(self, index: int, now_ns: int) -> int | None:
        """Return when a stage's layers are given to others; None for no time, as before all have been there once."""
        if index not in self._layers.moves.holders or self._pipeline.phase is Phase.LOADING:
            return None
        return self._pool.takeover_in_ns(index, now_ns)

    # --- who gets which layers ----------------------------------------------------------------------------------------

    async def _change(self, holders: tuple[int, ...], *, must_be_known: bool = False) -> None:
        """Begin the change to these holders. Raises NotReadyError, InvalidRequestError."""
        self._is_planning = True
        try:
            if self._shape is None:
                self._shape = await asyncio.to_thread(self._read_shape)
            cuts = await asyncio.to_thread(self._cuts, holders, await self._free_bytes(), must_be_known)
        finally:
            self._is_planning = False
        self._layers.move(cuts, holders)

    def _cuts(self, holders: tuple[int, ...], free: dict[int, int], must_be_known: bool) -> tuple[int, ...]:
        shape, moves = self._shape, self._layers.moves
        assert shape is not None
        load = _load(self._service.place(holders[0]).engine)

        def need(start: int, end: int) -> int:
            return stage_memory(shape, load, start, end).total_bytes

        edges = (0, *moves.cuts, shape.n_layers)
        held = {at: (edges[place], edges[place + 1]) for place, at in enumerate(moves.holders)}
        layer_ns = self._layer_ns(held)
        wanted = [
            Holder(
                self._service.place(at).name,
                layer_ns.get(at, 0.0),
                self._room_bytes(at, free.get(at), need(*held[at]) if at in held else 0),
                held.get(at, (0, 0)),
            )
            for at in holders
        ]
        is_same = len(holders) == len(moves.holders)
        return share_out(
            wanted,
            shape.n_layers,
            need,
            shape.is_allowed,
            same=moves.cuts if is_same else None,
            must_be_known=must_be_known,
        )

    def _layer_ns(self, held: dict[int, tuple[int, int]]) -> dict[int, float]:
        """Return the measured time of a layer on each holder; none while stages switch: steps had other layers."""
        costs = self._pipeline.conductor.scheduler.planner.stages
        if len(costs) != len(held) or self._layers.moves.is_switching:
            return {}
        return {
            at: cost.decode_ns(min(ROWS_COMPARED, cost.rows_max)) / (end - start)
            for (at, (start, end)), cost in zip(held.items(), costs, strict=True)
            if cost.decode.is_known
        }

    async def _free_bytes(self) -> dict[int, int]:
        """Ask the stages that are connected how much memory their hosts have free."""
        stages = self._pipeline.stages
        holders = self._layers.moves.holders
        if len(stages) != len(holders):
            return {}
        asked = [stage.status(with_recent=False, with_memory=True) for stage in stages]
        statuses = await asyncio.gather(*asked)
        found = {}
        for at, status in zip(holders, statuses, strict=True):
            if status is not None and status.memory_free_bytes:
                # An automatic tier gives its memory back before another slice is loaded.
                is_elastic = self._service.place(at).engine.prefix_memory_bytes == PREFIX_MEMORY_AUTO
                found[at] = status.memory_free_bytes + (status.tier_memory_bytes if is_elastic else 0)
        return found

    def _room_bytes(self, index: int, free_bytes: int | None, held_bytes: int) -> int | None:
        """Return the room for a slice in addition to the one that a place holds; None if unknown."""
        place, member = self._service.place(index), self._roster.places[index].member
        if place.engine.gpu_layers:
            return None  # what counts is the memory of the device
        room = free_bytes
        if room is None and member is not None and member.memory_bytes:
            room = int(member.memory_bytes * (1 - HEADROOM)) - held_bytes
        if room is not None and member is not None:
            mates = [other.member for other in self._roster.places if other.member is not None]
            room //= max(1, sum(other.host == member.host for other in mates))
        if place.memory_bytes:
            room = min(place.memory_bytes, room) if room is not None else place.memory_bytes
        return room


def _load(engine: EngineSettings) -> Load:
    return Load(
        ctx_tokens=engine.ctx_tokens,
        n_lanes=engine.n_lanes,
        kv_type=engine.kv_type,
        kv_layout=engine.layout_used,
        max_rows=engine.max_rows,
    )


def _named(names: Sequence[str], places: set[int]) -> str:
    return ",".join(names[at] for at in sorted(places)) or "nobody"
