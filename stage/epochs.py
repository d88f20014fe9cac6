"""The epochs of a stage's routes: how one begins, which neighbours may link to it, and how it ends. Event loop only.

A coordinator begins an epoch of its route with Configure. The epoch ends when a newer one begins, when its upstream
neighbour leaves or falls silent, when no neighbour ever links to it, or when the stage stops. Epochs begin and end
under one lock, so no two of them meet half-way in the decode thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from relayline.stage.facts import StageFacts
from relayline.stage.inbound import back_hello_of, hello_of
from relayline.stage.observe.observer import StageObserver
from relayline.stage.observe.stats import StageStats
from relayline.stage.routes import ROUTES_MAX, UNUSED_S, LeftRoutes, Route, Upstream, check_newer
from relayline.stage.sending_back import SendingBack
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step import StepExecutor
from relayline.stage.steps.step_types import RouteWiring
from relayline.wire.common import bounds
from relayline.wire.common.errors import (
    HandshakeError,
    LaneLimitError,
    NotReadyError,
    RelaylineError,
    StageLostError,
    StaleEpochError,
    UnauthenticatedError,
)
from relayline.wire.common.tasks import start_among
from relayline.wire.links.guard import caller
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.trouble import neighbour_error
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb


class Epochs:
    """The routes of one engine, each at its present epoch."""

    def __init__(
        self,
        facts: StageFacts,
        executor: StepExecutor,
        stats: StageStats,
        observer: StageObserver,
        drop_frames: Callable[[int], None],
    ) -> None:
        """`drop_frames(route_id)` drops the frames of a route that have come and were not decoded."""
        self.facts = facts
        self._executor, self._stats, self._observer, self._drop_frames = executor, stats, observer, drop_frames
        self.routes: dict[int, Route] = {}  # by route id; others only read it
        self._left = LeftRoutes(lambda route_id: self._spawn(self._forget_left(route_id)))
        self._changing = asyncio.Lock()
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.runner: Runner  # set by StageService.attach, before the server starts

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        start_among(self._tasks, work)

    # --- which routes there are ---------------------------------------------------------------------------------------

    def at(self, route_id: int, epoch: int) -> Route | None:
        """Return the route if it is at this epoch."""
        route = self.routes.get(route_id)
        return route if route is not None and route.epoch == epoch else None

    def standing(self, route_id: int, epoch: int) -> Route:
        """Return the route at this epoch. Raises StaleEpochError."""
        if (route := self.at(route_id, epoch)) is None:
            raise StaleEpochError(f"this stage is not at epoch {epoch} of the route")
        return route

    def awaited(self, route_id: int, epoch: int, shown_pass: str = "") -> Route:
        """Return the route of this epoch that has no upstream link yet, or none of the last stage if the pass is that.

        Raises StaleEpochError, HandshakeError.
        """
        route, stage = self.routes.get(route_id), f"stage {self.facts.artifact.stage_index}"
        if route is not None and epoch < route.epoch:
            raise StaleEpochError(f"epoch {epoch} is over; this stage is at epoch {route.epoch}")
        if route is None or epoch != route.epoch:
            raise HandshakeError(f"{stage} has not been configured for this route and epoch")
        if route.has_back if route.is_back(shown_pass) else route.has_upstream:
            raise HandshakeError(f"{stage} already has an upstream link for this route and epoch")
        return route

    # --- the beginning of an epoch ------------------------------------------------------------------------------------

    async def begin(self, request: pb.ConfigureRequest) -> dict[int, int]:
        """Begin an epoch, downstream link included; returns the rows that its sessions still hold here.

        Raises NotReadyError, HandshakeError, StaleEpochError, LaneLimitError, UnauthenticatedError and the errors of
        RelayLink.open.
        """
        beginning = asyncio.create_task(self._begin(request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # The coordinator has left, so no one else would end its epoch.
            self._spawn(self._abandon(request, beginning))
            raise

    async def _abandon(self, request: pb.ConfigureRequest, beginning: asyncio.Task[dict[int, int]]) -> None:
        await asyncio.gather(beginning, return_exceptions=True)
        if (route := self.at(request.route_id, request.epoch)) is not None:
            await self._end_later(route)

    async def _begin(self, request: pb.ConfigureRequest) -> dict[int, int]:
        async with self._changing:
            self._check_order(request)
            await self._make_room(request)
            link = await self._connect(request) if request.next_address else None
            upstream = Upstream(request.upstream_pass, request.upstream_name)
            stage_index = self.facts.artifact.stage_index
            is_first = self.facts.artifact.is_first
            back = Upstream(request.back_pass, request.last_name) if request.back_pass and is_first else None
            route = Route(request.route_id, request.epoch, stage_index, link, upstream, caller(), back)
            wiring = RouteWiring(request.epoch, link.pool if link else None)
            try:
                held: dict[int, int] = await self.runner.call(
                    lambda: self._executor.begin_route(request.route_id, wiring)
                )
            except BaseException:
                if link is not None:
                    await link.close()
                raise
            self.routes[request.route_id] = route
            if request.first_address and request.back_pass and not is_first:
                route.sending_back = self._sending_back(request, route)
            self._observer.configured(request)
            route.looks_used = asyncio.get_running_loop().call_later(UNUSED_S, self._unused, route)
            if held:  # the coordinator knows of it, and needs the time to open it
                self._left.left(request.route_id, len(self.routes))
            self._stats.n_epochs += 1
            return held

    def _check_order(self, request: pb.ConfigureRequest) -> None:
        artifact = self.facts.artifact
        if self._is_closing:  # a coordinator that has just lost its route here would begin one that ends at once
            raise NotReadyError("this stage is stopping")
        if request.instance_id not in ("", self.facts.instance_id):  # its lanes and context may be others
            raise NotReadyError("this stage has restarted since it described itself; ask it again")
        if request.protocol_version != bounds.PROTOCOL_VERSION:
            raise HandshakeError(
                f"the coordinator speaks protocol {request.protocol_version}, this stage {bounds.PROTOCOL_VERSION}; "
                "run the same relayline version on both"
            )
        if request.pipeline_id != artifact.pipeline_id or request.stage_index != artifact.stage_index:
            raise HandshakeError(
                f"asked to be stage {request.stage_index} of pipeline {request.pipeline_id[:12]}, but this artifact is "
                f"stage {artifact.stage_index} of {artifact.pipeline_id[:12]}"
            )
        if bool(request.next_address) == artifact.is_last:
            raise HandshakeError("only the last stage has no downstream neighbour")

    async def _make_room(self, request: pb.ConfigureRequest) -> None:
        """End the route's previous epoch. For a new route, if the table is full, end an unused route instead."""
        previous = self.routes.get(request.route_id)
        if previous is not None:
            previous.check_owner(caller())
            check_newer(request.epoch, previous.epoch)
            await self._end(previous)
        elif len(self.routes) >= ROUTES_MAX:
            # A coordinator that died between configuring and connecting has left a route that nothing else would end.
            unused = next((route for route in self.routes.values() if not route.has_upstream), None)
            if unused is None:
                raise LaneLimitError(f"this stage already serves {ROUTES_MAX} coordinators")
            await self._end(unused)

    async def _connect(self, request: pb.ConfigureRequest) -> RelayLink:
        artifact, hello = self.facts.artifact, hello_of(request, self.facts.artifact)

        def on_lost(error: RelaylineError) -> None:
            if (route := self.at(request.route_id, request.epoch)) is not None:
                self.link_lost(route, error)

        try:
            security = self.facts.config.security
            return await RelayLink.open(request.next_address, hello, on_lost, security, request.next_pass)
        except UnauthenticatedError as error:
            raise neighbour_error(error, f"stage {artifact.stage_index}") from error

    def _sending_back(self, request: pb.ConfigureRequest, route: Route) -> SendingBack:
        """Open the link to stage 0 in the background: it has its part in the epoch last."""
        hello, config = back_hello_of(request, self.facts.artifact), self.facts.config

        def on_lost(error: RelaylineError) -> None:
            self.link_lost(route, error)

        def open_link() -> Awaitable[RelayLink]:
            return RelayLink.open(
                request.first_address, hello, on_lost, config.security, request.back_pass, is_watched=False
            )

        return SendingBack(open_link, request.epoch, route.tell_feeds_back, on_lost)

    # --- its end ------------------------------------------------------------------------------------------------------

    def link_lost(self, route: Route, error: RelaylineError) -> None:
        """Tell the coordinator that the link downstream is lost, unless the epoch has ended."""
        if self.routes.get(route.route_id) is route and not route.ended.is_set():
            route.report_lost(error)

    def upstream_left(self, route: Route) -> None:
        """End the epoch of a vanished upstream: without its closes the sessions would stay for ever."""
        if self.routes.get(route.route_id) is not route:
            return
        if not route.ended.is_set():
            route.report_lost(StageLostError(f"the upstream link of stage {route.stage_index} closed"))
        self._spawn(self._end_later(route))

    def peer_silent(self, route_id: int, epoch: int, error: StageLostError) -> bool:
        """End the epoch of a peer that sends no heartbeat. Returns whether the epoch stood until now."""
        route = self.at(route_id, epoch)
        if route is None or self._is_closing:
            return False
        route.report_lost(error)
        self._spawn(self._end_later(route))
        return True

    def _unused(self, route: Route) -> None:
        """End an epoch without a link: its coordinator gave up, and its own link holds a neighbour's route."""
        if self.routes.get(route.route_id) is route and not (route.has_upstream or self._is_closing):
            self._spawn(self._end_later(route))

    async def _end_later(self, route: Route) -> None:
        async with self._changing:
            await self._end(route)

    async def _end(self, route: Route, reason: RelaylineError | None = None) -> None:
        """End an epoch; its lanes stay for a while. The caller holds the lock."""
        if self.routes.get(route.route_id) is not route:
            return
        route.end(reason)
        del self.routes[route.route_id]
        if route.looks_used is not None:
            route.looks_used.cancel()  # it would keep this engine in memory for as long as it waits
        self._drop_frames(route.route_id)
        stores = not self._is_closing  # what is in memory goes with the process, and disks have it already
        if await self.runner.call(lambda: self._executor.leave_route(route.route_id, stores=stores)):
            self._left.left(route.route_id, len(self.routes) + 1)
        self._observer.route_ended(route.route_id)
        if route.sending_back is not None:
            await route.sending_back.close()
        if route.link is not None:
            await route.link.close()

    def handed(self, route_ids: Iterable[int]) -> None:
        """Lanes of these routes were taken over: they stay for a while, as if an epoch had left them here."""
        for route_id in route_ids:
            self._left.left(route_id, ROUTES_MAX)

    async def _forget_left(self, route_id: int) -> None:
        async with self._changing:
            # Left again while this waited for the lock, and reported to its coordinator: the time starts again.
            if not (self._is_closing or self._left.is_waiting(route_id)):
                await self.runner.call(lambda: self._executor.forget_left(route_id))

    async def end_all(self) -> None:
        """End every route, for good; their streams close with it."""
        async with self._changing:
            self._is_closing = True
            for route in list(self.routes.values()):
                await self._end(route, NotReadyError(f"stage {route.stage_index} was told to end"))
            self._left.close()

    async def settled(self) -> None:
        """Wait for the ends that are under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
