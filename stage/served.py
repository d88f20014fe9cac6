"""A stage on its port, and the engine behind it: one that serves, and while layers move the one that is to follow it.

Calls of gRPC find the engine that serves when they begin, and stay with it. So the next engine is loaded and waits, all
calls that begin after `Served.switch` are its own, and the one before ends with the calls that it still has.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import Metric

from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import Load
from relayline.stage.facts import StageFacts
from relayline.stage.hand_over import HandOver
from relayline.stage.loaded_engine import LoadedEngine, LoadStage, close_unused, load_engine
from relayline.stage.observe.metrics import StageCollector
from relayline.stage.observe.stats import StageStats
from relayline.stage.service import StageService
from relayline.stage.speed.curves import Curves
from relayline.stage.steps.policy import Policy
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.errors import ArtifactError, InternalError, NotReadyError, RelaylineError
from relayline.wire.common.memory import give_back
from relayline.wire.links import rpc
from relayline.wire.links.guard import Guard
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry import names
from relayline.wire.telemetry.telemetry import Telemetry


class Served:
    """The handle of a stage's port."""

    def __init__(
        self,
        load: LoadStage,
        make_policy: Callable[[StageConfig, Curves], Policy],
        stats: StageStats,
        crashed: asyncio.Future[None],
    ) -> None:
        self._load, self._make_policy, self._stats = load, make_policy, stats
        self.crashed = crashed
        """Fails if an engine crashes."""
        self.address = ""
        """host:port, once the port is open."""
        self._telemetry = Telemetry()
        self._guard: Guard
        self._serving: LoadedEngine
        self._next: LoadedEngine | None = None
        self._hand_over: HandOver | None = None  # of the latest change that was ordered
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def facts(self) -> StageFacts:
        """The description of the engine that serves."""
        return dataclasses.replace(self._serving.facts, metrics_address=self.metrics_address)

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics, whichever engine serves; empty for none."""
        return self._stats.metrics_address

    @metrics_address.setter
    def metrics_address(self, address: str) -> None:
        self._stats.metrics_address = address

    @property
    def service(self) -> StageService:
        """The engine for a call that begins now."""
        return self._serving.service

    def start(self, facts: StageFacts, executor: StepExecutor, telemetry: Telemetry) -> None:
        """Take the first engine."""
        self._telemetry = telemetry
        self._serving = self._made(facts, executor)

    def begin(self, guard: Guard) -> None:
        """Accept calls that `guard` allows."""
        self._guard = guard
        self._serving.begin(guard)

    def _made(self, facts: StageFacts, executor: StepExecutor) -> LoadedEngine:
        policy = self._make_policy(facts.config, facts.curves)
        return LoadedEngine(facts, executor, policy, self._stats, self._telemetry, self._crash)

    def _crash(self, error: BaseException) -> None:
        if not self.crashed.done():
            self.crashed.set_exception(error)

    def is_used_beside(self, route_id: int) -> bool:
        """Return whether a coordinator other than that of a route has an epoch here."""
        return any(known != route_id for known in self.service.epochs.routes)

    # --- another engine -----------------------------------------------------------------------------------------------

    async def prepare(self, config: StageConfig, load: Load) -> None:
        """Load another slice while the present one serves.

        Raises the errors of loading; then nothing has changed. Its speed is not measured, because that would slow the
        serving engine, and be wrong. It starts with the serving engine's speed per layer, and learns from its own
        steps.
        """
        await self.drop()
        self._serving.give_memory_back()  # its stored prefixes are of the old layers
        now = self._serving.facts
        n_layers = now.artifact.layer_end - now.artifact.layer_start
        facts, executor = await load_engine(self._load, config, load, now.curves)
        artifact = facts.artifact
        facts.curves.scale((artifact.layer_end - artifact.layer_start) / n_layers)
        if now.artifact.source_sha256 != artifact.source_sha256:
            await close_unused(facts, executor)
            raise ArtifactError(f"{config.artifact} belongs to another model than this stage serves")
        self._next = self._made(facts, executor)
        self._next.begin(self._guard)

    async def drop(self) -> None:
        """Drop the prepared slice."""
        unused, self._next = self._next, None
        if unused is not None:
            ending = self._ending(unused)
            del unused  # so that it can be freed at its end
            await asyncio.shield(ending)

    def switch(self, within_s: float = 0.0) -> None:
        """Serve the prepared slice; the old engine frees its memory as its calls end. Raises InternalError.

        If lanes are handed over (`expect`), it waits up to within_s for the stages that take them.
        """
        if self._next is None:
            raise InternalError("no other engine was prepared")
        before, self._serving, self._next = self._serving, self._next, None
        self._ending(before, within_s)

    def rename(self, pipeline_id: str) -> None:
        """Be the same slice of another split."""
        self._serving.rename(dataclasses.replace(self._serving.facts.artifact, pipeline_id=pipeline_id))

    # --- lanes that change hands with their layers --------------------------------------------------------------------

    def expect(self, hand_over: HandOver | None) -> None:
        """Be ready for the switch of a change; None: for one in which no lanes change hands."""
        if self._hand_over is not None:
            self._hand_over.close()
        self._hand_over = hand_over

    async def give_call(self, request: pb.HandOverRequest, context: Any) -> None:
        """Give a stage the lanes of layers that it is to have; the call ends with an error where there are none."""
        hand_over = self._hand_over
        try:
            if hand_over is None or hand_over.number != request.change:
                raise NotReadyError("this stage hands over no lanes")
            await hand_over.give(context)
        except RelaylineError as error:
            await rpc.abort(context, error)

    async def give_all(self, within_s: float) -> None:
        """End all calls, since this stage will hold no layers, and wait up to within_s for the stages that take its
        lanes."""
        await self._serving.end_calls(self.crashed)
        await self._give(self._serving, within_s)

    async def _give(self, loaded: LoadedEngine, within_s: float) -> None:
        hand_over = self._hand_over
        if hand_over is None or not within_s:
            return
        hand_over.ended(loaded.engine)
        given = asyncio.create_task(hand_over.given())
        await asyncio.wait({given, self.crashed}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        given.cancel()
        hand_over.over()

    async def take_all(self) -> int:
        """Let the serving engine have the lanes of its layers; returns how many.

        Raises RelaylineError where not all could be had; the others stay.
        """
        if self._hand_over is None:
            return 0
        loaded, hand_over = self._serving, self._hand_over
        try:
            return await hand_over.take(loaded.engine, loaded.facts.config.security)
        finally:
            loaded.service.epochs.handed(hand_over.route_ids)

    def _ending(self, loaded: LoadedEngine, within_s: float = 0.0) -> asyncio.Task[None]:
        ending = asyncio.create_task(self._end(loaded, within_s))
        self._endings.add(ending)
        ending.add_done_callback(self._ended)
        return ending

    async def _end(self, loaded: LoadedEngine, within_s: float) -> None:
        await loaded.end_calls(self.crashed)
        await self._give(loaded, within_s)
        await loaded.close(self.crashed)
        del loaded
        await give_back()

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            self._crash(error)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the serving engine, see stage.observe.metrics."""
        facts = self._serving.facts
        artifact = facts.artifact
        info = {
            names.LABEL_STAGE: str(artifact.stage_index),
            "layers": artifact.layers_text,
            "pipeline": artifact.pipeline_id[:12],
            "policy": facts.config.engine.policy,
            "version": facts.software_version,
        }
        yield from StageCollector(info, self._stats, self._telemetry, self.service.report.gauges).collect()

    # --- its end ------------------------------------------------------------------------------------------------------

    async def end_calls(self) -> None:
        """End every route of every engine."""
        self.expect(None)
        for loaded in (self._serving, self._next):
            if loaded is not None:
                await loaded.end_calls(self.crashed)

    async def close(self) -> None:
        """Give all memory back. `end_calls` comes before."""
        for loaded in (self._next, self._serving):
            if loaded is not None:
                await loaded.close(self.crashed)
        await asyncio.gather(*self._endings, return_exceptions=True)
