"""What a pipeline tells the local network about itself: DNS-SD over multicast DNS (RFC 6762, 6763). Pure.

    llama70b-4f2a09c1._relayline._tcp.local.    SRV: port of enrolment; A: addresses; TXT: the fields below

Nothing in it is secret, and nobody who reads it has to believe it: joining trusts the code or the token alone.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence

from relayline.wire.common import bounds
from relayline.wire.common.texts import counted, printable, whole_number
from relayline.wire.links.security import is_loopback

SERVICE_TYPE = "_relayline._tcp.local."
NONE_NEARBY = (
    "no pipeline announces itself on this network; it may be on another subnet, multicast (UDP 5353) may be "
    "blocked, it may serve loopback alone, or `coordinator.announce` is off"
)
_LABEL_BYTES_MAX = 63
_COUNT_MAX = 9_999


@dataclasses.dataclass(frozen=True, slots=True)
class Announcement:
    """One pipeline."""

    pipeline: str
    """Its name."""
    model: str
    """Name of its model; empty where it is not known."""
    version: str
    """Of the coordinator's software."""
    n_stages: int
    """That belong to it."""
    n_awaited: int
    """Those of them that have not joined."""
    port: int
    """Where hosts get their certificates."""
    addresses: tuple[str, ...]
    """Of the coordinator, IPv4, NEARBY_ADDRESSES_MAX at most."""

    @property
    def state(self) -> str:
        """For people: whether it waits for stages."""
        return (
            f"waits for {self.n_awaited} of {counted(self.n_stages, 'stage')}"
            if self.n_awaited
            else "all stages are there"
        )

    def instance(self, mark: str) -> str:
        """Return the service's whole name. `mark` tells it from that of another pipeline of this name."""
        label = "".join(char if char.isalnum() or char == "-" else "-" for char in self.pipeline or "pipeline")
        return f"{label[: _LABEL_BYTES_MAX - 1 - len(mark)]}-{mark}.{SERVICE_TYPE}"

    @property
    def properties(self) -> dict[str, str]:
        """The TXT record."""
        texts = {"pipeline": self.pipeline, "model": self.model, "version": self.version}
        counts = {"stages": str(self.n_stages), "awaited": str(self.n_awaited)}
        return {key: _cut(text) for key, text in texts.items()} | counts


def read_announcement(
    properties: Mapping[bytes, bytes | None], port: int, addresses: Sequence[str]
) -> Announcement | None:
    """Return what another host announces, fit to be shown; None for what cannot be one.

    `properties` are those of a TXT record, of any content.
    """

    def text(key: str) -> str:
        raw = (properties.get(key.encode()) or b"")[: bounds.NEARBY_TEXT_BYTES_MAX]
        return printable(raw.decode(errors="replace"), bounds.NEARBY_TEXT_BYTES_MAX)

    def count(key: str) -> int:
        return min(whole_number(text(key), bounds.NEARBY_TEXT_BYTES_MAX) or 0, _COUNT_MAX)

    if not text("pipeline") or not 0 < port <= 65_535 or not addresses:
        return None
    first = tuple(addresses[: bounds.NEARBY_ADDRESSES_MAX])
    return Announcement(
        text("pipeline"), text("model"), text("version"), count("stages"), count("awaited"), port, first
    )


def announced_addresses(listens: str, host: Sequence[str], machine: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses to announce: IPv4, beyond loopback; none where nothing else is listened on.

    `listens`: the address of the listener. `host`: addresses of the coordinator's own host name. `machine`: those of
    all interfaces. The first NEARBY_ADDRESSES_MAX of them are taken.
    """
    if is_loopback(listens):
        return ()
    if not _is_any(listens):
        return tuple(_outer([listens]))
    return tuple(_outer(host) or _outer(machine))


def _outer(addresses: Sequence[str]) -> list[str]:
    found = [address for address in addresses if _is_ipv4(address) and not is_loopback(address)]
    return found[: bounds.NEARBY_ADDRESSES_MAX]


def _is_ipv4(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False


def _is_any(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _cut(text: str) -> str:
    return text.encode()[: bounds.NEARBY_TEXT_BYTES_MAX].decode(errors="ignore")
