"""The members of the pipeline: which places are taken, how far each member is, where it serves. Pure.

A member holds a place from the moment it is let in until its membership ends. While it is there, no other process gets
its place: a typing error on a second host cannot push a running stage out. The same process may always take its own
place again, because its older membership is then known to be dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from relayline.wire.common import bounds
from relayline.wire.common.errors import PlaceTakenError, UnauthenticatedError, UsageError, VersionError
from relayline.wire.common.phase import HostState
from relayline.wire.common.texts import named_stage
from relayline.wire.links.roles import Credential


@dataclasses.dataclass(frozen=True, slots=True)
class Introduction:
    """A joining stage's description of itself. `host` is its address as the coordinator sees it."""

    name: str
    process_id: str
    protocol_version: int
    software_version: str
    host: str
    hostname: str = ""
    system: str = ""
    n_cores: int = 0
    memory_bytes: int = 0
    credential: Credential | None = None
    """The credential that it has shown; None where links have none."""
    memory_available_bytes: int = 0
    """Memory available to new processes when it joined; 0: unknown."""
    processor: str = ""
    engine_version: str = ""
    """Of llama.cpp's binding."""
    measures: bool = False
    """Whether it can be surveyed."""
    is_relayed: bool = False
    """Whether others reach it through the coordinator's relay alone."""


@dataclasses.dataclass(slots=True)
class Place:
    """One place of the pipeline and, while `member` is set, its holder."""

    index: int
    name: str
    state: HostState = HostState.WAITING
    since_ns: int = 0  # of the state
    ticket: int = 0  # of the membership that holds the place, or held it last
    member: Introduction | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    trouble: str = ""  # why no bytes come just now
    address: str = ""
    instance_id: str = ""
    failure: str = ""  # why the last member left, when it said so
    process_id: str = ""  # of the member, or of the last one
    n_restarts: int = 0  # processes that have held it, but for the first
    holder: Credential | None = None  # whose credential the name is bound to, also while that member is away


