"""Announces a pipeline on the local network for as long as hosts can enrol; the words are `wire.links.announcement`.

zeroconf does the work, on a thread of its own: the event loop sees none of the packets of multicast DNS. A network
without multicast is one line in the log, and nothing else is different.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from relayline.coordinator.engine.membership import Place
from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import EnrolConfig
from relayline.wire.common import bounds
from relayline.wire.common.phase import HostState
from relayline.wire.common.versions import version_of
from relayline.wire.links.announcement import SERVICE_TYPE, Announcement, announced_addresses
from relayline.wire.links.security import LinkSecurity, host_of, is_loopback, port_of

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger("relayline.coordinator")

_MARK_BYTES = 4  # so that no two coordinators of a network have one name
_ABSENT = (HostState.WAITING, HostState.LOST)


@contextlib.asynccontextmanager
async def announced(
    config: EnrolConfig | None, security: LinkSecurity, roster: JoinedRoster, address: str
) -> AsyncIterator[None]:
    """Announce a pipeline for the length of a with block, unless it is not to be, or other hosts cannot reach it.

    `address`, host:port, is where hosts enrol. `roster` has the stages that are awaited.
    """
    identity = security.identity
    if config is None or not config.announce or identity is None or is_loopback(identity.host):
        yield
        return

    def current(addresses: tuple[str, ...]) -> Announcement:
        n_awaited = sum(place.state in _ABSENT for place in roster.places)
        n_stages, port = len(roster.places), port_of(address)
        return Announcement(config.pipeline, config.model, version_of(), n_stages, n_awaited, port, addresses)

    addresses = await asyncio.to_thread(_addresses, host_of(address), identity.host)
    if not addresses:
        yield
        return
    announcer = Announcer(lambda: current(addresses))
    before = roster.on_change

    def on_change(place: Place) -> None:
        before(place)
        announcer.changed()

    roster.on_change = on_change
    announcer.begin()
    try:
        yield
    finally:
        if roster.on_change is on_change:
            roster.on_change = before
        await announcer.close()


class Announcer:
    """Keeps one announcement current. Event loop only, but for what runs in threads."""

    def __init__(self, current: Callable[[], Announcement], interfaces: tuple[str, ...] = ()) -> None:
        """`current` returns what holds now. `interfaces`: addresses of those to announce on; by default all."""
        self._current, self._interfaces = current, interfaces
        self._is_changed, self._is_closing = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None
        self.said: Announcement | None = None
        """What the network was told last; None: nothing."""

    def begin(self) -> None:
        """Announce in the background."""
        self._task = asyncio.create_task(self._keep())

    def changed(self) -> None:
        """Look again at what is to be said."""
        self._is_changed.set()

    async def close(self) -> None:
        """Take the announcement back. Waits NEARBY_CLOSE_S at most."""
        self._is_closing = True
        self._is_changed.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=bounds.NEARBY_CLOSE_S)
            self._task.cancel()

    async def _keep(self) -> None:
        try:
            await self._announce()
        except Exception as error:  # a library, on networks of every kind; no fault of it may end a pipeline
            log.warning(
                "not announced on the local network: %s; hosts join with the coordinator's address", _why(error)
            )

    async def _announce(self) -> None:
        what = self._current()
        network, service = await asyncio.to_thread(_begin, what, self._interfaces)
        self.said = what
        fields = {"as": service.name.removesuffix(f".{SERVICE_TYPE}"), "addresses": ", ".join(what.addresses)}
        log.info("announced on the local network", extra={"fields": fields})
        try:
            while not self._is_closing:
                what = self._current()
                if what != self.said:
                    service = await asyncio.to_thread(_update, network, service, what)
                    self.said = what
                await self._is_changed.wait()
                self._is_changed.clear()
        finally:
            self.said = None
            await asyncio.to_thread(network.close)  # says good-bye for the service, too


def _begin(what: Announcement, interfaces: tuple[str, ...]) -> tuple[Zeroconf, ServiceInfo]:
    from zeroconf import InterfaceChoice, IPVersion, Zeroconf

    network = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All, ip_version=IPVersion.V4Only)
    try:
        # Both names are this process's own: two pipelines of one name that start at once do not see each other's.
        mark = secrets.token_hex(_MARK_BYTES)
        service = _service(what, what.instance(mark), f"relayline-{mark}.local.")
        network.register_service(service)
    except BaseException:
        network.close()
        raise
    return network, service


def _update(network: Zeroconf, before: ServiceInfo, what: Announcement) -> ServiceInfo:
    service = _service(what, before.name, before.server or before.name)
    network.update_service(service)
    return service


def _service(what: Announcement, name: str, server: str) -> ServiceInfo:
    from zeroconf import ServiceInfo

    return ServiceInfo(
        SERVICE_TYPE,
        name,
        port=what.port,
        properties=what.properties,
        server=server,
        parsed_addresses=list(what.addresses),
    )


def _addresses(listens: str, host: str) -> tuple[str, ...]:
    """Return the addresses to announce; looks up the coordinator's own host name, and those of the interfaces."""
    try:
        own = [str(found[4][0]) for found in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        own = []
    return announced_addresses(listens, own, _of_interfaces() if not own or all(map(is_loopback, own)) else ())


def _of_interfaces() -> list[str]:
    try:
        import ifaddr  # zeroconf's own
    except ImportError:
        return []
    return [str(each.ip) for adapter in ifaddr.get_adapters() for each in adapter.ips if each.is_IPv4]


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
