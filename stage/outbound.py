"""The way of a step's results from the decode thread to the next stage and to the coordinators. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from relayline.stage.epochs import Epochs
from relayline.stage.observe.observer import StageObserver
from relayline.stage.observe.stats import StageStats
from relayline.stage.routes import Route
from relayline.stage.steps.runner import Runner
from relayline.stage.steps.step_types import RouteOutput, StepResult
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes import trace_context
from relayline.wire.links.eager import Begun

_Send: TypeAlias = "tuple[Route, RouteOutput, Begun[int] | None]"


class Outbound:
    """Carries the results of one engine's steps away, in the order of the steps."""

    def __init__(self, epochs: Epochs, stats: StageStats, observer: StageObserver, on_step: Callable[[], None]) -> None:
        """`on_step` is called once a step's results are under way."""
        self._epochs, self._routes = epochs, epochs.routes
        self._stats, self._observer, self._on_step = stats, observer, on_step
        # Bounded by runner.OUTBOX_STEPS_MAX: the decode thread takes no step while that many are unsent.
        self._sends: asyncio.Queue[list[_Send]] = asyncio.Queue()
        self._dropped: set[int] = set()  # keys of states, of which there are at most STORED_STATES_MAX
        self._n_unsent = 0  # steps whose envelopes have not all left
        self.runner: Runner  # set by StageService.attach, before the server starts

    def deliver(self, result: StepResult) -> None:
        """Carry one step's results away; called on the event loop in step order."""
        sends: list[_Send] = []
        for output in result.outputs:
            route = self._routes.get(output.route_id)
            if route is None or route.epoch != output.epoch:
                continue  # buffers of an ended epoch go with their link
            if output.granted and route.sending_back is not None:  # first: stage 0 waits for these tokens
                route.sending_back.push(output.granted)
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
        self._on_step()
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

    def dropped(self, key: int) -> None:
        """The tier does not have a state, or not any more: all coordinators are told, once for all of a moment."""
        if not self._dropped:
            asyncio.get_running_loop().call_soon(self._tell_dropped)
        self._dropped.add(key)

    def _tell_dropped(self) -> None:
        keys, self._dropped = sorted(self._dropped), set()
        for route in list(self._routes.values()):
            route.report(RouteOutput(route.route_id, route.epoch, dropped_keys=keys))

    async def send_forever(self) -> None:
        """Send every step's envelopes, one step after the other: gRPC allows one write at a time per stream."""
        while True:
            for route, output, begun in await self._sends.get():
                try:
                    payload_bytes = await (begun or _sending(route, output))
                except RelaylineError as error:
                    self._epochs.link_lost(route, error)
                    continue
                self._stats.envelopes["out"] += 1
                self._stats.payload_bytes["out"] += payload_bytes
            self._n_unsent -= 1
            self.runner.sent()


async def _sending(route: Route, output: RouteOutput) -> int:
    """Send a step's envelope of one route; returns its payload bytes. Raises the loss of its link."""
    link, buffer = route.link, output.buffer
    assert link is not None
    assert buffer is not None
    payload_bytes = buffer.payload_bytes
    await link.send(buffer, output.message)
    return payload_bytes
