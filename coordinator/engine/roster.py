"""The addresses of a pipeline's stages: given once, or reported by the stages that join.

The pipeline asks before every epoch. It is notified when an epoch must end because a member left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from relayline.coordinator.engine.membership import Introduction, Membership, Place
from relayline.wire.common.errors import NotReadyError, RelaylineError, StageLostError, UnauthenticatedError
from relayline.wire.common.phase import HostState
from relayline.wire.common.texts import named_stage
from relayline.wire.links.revocation import IS_REVOKED
from relayline.wire.links.roles import Credential, Identity, Role
from relayline.wire.links.security import credential_host, host_of, is_loopback

log = logging.getLogger("relayline.coordinator")

OnLost = Callable[[RelaylineError], None]
OnHeard = Callable[[int], None]


class Roster(Protocol):
    """The pipeline's view of where its stages are. Event loop only."""

    @property
    def joins(self) -> bool:
        """Whether stages come by themselves, so that it is not a failure if none is here yet."""

    async def present(self) -> tuple[str, ...]:
        """Wait until every stage is known to serve; return their addresses (host:port) in layer order."""

    def watch(self, on_lost: OnLost, on_heard: OnHeard = lambda index: None) -> None:
        """Have `on_lost` called whenever a stage that was among `present()` no longer is.

        `on_heard` is called with the index of a stage that sent a heartbeat here.
        """

    def addresses(self) -> Sequence[str]:
        """Return the known addresses, in layer order; empty strings for unknown ones."""

    def identities(self) -> Sequence[Identity | None]:
        """Return which stage is at each address, in layer order; None for one that is not known."""

    def missing(self) -> list[str]:
        """Return the names of the stages that are waited for."""

    def describe(self) -> list[dict[str, object]]:
        """Return JSON-ready facts of each stage in layer order."""

    def describe_idle(self) -> list[dict[str, object]]:
        """Return the same of those that hold no layers."""

    def names(self) -> list[str]:
        """Return the names of all places, by index; none where stages have no names."""

    @property
    def holders(self) -> tuple[int, ...]:
        """Return the places that hold layers, in layer order; () for the first ones."""


def default_names(n_stages: int) -> tuple[str, ...]:
    """Return the default names of stages."""
    return tuple(f"stage-{index}" for index in range(n_stages))


class StaticRoster:
    """Addresses that were given at the start."""

    joins = False

    def __init__(self, addresses: Sequence[str], names: Sequence[str] = ()) -> None:
        self._addresses = tuple(addresses)
        self._names = tuple(names) or default_names(len(self._addresses))

    async def present(self) -> tuple[str, ...]:
        """Return the addresses; calls will show whether stages are there."""
        return self._addresses

    def watch(self, on_lost: OnLost, on_heard: OnHeard = lambda index: None) -> None:
        """Never notifies anybody: the addresses are fixed."""

    def addresses(self) -> Sequence[str]:
        """Return the addresses."""
        return self._addresses

    def identities(self) -> Sequence[Identity | None]:
        """Return the stages that are to be there: of a name each, on the host of its address."""
        named = zip(self._addresses, self._names, strict=False)
        return [Identity(Role.STAGE, credential_host(host_of(address)), name) for address, name in named]

    def missing(self) -> list[str]:
        """Return nothing: no stage is awaited."""
        return []

    def describe(self) -> list[dict[str, object]]:
        """Return nothing beyond the addresses."""
        return [{} for _ in self._addresses]

    def describe_idle(self) -> list[dict[str, object]]:
        """Return nothing: only a place can be one without layers."""
        return []

    def names(self) -> list[str]:
        """Return nothing: places have names."""
        return []

    @property
    def holders(self) -> tuple[int, ...]:
        """Return nothing: every address is one of a stage that holds layers."""
        return ()


