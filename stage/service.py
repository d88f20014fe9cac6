"""The gRPC face of a stage: carries envelopes in, results out. Holds no decisions about batches or lanes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc
import grpc.aio

from relayline.stage.facts import StageFacts
from relayline.stage.inbound import Inbound, check_fit, hello_of
from relayline.stage.observe.metrics import Gauges
from relayline.stage.observe.observer import StageObserver
from relayline.stage.observe.stats import StageStats
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.routes import ROUTES_MAX, UNUSED_S, LeftRoutes, Route, Upstream, check_newer
from relayline.stage.steps.gate import Gate
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteOutput, RouteWiring, StepResult
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    LaneLimitError,
    NotReadyError,
    ProtocolError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
    UnauthenticatedError,
)
from relayline.wire.common.process import first_of
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.envelope import EnvelopeView
from relayline.wire.envelopes.returns import ReturnWriter
from relayline.wire.links import rpc
from relayline.wire.links.eager import Begun
from relayline.wire.links.guard import Guard, caller
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.silence import Silence, silent_text
from relayline.wire.links.trouble import retold
from relayline.wire.links.watch import answer, first_beat
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.telemetry.telemetry import Telemetry

log = logging.getLogger("relayline.stage")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Send: TypeAlias = "tuple[Route, RouteOutput, Begun[int] | None]"

# Waiting frames past which no link is read: controls carry no rows, so credits alone would not bound them.
QUEUED_FRAMES_MAX = 4 * bounds.FRAMES_PER_ENVELOPE_MAX


class StageService:
    """All calls of relayline.v1.StageService."""

    def __init__(
        self, facts: StageFacts, executor: StepExecutor, stats: StageStats, telemetry: Telemetry | None = None
    ) -> None:
        self._facts, self._executor, self._stats = facts, executor, stats
        self._observer = StageObserver(
            telemetry or Telemetry(),
            facts.artifact,
            facts.config,
            facts.instance_id,
            lambda: self.runner.snapshot.lanes_used,
        )
        executor.mark = self._observer.spans.mark
        self._routes: dict[int, Route] = {}
        self._left = LeftRoutes(lambda route_id: self._spawn(self._forget_left(route_id)))
        self._configuring = asyncio.Lock()
        self._is_closing = False
        # Bounded by runner.OUTBOX_STEPS_MAX: the decode thread takes no step while that many are unsent.
        self._sends: asyncio.Queue[list[_Send]] = asyncio.Queue()
        self._n_unsent = 0  # steps whose envelopes have not all left
        self._stepped = asyncio.Event()  # set by every step
        self._started_ns = time.monotonic_ns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[bool]] = set()  # at most as many as there are open calls
        self._guard: Guard | None = None
        self.batches, self.beat = self._observer.batches, self._observer.beat
        self.set_telemetry = self._observer.set_telemetry
        self._gate = Gate(executor.sessions, self._push)
        self.runner: Runner  # set by attach, before the server starts

    def attach(self, runner: Runner, guard: Guard | None = None) -> None:
        """Connect the decode thread, and the guard of the port that takes lists of revoked credentials."""
        self.runner, self._guard = runner, guard

    def renamed(self, facts: StageFacts) -> None:
        """The same slice belongs to another split from now on. No epoch stands."""
        self._facts = facts
        self._observer.renamed(facts.artifact)

    # --- results of the decode thread ---------------------------------------------------------------------------------

    def deliver(self, result: StepResult) -> None:
        """Carry one step's results away; called on the event loop in step order."""
        sends: list[_Send] = []
        for output in result.outputs:
            route = self._routes.get(output.route_id)
            if route is None or route.epoch != output.epoch:
                continue  # buffers of an ended epoch go with their link
            for fault in output.faults:
                self._stats.faults_by_label[fault.label] += 1
            if result.context != trace_context.NONE:
                output.context = result.context
            route.report(output)
            if output.buffer is not None and route.link is not None:
                sends.append((route, output, None))
        if sends:
            if not self._n_unsent:  # the next stage waits for this: not a turn of the loop is lost
                route, output, _ = sends[0]
                sends[0] = (route, output, Begun(_sending(route, output)))
            self._n_unsent += 1
            self._sends.put_nowait(sends)
        else:
            self.runner.sent()

    def account(self, result: StepResult) -> None:
        """Take note of a step whose results are under way; called on the event loop in step order."""
        self._stats.step_done(result)
        self._stepped.set()
        for frame in result.consumed:
            frame.give_credit()
        closed: dict[int, RouteOutput] = {}  # one message for each route: its queue has no room for one a session
        for close, summary in self._observer.step_done(result):
            route = self._routes.get(close.route_id)
            if route is not None and route.epoch == close.epoch:
                output = closed.setdefault(close.route_id, RouteOutput(close.route_id, close.epoch))
                output.summaries.append(summary)
        for route_id, output in closed.items():
            self._routes[route_id].report(output)

    async def send_forever(self) -> None:
        """Send every step's envelopes, one step after the other: gRPC allows one write at a time per stream."""
        while True:
            for route, output, begun in await self._sends.get():
                try:
                    payload_bytes = await (begun or _sending(route, output))
                except RelaylineError as error:
                    self._link_lost(route, error)
                    continue
                self._stats.envelopes["out"] += 1
                self._stats.payload_bytes["out"] += payload_bytes
            self._n_unsent -= 1
            self.runner.sent()

    def _link_lost(self, route: Route, error: RelaylineError) -> None:
        if self._routes.get(route.route_id) is route and not route.ended.is_set():
            route.report_lost(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- unary calls --------------------------------------------------------------------------------------------------

    async def describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Describe this stage."""
        message = self._facts.describe()
        self._executor.sessions.states.tell(message)
        return message

    async def configure(self, request: pb.ConfigureRequest, context: Context) -> pb.ConfigureResponse:
        """Begin a new epoch of a route: connect downstream, and report the rows that its sessions still hold here."""
        beginning = asyncio.create_task(self._begin(request))
        try:
            held = await asyncio.shield(beginning)
        except RelaylineError as error:
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            # The coordinator has left: nothing stays half begun, and nobody else would end it.
            self._spawn(self._abandon(request, beginning))
            raise
        return pb.ConfigureResponse(held=[pb.HeldSession(session_id=key, n_tokens=n) for key, n in held.items()])

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

    async def _begin(self, request: pb.ConfigureRequest) -> dict[int, int]:
        async with self._configuring:
            return await self._configure(request)

    async def _abandon(self, request: pb.ConfigureRequest, beginning: asyncio.Task[dict[int, int]]) -> None:
        await asyncio.gather(beginning, return_exceptions=True)
        route = self._routes.get(request.route_id)
        if route is not None and route.epoch == request.epoch:
            await self._end_later(route)

    async def _configure(self, request: pb.ConfigureRequest) -> dict[int, int]:
        artifact = self._facts.artifact
        if self._is_closing:  # a coordinator that has just lost its route here would begin one that ends at once
            raise NotReadyError("this stage is stopping")
        if request.instance_id not in ("", self._facts.instance_id):  # its lanes and context may be others
            raise NotReadyError("this stage was restarted since it described itself; ask it again")
        if request.protocol_version != bounds.PROTOCOL_VERSION:
            raise HandshakeError(
                f"coordinator speaks protocol {request.protocol_version}, this stage {bounds.PROTOCOL_VERSION}; "
                "run the same relayline version on both"
            )
        if request.pipeline_id != artifact.pipeline_id or request.stage_index != artifact.stage_index:
            raise HandshakeError(
                f"asked to be stage {request.stage_index} of pipeline {request.pipeline_id[:12]}, but this artifact is "
                f"stage {artifact.stage_index} of {artifact.pipeline_id[:12]}"
            )
        if bool(request.next_address) == artifact.is_last:
            raise HandshakeError("only the last stage has no downstream neighbour")
        previous = self._routes.get(request.route_id)
        if previous is not None:
            previous.check_owner(caller())
            check_newer(request.epoch, previous.epoch)
        if previous is None and len(self._routes) >= ROUTES_MAX:
            # A coordinator that died between configuring and connecting has left a route that nothing else would end.
            unused = next((route for route in self._routes.values() if not route.has_upstream), None)
            if unused is None:
                raise LaneLimitError(f"this stage already serves {ROUTES_MAX} coordinators")
            await self._end_route(unused)
        if previous is not None:
            await self._end_route(previous)
        link = await self._connect(request) if request.next_address else None
        upstream = Upstream(request.upstream_pass, request.upstream_name)
        route = Route(request.route_id, request.epoch, artifact.stage_index, link, upstream, caller())
        wiring = RouteWiring(request.epoch, link.pool if link else None)
        held: dict[int, int] = await self.runner.call(lambda: self._executor.begin_route(request.route_id, wiring))
        self._routes[request.route_id] = route
        self._observer.configured(request)
        asyncio.get_running_loop().call_later(UNUSED_S, self._unused, route.route_id, route.epoch)
        if held:  # the coordinator knows of it, and needs the time to open it
            self._left.left(request.route_id, len(self._routes))
        self._stats.n_epochs += 1
        return held

    def _unused(self, route_id: int, epoch: int) -> None:
        """End an epoch that nobody has linked to: its coordinator gave up, and its link holds a neighbour's route."""
        route = self._routes.get(route_id)
        if route is not None and route.epoch == epoch and not (route.has_upstream or self._is_closing):
            self._spawn(self._end_later(route))

    async def _connect(self, request: pb.ConfigureRequest) -> RelayLink:
        artifact, hello = self._facts.artifact, hello_of(request, self._facts.artifact)

        def on_lost(error: RelaylineError) -> None:
            route = self._routes.get(request.route_id)
            if route is not None and route.epoch == request.epoch:
                self._link_lost(route, error)

        try:
            security = self._facts.config.security
            return await RelayLink.open(request.next_address, hello, on_lost, security, request.next_pass)
        except UnauthenticatedError as error:
            raise retold(error, f"stage {artifact.stage_index}") from error

    async def _end_route(self, route: Route, reason: RelaylineError | None = None) -> None:
        """End an epoch; its lanes stay for a while. The caller holds the configuring lock."""
        if self._routes.get(route.route_id) is not route:
            return
        route.end(reason)
        del self._routes[route.route_id]
        self._gate.drop_route(route.route_id)
        self.runner.drop_route(route.route_id)
        self._stepped.set()  # a reader of another route may wait for these frames to be gone, and no step may follow
        if await self.runner.call(lambda: self._executor.leave_route(route.route_id)):
            self._left.left(route.route_id, len(self._routes) + 1)
        self._observer.route_ended(route.route_id)
        if route.link is not None:
            await route.link.close()

    async def status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Report live counters."""
        message = self._stats.message(
            with_recent=request.with_recent, with_steps=request.with_steps, with_memory=request.with_memory
        )
        message.stage_index = self._facts.artifact.stage_index
        message.instance_id = self._facts.instance_id
        message.uptime_ns = time.monotonic_ns() - self._started_ns
        held = self.runner.snapshot
        message.lanes_used, message.lanes_kept = held.lanes_used, held.lanes_kept
        message.lanes_total = held.lanes_total
        message.queued_rows = held.queued_rows
        message.kv_per_lane = self._facts.config.engine.layout_used == "per-lane"
        message.kernels = self._facts.kernels
        message.place.CopyFrom(self._facts.place)
        self._facts.curves.tell(message)
        self._executor.sessions.states.count(message)
        if (route := self._routes.get(request.route_id)) is not None:
            message.route.CopyFrom(self._work_of(route))
        message.now_ns = time.monotonic_ns()
        return message

    def _work_of(self, route: Route) -> pb.RouteWork:
        return pb.RouteWork(
            epoch=route.epoch,
            envelopes_in=route.envelopes_in,
            envelopes_out=route.link.envelopes_sent if route.link is not None else 0,
            returned=route.n_returned,
            is_sending=route.is_reporting or self.runner.snapshot.queued_frames > QUEUED_FRAMES_MAX,
            session_ids=self.runner.session_ids(route.route_id),
        )

    def gauges(self) -> Gauges:
        """Return this stage's present state, for its metrics."""
        held = self.runner.snapshot
        tier = self._executor.sessions.states.figures()
        self._stats.tier_lookups = {"hit": tier.n_hits, "miss": tier.n_misses}
        links = [route.link.figures() for route in self._routes.values() if route.link is not None]
        return Gauges(
            queued_rows=held.queued_rows,
            queued_frames=held.queued_frames,
            lanes_used=held.lanes_used,
            lanes_kept=held.lanes_kept,
            lanes_total=held.lanes_total,
            in_flight_bytes=sum(figures["in_flight_bytes"] for figures in links),
            window_bytes=sum(figures["window_bytes"] for figures in links),
            tier=tier,
        )

    # --- streams ------------------------------------------------------------------------------------------------------

    async def relay(self, requests: Any, context: Context) -> None:
        """Take envelopes of one upstream neighbour until it leaves or its epoch ends."""
        try:
            route, hello = await self._accept(context)
        except RelaylineError as error:
            await rpc.abort(context, error)
        inbound = Inbound(route, hello, context, self._facts.config.engine.max_rows)
        route.has_upstream = True  # from here on only the clean-up below gives the route back
        ended = asyncio.create_task(route.ended.wait())
        reading = asyncio.create_task(self._read(inbound))
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
            self._upstream_left(route)

    async def _read(self, inbound: Inbound) -> None:
        await inbound.accept()
        while True:
            view = await inbound.next()
            if view is None or inbound.route.ended.is_set():
                return
            self._take(inbound, view)
            await asyncio.sleep(0)  # results of finished steps leave first
            while self.runner.snapshot.queued_frames > QUEUED_FRAMES_MAX:
                self._stepped.clear()
                await self._stepped.wait()

    def _take(self, inbound: Inbound, view: EnvelopeView) -> None:
        self._stats.envelopes["in"] += 1
        inbound.route.envelopes_in += 1
        self._stats.payload_bytes["in"] += view.payload_bytes
        frames = inbound.frames(view)
        self._push(self._gate.sift(frames, opens=bool(view.options)))

    def _push(self, frames: list[QueuedFrame]) -> None:
        for frame in self.runner.push(frames):
            frame.give_credit()

    async def _accept(self, context: Context) -> tuple[Route, pb.LinkOpen]:
        """Read and check the first message of a Relay stream, unless its metadata name no route that waits for it."""
        route = self._awaited(*rpc.route_of(context.invocation_metadata()))
        route.check_upstream(caller(), pass_of(context))
        try:
            async with asyncio.timeout(bounds.HANDSHAKE_TIMEOUT_S):
                first = await context.read()
        except TimeoutError as error:
            raise ProtocolError("no handshake came on this link") from error
        hello = Inbound.hello(first, route)
        check_fit(hello, self._facts.artifact)
        return self._awaited(route.route_id, route.epoch), hello  # another stream may have come meanwhile

    def _awaited(self, route_id: int, epoch: int) -> Route:
        """Return the route of this epoch that has no upstream link yet. Raises StaleEpochError, HandshakeError."""
        route, stage = self._routes.get(route_id), f"stage {self._facts.artifact.stage_index}"
        if route is not None and epoch < route.epoch:
            raise StaleEpochError(f"epoch {epoch} is over, this stage is at {route.epoch}")
        if route is None or epoch != route.epoch:
            raise HandshakeError(f"{stage} has not been configured for this route and epoch")
        if route.has_upstream:
            raise HandshakeError(f"{stage} already has an upstream link for this route and epoch")
        return route

    def _upstream_left(self, route: Route) -> None:
        """End the epoch of a vanished upstream: without its closes the sessions would stay for ever."""
        if self._routes.get(route.route_id) is not route:
            return
        if not route.ended.is_set():
            route.report_lost(StageLostError(f"the upstream link of stage {route.stage_index} closed"))
        self._spawn(self._end_later(route))

    async def _end_later(self, route: Route) -> None:
        async with self._configuring:
            await self._end_route(route)

    async def return_(self, request: pb.ReturnRequest, context: Context) -> None:
        """Stream samples and faults of one route to its coordinator."""
        route = self._routes.get(request.route_id)
        if route is None or route.epoch != request.epoch:
            await rpc.abort(context, StaleEpochError(f"this stage is not at epoch {request.epoch} of the route"))
        try:
            route.check_owner(caller())
        except RelaylineError as error:
            await rpc.abort(context, error)
        listener, writer = route.listen(), ReturnWriter()
        try:
            while (message := await listener.queue.get()) is not None:
                for data in writer.write(message):
                    await context.write(data)
                    route.n_returned += 1
            await rpc.abort(context, route.reason)
        finally:
            route.unlisten(listener)

    async def watch(self, requests: Any, context: Context) -> None:
        """Send signs of life to the peer of a route, and end its epoch when that peer gives none."""
        try:
            hello = await first_beat(context)
            route = self._routes.get(hello.route_id)
            if route is None or route.epoch != hello.epoch:
                raise StaleEpochError(f"this stage is not at epoch {hello.epoch} of the route")
            route.check_watcher(caller(), pass_of(context))
        except RelaylineError as error:
            await rpc.abort(context, error)
        answering = asyncio.create_task(answer(context, Silence()))
        self._watches.add(answering)
        try:
            await first_of(answering)
            if not answering.cancelled() and answering.exception() is None and answering.result():
                self._silenced(hello, peer_of(context.peer())[0])
        finally:
            self._watches.discard(answering)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _silenced(self, hello: pb.WatchRequest, host: str) -> None:
        route = self._routes.get(hello.route_id)
        if route is None or route.epoch != hello.epoch or self._is_closing:
            return
        text = silent_text(f"{host}, which uses stage {route.stage_index},")
        log.warning("%s; its epoch ends here", text)
        route.report_lost(StageLostError(text))
        self._spawn(self._end_later(route))

    async def _forget_left(self, route_id: int) -> None:
        async with self._configuring:
            # Left again while this waited for the lock, and reported to its coordinator: the time starts again.
            if not (self._is_closing or self._left.is_waiting(route_id)):
                await self.runner.call(lambda: self._executor.forget_left(route_id))

    async def close(self) -> None:
        """End every route, for good; their streams close with it."""
        async with self._configuring:
            self._is_closing = True
            for route in list(self._routes.values()):
                await self._end_route(route, NotReadyError(f"stage {route.stage_index} was told to end"))
            self._left.close()
        for answering in self._watches:
            answering.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def handlers(current: Callable[[], StageService]) -> grpc.GenericRpcHandler:
    """Return the generic handler of the service that is `current` when a call begins."""

    def unary(name: str, kind: Any) -> Any:
        async def call(request: Any, context: Context) -> Any:
            return await getattr(current(), name)(request, context)

        return grpc.unary_unary_rpc_method_handler(call, rpc.parser(kind), rpc.serialize)

    def streamed(name: str) -> Callable[[Any, Context], Coroutine[Any, Any, None]]:
        async def call(request: Any, context: Context) -> None:
            await getattr(current(), name)(request, context)

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
            "Revoke": unary("revoke", pb.RevokeRequest),
            "Relay": grpc.stream_stream_rpc_method_handler(streamed("relay"), None, rpc.serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(streamed("watch"), None, None),
            "Return": grpc.unary_stream_rpc_method_handler(streamed("return_"), rpc.parser(pb.ReturnRequest), None),
        },
    )


async def _sending(route: Route, output: RouteOutput) -> int:
    """Send a step's envelope of one route; returns its payload bytes. Raises the loss of its link."""
    link, buffer = route.link, output.buffer
    assert link is not None
    assert buffer is not None
    payload_bytes = buffer.payload_bytes
    await link.send(buffer, output.message)
    return payload_bytes


def pass_of(context: Context) -> str:
    """Return the pass that a Relay call shows in its metadata, empty for none."""
    shown = next((value for key, value in context.invocation_metadata() or () if key == rpc.PASS_KEY), "")
    return shown.decode(errors="replace") if isinstance(shown, bytes) else str(shown)
