"""Planned changes of a member's layers: the next slice is loaded while the old one serves, then takes over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from relayline.stage.config import StageConfig
from relayline.stage.engine.loading import Load, LoadStoppedError
from relayline.stage.hand_over import HandOver
from relayline.stage.joining.artifact_fetch import Files, obtain
from relayline.stage.joining.client import Member, failure_of
from relayline.stage.served import Served
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError, StaleEpochError
from relayline.wire.common.memory import give_back
from relayline.wire.common.tasks import end_task
from relayline.wire.pb.relayline.v1 import join_pb2 as pb

log = logging.getLogger("relayline.stage")


class NextSlice:
    """The facts about a member that `obtain` needs, for the order that holds after the change."""

    def __init__(self, member: Member, order: pb.JoinResponse) -> None:
        self._member, self.order = member, order
        self.peer, self.lost = member.peer, member.lost

    def fetch(self, offset: int, sha256: str = "", end: int = 0) -> AsyncGenerator[pb.FetchResponse, None]:
        """Yield the bytes of the next artifact, or of another file, see Member.fetch."""
        return self._member.fetch(offset, sha256 or self.order.artifact.sha256, end)

    async def report_progress(
        self, phase: pb.ArtifactPhase, done_bytes: int, total_bytes: int, trouble: str = ""
    ) -> None:
        """Say how far the next artifact is, and why it does not get on. Trouble that lasts is the change's failure."""
        report = pb.StagePrepared(
            change=self.order.change.number, done_bytes=done_bytes, total_bytes=total_bytes, trouble=trouble
        )
        await self._member.report(prepared=report)


def expected(order: pb.JoinResponse) -> HandOver | None:
    """Return an order's part about lanes that are handed over at the switch."""
    change = order.change
    return HandOver(change.number, change.hand_over) if change.HasField("hand_over") else None


def within_s_of(order: pb.JoinResponse) -> float:
    """Return how long lanes may change hands after an order to switch."""
    return min(order.change.hand_over_ms / 1e3, bounds.HAND_OVER_S_MAX)


async def take_lanes(served: Served, within_s: float) -> None:
    """Let a stage that has just switched have the lanes of its new layers. The rest is read again."""
    if not within_s:
        return
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            n_lanes = await served.take_all()
    except TimeoutError:
        log.warning("not all streams were handed over within %.1f s; the others are recomputed", within_s)
    except RelaylineError as error:
        log.warning("not all streams were handed over; the others are recomputed: %s", error.message)
    except Exception:  # a bug of ours: the stage serves all the same
        log.exception("handing streams over failed; they are recomputed")
    else:
        took_s = time.monotonic() - started_s
        log.info("streams handed over", extra={"fields": {"streams": n_lanes, "took_s": f"{took_s:.3f}"}})


class LayerChanges:
    """Carries out the later orders of a membership, for as long as one engine's port is open. Event loop only."""

    def __init__(
        self,
        served: Served,
        config_of: Callable[[Files, pb.JoinResponse], StageConfig],
        cache: Path,
        *,
        always_fetch: bool,
    ) -> None:
        """`config_of(files, order)` returns the configuration for an order."""
        self._served, self._config_of, self._cache, self._always_fetch = served, config_of, cache, always_fetch
        self._preparing: asyncio.Task[None] | None = None
        self._ready: pb.JoinResponse | None = None  # the order that can be switched to
        self._within_s = 0.0  # how long lanes may change hands after the latest switch

    async def next_switch(self, member: Member) -> pb.JoinResponse:
        """Follow the orders of a membership until one changed the served layers; returns the order in force.

        Raises StaleEpochError for a switch to a slice that was never prepared: the stage has to join again.
        """
        while True:
            order = await member.changes.get()
            number = order.change.number
            if order.change.step == pb.LAYER_CHANGE_STEP_PREPARE:
                await self.drop()
                self._served.expect(expected(order))
                self._preparing = asyncio.create_task(self._prepare(member, order))
            elif order.change.step == pb.LAYER_CHANGE_STEP_DROP:
                await self.drop()
                self._served.expect(None)
            elif self._ready is None or self._ready.change.number != number:
                raise StaleEpochError(
                    "layers were switched, but this stage had not prepared its new ones; joining again"
                )
            else:
                self._within_s = within_s_of(order)
                return self._switch(self._ready)

    def _switch(self, order: pb.JoinResponse) -> pb.JoinResponse:
        self._ready = None
        if order.stands_by:
            log.info("gave up its layers; standing by as a spare")
            return order
        if order.change.keeps:
            self._served.rename(order.pipeline_id)
        else:
            self._served.switch(self._within_s)
        artifact = self._served.facts.artifact
        fields = {"layers": artifact.layers_text, "kept": order.change.keeps}
        log.info("layers switched", extra={"fields": fields})
        return order

    async def hand_over(self, order: pb.JoinResponse) -> None:
        """After the switch to an order, let lanes change hands with their layers; bounded, and fails nothing."""
        if order.stands_by:
            await self._served.give_all(self._within_s)
        elif not order.change.keeps:
            await take_lanes(self._served, self._within_s)

    async def drop(self) -> None:
        """Drop the prepared slice, or the one being prepared."""
        self._ready = None
        if self._preparing is not None:
            await end_task(self._preparing)
            self._preparing = None
        await self._served.drop()

    async def _prepare(self, member: Member, order: pb.JoinResponse) -> None:
        report = pb.StagePrepared(change=order.change.number)
        load = Load()
        try:
            if not order.change.keeps and not order.stands_by:
                log.info("preparing other layers", extra={"fields": {"file": order.artifact.file}})
                source = NextSlice(member, order)
                files = await obtain(source, self._cache, load, always_fetch=self._always_fetch)
                await self._served.prepare(self._config_of(files, order), load)
        except asyncio.CancelledError:
            load.stop()
            raise
        except LoadStoppedError:
            return
        except RelaylineError as error:
            report.failure.CopyFrom(failure_of(error))
        except Exception as error:  # a bug of ours; the change must not wait for ever
            log.exception("preparing the new layers failed")
            report.failure.CopyFrom(failure_of(error))
        else:
            report.is_ready, self._ready = True, order
        if report.HasField("failure"):
            log.warning("the new layers cannot be prepared: %s", report.failure.message)
        await member.report(prepared=report)
        if not report.is_ready:
            await give_back()