class JoinedRoster:
    """The members of the moment. `coordinator.joining.members` carries the stages' reports here."""

    joins = True

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._complete = asyncio.Event()
        self._on_lost: OnLost = lambda error: None
        self._on_heard: OnHeard = lambda index: None
        self.on_change: Callable[[Place], None] = lambda place: None
        """Called with a place whose state has changed, or that got on with its artifact."""
        self.is_closing = False  # whether stages leave because this coordinator stops
        self.idle_state: Callable[[Place], HostState] = lambda place: HostState.SPARE
        """Says in which way a place without layers stands by."""
        self.relay_figures: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        """Returns what the relay carries for each relayed stage, by name."""

    # --- queries of the pipeline --------------------------------------------------------------------------------------

    async def present(self) -> tuple[str, ...]:
        """Wait until every place is taken by a stage that serves."""
        while (addresses := self._membership.addresses()) is None:
            self._complete.clear()
            await self._complete.wait()
        return addresses

    def watch(self, on_lost: OnLost, on_heard: OnHeard = lambda index: None) -> None:
        """Have `on_lost` called when a serving member leaves or returns, `on_heard` at each heartbeat."""
        self._on_lost, self._on_heard = on_lost, on_heard

    def addresses(self) -> Sequence[str]:
        """Return the addresses known now."""
        return [place.address for place in self._membership.held()]

    def identities(self) -> Sequence[Identity | None]:
        """Return the names in the members' credentials."""
        shown = [place.member.credential if place.member is not None else None for place in self._membership.held()]
        return [credential.identity if credential is not None else None for credential in shown]

    def ask_of_revoked(self, is_revoked: Callable[[Credential], bool]) -> None:
        """Let a name pass on to another holder once `is_revoked` says so of its credential."""
        self._membership.is_revoked = is_revoked

    def missing(self) -> list[str]:
        """Return the names of the places that hold layers and do not serve."""
        return self._membership.missing()

    def describe(self) -> list[dict[str, object]]:
        """Return the state of every place that holds layers."""
        return self._with_relay(self._membership.describe(time.monotonic_ns()))

    def describe_idle(self) -> list[dict[str, object]]:
        """Return the state of every place that holds none."""
        return self._with_relay(self._membership.describe_idle(time.monotonic_ns()))

    def _with_relay(self, entries: list[dict[str, object]]) -> list[dict[str, object]]:
        figures = self.relay_figures()
        carried = [figures.get(str(entry["name"])) for entry in entries]
        return [entry | ({"relay": dict(each)} if each else {}) for entry, each in zip(entries, carried, strict=True)]

    def names(self) -> list[str]:
        """Return the names of all places, by index."""
        return [place.name for place in self.places]

    @property
    def places(self) -> Sequence[Place]:
        """Every place, by index."""
        return self._membership.places

    @property
    def holders(self) -> tuple[int, ...]:
        """The places that hold layers, in layer order."""
        return self._membership.holders

    def add(self, name: str) -> Place:
        """Add a place that holds no layers."""
        place = self._membership.add(name, time.monotonic_ns())
        self.on_change(place)
        return place

    # --- reports of the stages ----------------------------------------------------------------------------------------

    def check(self, who: Introduction) -> Place:
        """Return the place that a stage may take. Raises as Membership.check."""
        return self._membership.check(who)

    def join(self, who: Introduction) -> int:
        """Give a stage its place; returns its ticket. Raises as Membership.check."""
        place = self._membership.check(who)
        self._lose_if_serving(place, f"{named_stage(who.name)} joined again")
        ticket = self._membership.join(who, time.monotonic_ns())
        fields = {"stage": who.name, "index": place.index, "from": who.host, "hostname": who.hostname}
        log.info("stage joined", extra={"fields": fields})
        self.on_change(place)
        return ticket

    def place_of(self, ticket: int) -> Place | None:
        """Return the place that a membership holds, None when it has ended."""
        return self._membership.place_of(ticket)

    def heard(self, ticket: int) -> None:
        """Note that a member sent a heartbeat."""
        place = self._membership.place_of(ticket)
        if place is not None and place.index in self.holders:
            self._on_heard(self.holders.index(place.index))

    def progress(self, ticket: int, state: HostState, done_bytes: int, total_bytes: int, trouble: str = "") -> None:
        """Note how far a member is, and why it does not get on. One that served until now no longer does."""
        place = self._membership.place_of(ticket)
        if place is None or place.index not in self.holders:
            return
        self._lose_if_serving(place, f"{named_stage(place.name)} is loading again")
        changed = place.state is not state
        if changed:
            log.info("stage is %s", state.value, extra={"fields": {"stage": place.name, "bytes": total_bytes}})
        self._membership.progress(ticket, state, done_bytes, total_bytes, time.monotonic_ns(), trouble)
        self.on_change(place)

    def serving(self, ticket: int, address: str, instance_id: str) -> None:
        """Note that a member serves at an address; the last one missing makes the pipeline whole."""
        place = self._membership.place_of(ticket)
        if place is None or (place.address, place.instance_id) == (address, instance_id):
            return
        if place.index not in self.holders:
            return  # it has not heard yet that its layers are others' now
        self._lose_if_serving(place, f"{named_stage(place.name)} now serves at another address")
        self._membership.serving(ticket, address, instance_id, time.monotonic_ns())
        missing = self._membership.missing()
        fields = {"stage": place.name, "address": address, "waiting_for": ",".join(missing) or "nobody"}
        log.info("stage serves", extra={"fields": fields})
        self.on_change(place)
        if not missing:
            for text in loopback_gaps(self._membership.held()):
                log.warning("%s", text)
            self._complete.set()

    def switching(self, holders: tuple[int, ...]) -> None:
        """These places take up other layers, and no epoch stands: each is waited for until it says that it serves."""
        now_ns = time.monotonic_ns()
        self._membership.holders = holders
        for place in self._membership.held():
            if place.member is not None:
                self._membership.progress(place.ticket, HostState.LOADING, 0, 0, now_ns)
                self.on_change(place)
        for place in self._membership.idle():
            if place.member is not None:
                self.stands_by(place)

    def stands_by(self, place: Place) -> None:
        """Note that the member at a place holds no layers."""
        before, state = place.state, self.idle_state(place)
        if place.member is None and state is HostState.SPARE:
            state = HostState.LOST if place.process_id else HostState.WAITING
        self._membership.stands_by(place, state, time.monotonic_ns())
        if place.state is not before:
            log.info("stage holds no layers", extra={"fields": {"stage": place.name, "state": place.state.value}})
            self.on_change(place)

    def failed(self, ticket: int, reason: str) -> None:
        """Note why a member is about to leave."""
        place = self._membership.place_of(ticket)
        if place is not None:
            log.warning("stage failed", extra={"fields": {"stage": place.name, "reason": reason}})
            self._membership.failed(ticket, reason)

    def leave(self, ticket: int, reason: str, *, is_in_order: bool = False) -> None:
        """End a membership. `is_in_order`: the stage said so itself; unless it has failed, no request is to blame."""
        place = self._membership.place_of(ticket)
        if place is None:
            return
        kind: type[RelaylineError] = NotReadyError if is_in_order and not place.failure else StageLostError
        reason = place.failure or reason
        if self._membership.is_shut_out(place):
            kind, reason = UnauthenticatedError, f"its credential {IS_REVOKED}"
            self._membership.failed(ticket, reason)
        self._lose_if_serving(place, f"{named_stage(place.name)} left: {reason}", kind)
        self._membership.leave(ticket, time.monotonic_ns())
        if place.index not in self.holders:
            self.stands_by(place)
        fields = {"stage": place.name, "reason": reason, "waiting_for": ",".join(self._membership.missing())}
        log.log(logging.DEBUG if self.is_closing else logging.WARNING, "stage left", extra={"fields": fields})
        self.on_change(place)

    def _lose_if_serving(self, place: Place, reason: str, kind: type[RelaylineError] = StageLostError) -> None:
        if place.state is HostState.READY:
            error = kind(reason)
            if place.index in self.holders:
                error.stage_index = self.holders.index(place.index)
            self._on_lost(error)


def loopback_gaps(places: Sequence[Place]) -> list[str]:
    """Return a line for every stage that its upstream neighbour cannot reach: loopback means another host there."""
    lines = []
    for upstream, place in itertools.pairwise(places):
        if is_loopback(host_of(place.address)) and not is_loopback(host_of(upstream.address)):
            lines.append(
                f"{named_stage(place.name)} is at {place.address}, which {upstream.name} at {upstream.address} cannot "
                f"reach; let {place.name} join through an address of this host that others can reach, or give it "
                "--advertise"
            )
    return lines
