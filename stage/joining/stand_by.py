"""A member that holds no layers: it waits for a change that gives it some, and gets them ready for the switch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.joining.artifact_fetch import NO_FILES, Files, obtain
from relayline.stage.joining.changes import NextSlice, expected, take_lanes, within_s_of
from relayline.stage.joining.client import Member
from relayline.stage.process import serve_changing
from relayline.stage.served import Served
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.common.memory import give_back
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import end_task
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")

ConfigOf = Callable[[Files, pb.JoinResponse], StageConfig]


class StandBy:
    """One membership for as long as it holds no layers. Event loop only."""

    def __init__(
        self, member: Member, stop: asyncio.Future[Any], config_of: ConfigOf, cache: Path, *, always_fetch: bool
    ) -> None:
        """`config_of(files, order)` returns the configuration for an order."""
        self._member, self._stop = member, stop
        self._config_of, self._cache, self._always_fetch = config_of, cache, always_fetch
        self._coming: asyncio.Task[pb.JoinResponse] | None = None  # the next order

    @contextlib.asynccontextmanager
    async def layers(self) -> AsyncIterator[Served | None]:
        """Wait for layers; yields the stage that serves them once the coordinator has switched to them.

        `member.order` is their order then. Yields None where the membership ends, or this stage is to stop. A stage
        that joins again afterwards gets the current order.
        """
        try:
            while (order := await self._next()) is not None:
                if order.change.step == pb.LAYER_CHANGE_STEP_SWITCH:
                    log.warning("the layers changed before this stage had prepared them; joining again")
                    break
                if order.change.step != pb.LAYER_CHANGE_STEP_PREPARE or order.stands_by:
                    continue
                async with self._prepared(order) as served:
                    if served is not None and (switch := await self._switched(order)) is not None:
                        await self._take_lanes(served, within_s_of(switch))
                        self._member.order = order
                        yield served
                        return
            yield None
        finally:
            if self._coming is not None:
                await end_task(self._coming)

    async def _next(self) -> pb.JoinResponse | None:
        """Return the next order; None when the membership ends before one comes."""
        coming = self._wait()
        await first_of(coming, self._stop, self._member.lost)
        if self._stop.done() or self._member.lost.done():
            return None
        self._coming = None
        return coming.result()

    def _wait(self) -> asyncio.Task[pb.JoinResponse]:
        """Return the layers that wait for the next order. They stay in place until that order is taken."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._member.changes.get())
        return self._coming

    @contextlib.asynccontextmanager
    async def _prepared(self, order: pb.JoinResponse) -> AsyncIterator[Served | None]:
        """Get and load a slice, and open its port. Yields None if that was cancelled or failed."""
        load = Load()

        def give_up(_: asyncio.Future[Any]) -> None:
            load.stop()

        ends: tuple[asyncio.Future[Any], ...] = (self._wait(), self._stop, self._member.lost)
        async with contextlib.AsyncExitStack() as stack:
            for end in ends:
                end.add_done_callback(give_up)
            served: Served | None = None
            report = pb.StagePrepared(change=order.change.number)
            try:
                log.info("preparing layers", extra={"fields": {"file": order.artifact.file}})
                await asyncio.to_thread(self._config_of(NO_FILES, order).check_ports)
                if (files := await self._obtain(order, load, ends)) is not None:
                    served = await stack.enter_async_context(serve_changing(self._config_of(files, order), load))
                    served.expect(expected(order))
                    report.is_ready = True
            except LoadStoppedError:
                pass
            except RelaylineError as error:
                report.failure.label, report.failure.message = error.label, error.message
            except Exception as error:  # a bug of ours; the change must not wait for ever
                log.exception("preparing layers failed")
                report.failure.label, report.failure.message = InternalError.label, f"{type(error).__name__}: {error}"
            finally:
                for end in ends:
                    end.remove_done_callback(give_up)
            if report.HasField("failure"):
                log.warning("the new layers cannot be prepared: %s", report.failure.message)
            if report.is_ready or report.HasField("failure"):
                await self._member.report(prepared=report)
            if served is None:
                await give_back()
            yield served

    async def _obtain(self, order: pb.JoinResponse, load: Load, ends: tuple[asyncio.Future[Any], ...]) -> Files | None:
        """Return the order's files, None as soon as one of the ends is done."""
        source = NextSlice(self._member, order)
        getting = asyncio.create_task(obtain(source, self._cache, load, always_fetch=self._always_fetch))
        try:
            await first_of(getting, *ends)
        finally:
            if not getting.done():
                load.stop()  # a thread that reads a file hears of nothing else
            await end_task(getting)
        if getting.cancelled() or any(end.done() for end in ends):
            return None
        return getting.result()

    async def _take_lanes(self, served: Served, within_s: float) -> None:
        taking = asyncio.create_task(take_lanes(served, within_s))
        try:
            await first_of(taking, self._stop, self._member.lost)
        finally:
            await end_task(taking)

    async def _switched(self, order: pb.JoinResponse) -> pb.JoinResponse | None:
        """Return the order to serve the layers that were prepared, once it comes; None when the change is off."""
        coming = self._wait()
        await first_of(coming, self._stop, self._member.lost)
        if self._stop.done() or self._member.lost.done():
            return None
        change = coming.result().change
        if (change.step, change.number) != (pb.LAYER_CHANGE_STEP_SWITCH, order.change.number):
            if change.step != pb.LAYER_CHANGE_STEP_PREPARE:
                self._coming = None
            return None
        self._coming = None
        return coming.result()
