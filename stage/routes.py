"""Routes of a stage: one coordinator's use of it, with its epoch, its downstream link and its listeners.

Event loop only. The decode thread sees a route as `stage.steps.step_types.RouteWiring`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
from collections.abc import Callable

from relayline.stage.sending_back import SendingBack
from relayline.stage.steps.grants import Grants
from relayline.stage.steps.step_types import RouteOutput
from relayline.wire.common import bounds
from relayline.wire.common.errors import RelaylineError, StageLostError, StaleEpochError, UnauthenticatedError
from relayline.wire.common.texts import named_stage
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.links.roles import Identity
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

RETURN_QUEUE_MAX = 1_024  # unread return messages of a coordinator; one that lags further is cut off
LEFT_S = 120.0  # lanes left by an epoch are kept for the next for so long; coordinators wait as long by default
ROUTES_MAX = 64  # coordinators that may use one stage
UNUSED_S = 3 * bounds.HANDSHAKE_TIMEOUT_S  # a coordinator that began an epoch links to it, or has its neighbour do so


@dataclasses.dataclass(eq=False)
class Listener:
    """One Return stream: messages on their way to the coordinator. None ends it."""

    queue: asyncio.Queue[pb.ReturnResponse | None] = dataclasses.field(
        default_factory=lambda: asyncio.Queue(RETURN_QUEUE_MAX)
    )
    owed: pb.ReturnResponse | None = None
    """A message that found no room, and that may come later than others."""

    async def next(self) -> pb.ReturnResponse | None:
        """Return the next message for the coordinator; None at the end."""
        message = await self.queue.get()
        if message is not None and self.owed is not None and not self.queue.full():
            owed, self.owed = self.owed, None
            self.queue.put_nowait(owed)
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Upstream:
    """Whom a route takes work from, as its coordinator said."""

    shown_pass: str = ""
    """The proof it shows; empty: none."""
    name: str = ""
    """The upstream stage's name in its credential; empty: the coordinator itself, or a stage without credentials."""


ANY_UPSTREAM = Upstream()


