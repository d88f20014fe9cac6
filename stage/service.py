"""The gRPC face of a stage: each call goes to the part that answers it. Holds no decisions about batches or lanes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc
import grpc.aio

from relayline.stage.epochs import Epochs
from relayline.stage.facts import StageFacts
from relayline.stage.inbound import Inbound, accepted
from relayline.stage.intake import Intake
from relayline.stage.observe.observer import StageObserver
from relayline.stage.observe.stats import StageStats
from relayline.stage.outbound import Outbound
from relayline.stage.report import StageReport
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.errors import NotReadyError, RelaylineError, StageLostError
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import let_go
from relayline.wire.envelopes.returns import ReturnWriter
from relayline.wire.links import rpc
from relayline.wire.links.guard import Guard, caller
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.watch import answer, first_beat
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Telemetry

log = logging.getLogger("relayline.stage")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class StageService:
    """All calls of relayline.v1.StageService, for one engine."""

    def __init__(
        self, facts: StageFacts, executor: StepExecutor, stats: StageStats, telemetry: Telemetry | None = None
    ) -> None:
        self._observer = StageObserver(
            telemetry or Telemetry(),
            facts.artifact,
            facts.config,
            facts.instance_id,
            lambda: self.runner.snapshot.lanes_used,
        )
        executor.mark = self._observer.spans.mark
        self.intake = Intake(executor.sessions, stats)
        self.epochs = Epochs(facts, executor, stats, self._observer, self.intake.drop_route)
        self.outbound = Outbound(self.epochs, stats, self._observer, self.intake.stepped.set)
        self.report = StageReport(self.epochs, self.intake, executor.sessions.states, stats)
        self._states = executor.sessions.states
        self._watches: set[asyncio.Task[bool]] = set()  # at most as many as there are open calls
        self._guard: Guard | None = None
        self.batches, self.beat = self._observer.batches, self._observer.beat
        self.set_telemetry, self.logs = self._observer.set_telemetry, self._observer.logs
        self.runner: Runner  # set by attach, before the server starts

    def attach(self, runner: Runner, guard: Guard | None = None) -> None:
        """Connect the decode thread, and the guard of the port that takes lists of revoked credentials."""
        self.runner, self._guard = runner, guard
        loop = asyncio.get_running_loop()

        def dropped(key: int) -> None:
            with contextlib.suppress(RuntimeError):  # the stage has ended meanwhile
                loop.call_soon_threadsafe(self.outbound.dropped, key)

        self._states.on_dropped = dropped
        self.intake.runner = self.epochs.runner = self.outbound.runner = self.report.runner = runner

    def renamed(self, facts: StageFacts) -> None:
        """The same slice belongs to another split from now on. No epoch stands."""
        self.epochs.facts = facts
        self._observer.renamed(facts.artifact)

    # --- unary calls --------------------------------------------------------------------------------------------------

    async def describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Describe this stage."""
        return self.report.describe()

    async def status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Report live counters."""
        return self.report.status(request)

    async def notes(self, request: pb.NotesRequest, context: Context) -> pb.NotesResponse:
        """Keep, and tell, what coordinators note about stored prefixes."""
        return self._states.notes(request)

    async def configure(self, request: pb.ConfigureRequest, context: Context) -> pb.ConfigureResponse:
        """Begin a new epoch of a route: connect downstream, and report the rows that its sessions still hold here."""
        try:
            held = await self.epochs.begin(request)
        except RelaylineError as error:
            await rpc.abort(context, error)
        sessions = [pb.HeldSession(session_id=key, n_tokens=n_tokens) for key, n_tokens in held.items()]
        return pb.ConfigureResponse(held=sessions, stored=self._states.stored())

    async def revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """Take the CA's list of revoked certificates from the coordinator; calls of their holders end."""
        number = 0
        if self._guard is not None:
            try:
                if self._guard.revocations.offer(request.crl_pem):
                    self._guard.end_revoked()
            except RelaylineError as error:
                await rpc.abort(context, error)
            number = self._guard.revocations.number
        return pb.RevokeResponse(number=number)

    # --- streams ------------------------------------------------------------------------------------------------------

    async def relay(self, requests: Any, context: Context) -> None:
        """Take envelopes of one upstream neighbour until it leaves or its epoch ends."""
        try:
            route, hello = await accepted(context, self.epochs.awaited, self.epochs.facts.artifact)
        except RelaylineError as error:
            await rpc.abort(context, error)
        facts = self.epochs.facts
        max_rows, artifact = facts.config.engine.max_rows, facts.artifact
        media_width = artifact.media_width if artifact.takes_rows else 0
        is_back = route.is_back(rpc.pass_of(context.invocation_metadata()))
        inbound = Inbound(route, hello, context, max_rows, media_width=media_width, is_back=is_back)
        if is_back:
            route.has_back = True
        else:
            route.has_upstream = True  # from here on only the clean-up below gives the route back
        ended = asyncio.create_task(route.ended.wait())
        reading = asyncio.create_task(self.intake.read(inbound))
        try:
            await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
            else:
                await rpc.abort(context, route.reason)
        except RelaylineError as error:
            await rpc.abort(context, error)
        finally:
            ended.cancel()
            reading.cancel()
            inbound.close()
            if is_back:
                text = f"the link of the last stage to stage {route.stage_index} closed"
                self.epochs.link_lost(route, StageLostError(text))
            else:
                self.epochs.upstream_left(route)

    async def return_(self, request: pb.ReturnRequest, context: Context) -> None:
        """Stream samples and faults of one route to its coordinator."""
        try:
            route = self.epochs.standing(request.route_id, request.epoch)
            route.check_owner(caller())
        except RelaylineError as error:
            await rpc.abort(context, error)
        listener, writer = route.listen(), ReturnWriter()
        try:
            while (message := await listener.next()) is not None:
                for data in writer.write(message):
                    await context.write(data)
                    route.n_returned += 1
            await rpc.abort(context, route.reason)
        finally:
            route.unlisten(listener)

    async def watch(self, requests: Any, context: Context) -> None:
        """Send heartbeats to the peer of a route, and end its epoch when that peer gives none."""
        try:
            hello = await first_beat(context)
            route = self.epochs.standing(hello.route_id, hello.epoch)
            route.check_watcher(caller(), rpc.pass_of(context.invocation_metadata()))
        except RelaylineError as error:
            await rpc.abort(context, error)
        answering = asyncio.create_task(answer(context, Silence()))
        self._watches.add(answering)
        try:
            await first_of(answering)
            if not answering.cancelled() and answering.exception() is None and answering.result():
                host = peer_of(context.peer())[0]
                text = silent_text(f"{host}, which sends to stage {route.stage_index},")
                if self.epochs.peer_silent(hello.route_id, hello.epoch, StageLostError(text)):
                    log.warning("%s; its epoch ends here", text)
        finally:
            self._watches.discard(answering)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def close(self) -> None:
        """End every route, for good; their streams close with it."""
        await self.epochs.end_all()
        for answering in self._watches:
            answering.cancel()
        await self.epochs.settled()