class Membership:
    """The places of one pipeline. Times are monotonic nanoseconds of the caller."""

    def __init__(self, names: Sequence[str], software_version: str, now_ns: int, holders: tuple[int, ...] = ()) -> None:
        """`holders`: the places that hold layers, in layer order; by default all."""
        self.is_revoked: Callable[[Credential], bool] = lambda credential: False
        """Whether a name may pass on from the holder of this credential to another."""
        self.places = [Place(index, name, since_ns=now_ns) for index, name in enumerate(names)]
        self.holders = holders or tuple(range(len(names)))
        """The places that hold layers, in layer order; see coordinator.engine.moves."""
        self._software_version = software_version
        self._tickets = 0

    def check(self, who: Introduction) -> Place:
        """Return the place that this stage may take.

        Raises UsageError for an unknown name, UnauthenticatedError for a credential of another stage or one other than
        the first that joined under the name, VersionError for another protocol, and PlaceTakenError while another
        process holds the place.
        """
        place = next((place for place in self.places if place.name == who.name), None)
        if place is None:
            known = ", ".join(place.name for place in self.places)
            raise UsageError(f"this pipeline has no stage {who.name!r}; its stages are {known}")
        self._check_credential(place, who.credential)
        if who.protocol_version != bounds.PROTOCOL_VERSION:
            raise VersionError(
                f"{named_stage(who.name)} (relayline {who.software_version or '?'}) speaks protocol "
                f"{who.protocol_version}, this coordinator (relayline {self._software_version}) protocol "
                f"{bounds.PROTOCOL_VERSION}; upgrade the older one; the stage waits until then"
            )
        holder = place.member
        if holder is not None and holder.process_id != who.process_id:
            raise PlaceTakenError(
                f"{named_stage(who.name)} is already here, from {holder.host} ({holder.hostname}); "
                f"end that one first, or join under another name"
            )
        return place

    def _check_credential(self, place: Place, shown: Credential | None) -> None:
        identity = shown.identity if shown is not None else None
        if identity is not None and identity.name != place.name:
            raise UnauthenticatedError(f"this credential is for {identity}; it cannot join as {place.name}")
        holder = place.holder
        if holder is not None and identity != holder.identity and not self.is_revoked(holder):
            raise UnauthenticatedError(
                f"the name {place.name} belongs to {holder.identity}, which joined first; to move it, revoke that "
                "credential with `relayline certs revoke`, or restart the coordinator"
            )

    def join(self, who: Introduction, now_ns: int) -> int:
        """Give a stage its place and return the ticket of this membership. Raises as `check`."""
        place = self.check(who)
        self._tickets += 1
        place.ticket, place.member, place.holder = self._tickets, who, who.credential or place.holder
        place.n_restarts += place.process_id not in ("", who.process_id)
        place.process_id = who.process_id
        place.address = place.instance_id = place.failure = place.trouble = ""
        place.done_bytes = place.total_bytes = 0
        self._enter(place, HostState.STARTING, now_ns)
        return place.ticket

    def place_of(self, ticket: int) -> Place | None:
        """Return the place that a membership holds, None when it has ended or was replaced."""
        return next((place for place in self.places if place.member is not None and place.ticket == ticket), None)

    def progress(
        self, ticket: int, state: HostState, done_bytes: int, total_bytes: int, now_ns: int, trouble: str = ""
    ) -> None:
        """Note how far a member is, and why it does not get on. A membership that has ended changes nothing."""
        place = self.place_of(ticket)
        if place is not None:
            place.done_bytes, place.total_bytes, place.trouble = done_bytes, total_bytes, trouble
            place.address = place.instance_id = ""
            self._enter(place, state, now_ns)

    def serving(self, ticket: int, address: str, instance_id: str, now_ns: int) -> None:
        """Note where a member serves (host:port). A membership that has ended changes nothing."""
        place = self.place_of(ticket)
        if place is not None:
            place.address, place.instance_id = address, instance_id
            self._enter(place, HostState.READY, now_ns)

    def failed(self, ticket: int, reason: str) -> None:
        """Record the failure that a member reports; it leaves after that."""
        place = self.place_of(ticket)
        if place is not None:
            place.failure = reason

    def leave(self, ticket: int, now_ns: int) -> Place | None:
        """End a membership; returns the place that it freed, None when it held none any more."""
        place = self.place_of(ticket)
        if place is not None:
            place.member, place.address, place.instance_id = None, "", ""
            self._enter(place, HostState.LOST, now_ns)
        return place

    def add(self, name: str, now_ns: int) -> Place:
        """Add a place that holds no layers."""
        place = Place(len(self.places), name, since_ns=now_ns)
        self.places.append(place)
        return place

    def is_shut_out(self, place: Place) -> bool:
        """Return whether the credential of a place's member was revoked since it joined."""
        shown = place.member.credential if place.member is not None else None
        return shown is not None and self.is_revoked(shown)

    def held(self) -> list[Place]:
        """Return the places that hold layers, in layer order."""
        return [self.places[index] for index in self.holders]

    def idle(self) -> list[Place]:
        """Return the places that hold none."""
        return [place for place in self.places if place.index not in self.holders]

    def missing(self) -> list[str]:
        """Return the names of the places that hold layers and do not serve yet, in layer order."""
        return [place.name for place in self.held() if place.state is not HostState.READY]

    def addresses(self) -> tuple[str, ...] | None:
        """Return where every stage serves, in layer order; None while one is missing."""
        if self.missing():
            return None
        return tuple(place.address for place in self.held())

    def stands_by(self, place: Place, state: HostState, now_ns: int) -> None:
        """Note of a place whose member holds no layers in which way it stands by."""
        place.address = place.instance_id = ""
        place.done_bytes = place.total_bytes = 0
        self._enter(place, state, now_ns)

    def describe(self, now_ns: int) -> list[dict[str, object]]:
        """Return one JSON-ready entry per place that holds layers, in layer order."""
        return [_describe(place, now_ns) for place in self.held()]

    def describe_idle(self, now_ns: int) -> list[dict[str, object]]:
        """Return the same of the others."""
        return [_describe(place, now_ns) for place in self.idle()]

    def _enter(self, place: Place, state: HostState, now_ns: int) -> None:
        if place.state is not state:
            place.state, place.since_ns = state, now_ns


def _describe(place: Place, now_ns: int) -> dict[str, object]:
    entry: dict[str, object] = {
        "name": place.name,
        "state": place.state.value,
        "state_s": (now_ns - place.since_ns) / 1e9,
        "restarts": place.n_restarts,
    }
    if place.state is HostState.FETCHING:
        entry["fetched_bytes"], entry["fetch_total_bytes"] = place.done_bytes, place.total_bytes
        entry["fetch_trouble"] = place.trouble
    elif place.state is HostState.LOADING:
        entry["loaded_bytes"], entry["load_total_bytes"] = place.done_bytes, place.total_bytes
    if place.member is not None:
        entry["host"] = {
            "address": place.member.host,
            "hostname": place.member.hostname,
            "system": place.member.system,
            "cores": place.member.n_cores,
            "memory_bytes": place.member.memory_bytes,
            "memory_available_bytes": place.member.memory_available_bytes,
            "processor": place.member.processor,
            "engine_version": place.member.engine_version,
            "version": place.member.software_version,
            "is_relayed": place.member.is_relayed,
        }
    elif place.failure:
        entry["failure"] = place.failure
    return entry