class Route:
    """One coordinator's use of this stage at one epoch."""

    def __init__(
        self,
        route_id: int,
        epoch: int,
        stage_index: int,
        link: RelayLink | None,
        upstream: Upstream = ANY_UPSTREAM,
        owner: Identity | None = None,
        back: Upstream | None = None,
    ) -> None:
        """`owner`: the coordinator that began it; None where links have no credentials.

        `back`: the last stage, which may send tokens back here; None: none may.
        """
        self.route_id, self.epoch, self.stage_index = route_id, epoch, stage_index
        self.link, self.owner, self._upstream, self._back = link, owner, upstream, back
        self.has_back = False  # one link of the last stage per epoch
        self.grants = Grants()
        self.sending_back: SendingBack | None = None  # the last stage's link to stage 0
        self.envelopes_in = self.n_returned = 0  # envelopes that have come, messages that have gone to the coordinator
        self.has_upstream = False  # one upstream neighbour per epoch; another link is a mistake
        self.ended = asyncio.Event()  # upstream handlers and the sender leave when the epoch is over
        self.reason: RelaylineError = StaleEpochError(f"epoch {epoch} of this route is over")
        self.looks_used: asyncio.TimerHandle | None = None  # looks whether anyone linked to it
        self._listeners: list[Listener] = []

    def check_owner(self, who: Identity | None) -> None:
        """Raise UnauthenticatedError unless `who` is the coordinator that began this route."""
        if who != self.owner:
            raise UnauthenticatedError(f"this route of stage {self.stage_index} belongs to {self.owner}, not to {who}")

    def is_back(self, shown_pass: str) -> bool:
        """Return whether this pass is the last stage's, for tokens that it sends back."""
        return self._back is not None and hmac.compare_digest(shown_pass.encode(), self._back.shown_pass.encode())

    def check_upstream(self, who: Identity | None, shown_pass: str) -> None:
        """Raise UnauthenticatedError unless `who` may send work here: see `Upstream`."""
        expected = self._back if self._back is not None and self.is_back(shown_pass) else self._upstream
        if not hmac.compare_digest(shown_pass.encode(), expected.shown_pass.encode()):
            raise UnauthenticatedError(f"stage {self.stage_index} accepts work only with the pass of its epoch")
        if who is None:
            return
        is_right = who.name == expected.name if expected.name else who == self.owner
        if not is_right:
            owner = named_stage(expected.name) if expected.name else "its coordinator"
            raise UnauthenticatedError(f"stage {self.stage_index} accepts work from {owner}, not from {who}")

    def check_watcher(self, who: Identity | None, shown_pass: str) -> None:
        """Raise UnauthenticatedError unless `who` uses this route: its coordinator, or its upstream stage."""
        if not hmac.compare_digest(shown_pass.encode(), self._upstream.shown_pass.encode()):
            raise UnauthenticatedError(f"stage {self.stage_index} can be watched only with the pass of its epoch")
        if who is not None and who != self.owner and who.name != self._upstream.name:
            raise UnauthenticatedError(f"stage {self.stage_index} cannot be watched by {who}")

    def listen(self) -> Listener:
        """Add a Return stream."""
        listener = Listener()
        listener.queue.put_nowait(pb.ReturnResponse(epoch=self.epoch, stage_index=self.stage_index, subscribed=True))
        if self.sending_back is not None and self.sending_back.is_open:
            listener.queue.put_nowait(self._feeds_back())
        self._listeners.append(listener)
        return listener

    def _feeds_back(self) -> pb.ReturnResponse:
        return pb.ReturnResponse(epoch=self.epoch, stage_index=self.stage_index, feeds_back=True)

    def tell_feeds_back(self) -> None:
        """Tell the coordinator that tokens can be sent back to stage 0. Later listeners hear of it too."""
        for listener in self._listeners:
            if listener.queue.full():
                listener.owed = self._feeds_back()
            else:
                listener.queue.put_nowait(self._feeds_back())

    def unlisten(self, listener: Listener) -> None:
        """Remove a Return stream."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def is_reporting(self) -> bool:
        """Whether messages to the coordinator wait."""
        return any(not listener.queue.empty() for listener in self._listeners)

    def report(self, output: RouteOutput) -> None:
        """Pass one step's samples, faults and summaries to the coordinator as one message."""
        if not (output.samples or output.faults or output.progress or output.summaries or output.dropped_keys):
            return
        message = pb.ReturnResponse(
            epoch=output.epoch,
            stage_index=self.stage_index,
            samples=output.samples,
            faults=output.faults,
            progress=output.progress,
            summaries=output.summaries,
            dropped_keys=output.dropped_keys,
            batch_trace=output.context,
            sent_ns=output.sent_ns,
        )
        for listener in list(self._listeners):
            if listener.queue.full():
                self.end(StageLostError("the coordinator stopped reading its return stream"))
                return
            listener.queue.put_nowait(message)

    def report_lost(self, error: RelaylineError) -> None:
        """Tell the coordinator that the whole route is broken here."""
        fault = pb.SessionFault(
            session_id=0, stage_index=self.stage_index, label=error.label, message=error.message, retryable=True
        )
        self.report(RouteOutput(self.route_id, self.epoch, faults=[fault]))

    def end(self, reason: RelaylineError | None = None) -> None:
        """End the epoch: every stream of this route closes."""
        if reason is not None:
            self.reason = reason
        self.ended.set()
        for listener in self._listeners:
            if listener.queue.full():
                listener.queue.get_nowait()
            listener.queue.put_nowait(None)
        self._listeners.clear()


def check_newer(epoch: int, previous: int) -> None:
    """Hold the epoch that a coordinator begins against the one that it had here. Raises StaleEpochError."""
    if epoch <= previous:
        raise StaleEpochError(f"epoch {epoch} is not newer than {previous}")


class LeftRoutes:
    """Routes with lanes left by an ended epoch.

    They are forgotten after a while, unless they are left again before that. A killed coordinator never returns, and
    its next process has a new route. So no more routes are remembered than were in use when one of these was left; the
    oldest is forgotten first.
    """

    def __init__(self, forget: Callable[[int], None], after_s: float = LEFT_S) -> None:
        """`forget(route_id)` releases the lanes that are still left then."""
        self._forget, self._after_s = forget, after_s
        self._timers: dict[int, asyncio.TimerHandle] = {}  # the route left last is the last one
        self._n_in_use: dict[int, int] = {}  # routes, this one included, when it was left

    def left(self, route_id: int, n_in_use: int) -> None:
        """An epoch of the route has ended now. `n_in_use`: routes in use until then, this one included."""
        if timer := self._timers.pop(route_id, None):
            timer.cancel()
        self._timers[route_id] = asyncio.get_running_loop().call_later(self._after_s, self._expired, route_id)
        self._n_in_use[route_id] = n_in_use
        while len(self._timers) > max(self._n_in_use.values()):
            oldest = next(iter(self._timers))
            self._timers[oldest].cancel()
            self._expired(oldest)

    def is_waiting(self, route_id: int) -> bool:
        """Return whether the route's lanes are to stay for now."""
        return route_id in self._timers

    def _expired(self, route_id: int) -> None:
        del self._timers[route_id], self._n_in_use[route_id]
        self._forget(route_id)

    def close(self) -> None:
        """Forget nothing more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