async def _gives_nothing(request: pb.HandOverRequest, context: Context) -> None:
    await rpc.abort(context, NotReadyError("this stage hands over no lanes"))


def handlers(
    current: Callable[[], StageService],
    hand_over: Callable[[pb.HandOverRequest, Context], Coroutine[Any, Any, None]] = _gives_nothing,
) -> grpc.GenericRpcHandler:
    """Return the generic handler of the service that is `current` when a call begins.

    `hand_over` answers a stage that takes lanes with their layers, whichever service is current.
    """

    def unary(name: str, kind: Any) -> Any:
        async def call(request: Any, context: Context) -> Any:
            return await getattr(current(), name)(request, context)

        return grpc.unary_unary_rpc_method_handler(call, rpc.parser(kind), rpc.serialize)

    def streamed(name: str) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        async def call(request: Any, context: Context) -> None:
            try:
                await getattr(current(), name)(request, context)
            except grpc.aio.AbortError as error:
                let_go(error)  # the context keeps it; with its frames it would keep the route, its links and so on
                raise

        return call

    return grpc.method_handlers_generic_handler(
        rpc.SERVICE,
        {
            "Describe": unary("describe", pb.DescribeRequest),
            "Configure": unary("configure", pb.ConfigureRequest),
            "Status": unary("status", pb.StatusRequest),
            "Batches": unary("batches", pb.BatchesRequest),
            "Beat": unary("beat", pb.BeatRequest),
            "SetTelemetry": unary("set_telemetry", pb.SetTelemetryRequest),
            "Logs": unary("logs", pb.LogsRequest),
            "Notes": unary("notes", pb.NotesRequest),
            "Revoke": unary("revoke", pb.RevokeRequest),
            "Relay": grpc.stream_stream_rpc_method_handler(streamed("relay"), None, rpc.serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(streamed("watch"), None, None),
            "HandOver": grpc.unary_stream_rpc_method_handler(hand_over, rpc.parser(pb.HandOverRequest), None),
            "Return": grpc.unary_stream_rpc_method_handler(streamed("return_"), rpc.parser(pb.ReturnRequest), None),
        },
    )
