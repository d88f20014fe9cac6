"""Pipelines that announce themselves on the local network, as this host hears them. Blocks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayline.wire.common import bounds
from relayline.wire.common.errors import StartError
from relayline.wire.links.announcement import SERVICE_TYPE, Announcement, read_announcement

if TYPE_CHECKING:
    from zeroconf import Zeroconf

LOOK_S = 2.5  # zeroconf asks at once and after a second
_INFO_MS = 2_000  # most often it came with the answer


def pipelines_nearby(seconds: float = LOOK_S, interfaces: Sequence[str] = ()) -> list[Announcement]:
    """Return the pipelines that answer within `seconds`, by name; NEARBY_MAX at most.

    `interfaces`: addresses of those to ask on; by default all. Raises StartError where this host cannot ask.
    """
    try:
        from zeroconf import InterfaceChoice, IPVersion, ServiceBrowser, Zeroconf
    except ImportError as error:
        raise StartError(
            "to look for pipelines takes the package zeroconf: `make setup` installs it; `relayline join HOST CODE` "
            "works without"
        ) from error
    listener = _Listener()
    try:
        network = Zeroconf(interfaces=list(interfaces) or InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"this host cannot ask the local network for pipelines: {error}; `relayline join HOST CODE` works without"
        ) from error
    try:
        ServiceBrowser(network, SERVICE_TYPE, listener=listener)
        threading.Event().wait(seconds)
        with concurrent.futures.ThreadPoolExecutor(bounds.NEARBY_MAX) as pool:  # so one that says no more delays none
            found = list(pool.map(lambda name: _info(network, name), listener.names()))
    finally:
        network.close()
    return sorted((each for each in found if each is not None), key=lambda each: (each.pipeline, each.addresses))


class _Listener:
    """Hears of services on zeroconf's thread."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Those heard of that are still there, the first ones first."""
        with self._lock:
            return list(self._names)

    def add_service(self, network: Zeroconf, kind: str, name: str) -> None:
        """Take one that has come."""
        with self._lock:
            if len(self._names) < bounds.NEARBY_MAX:
                self._names[name] = None

    def update_service(self, network: Zeroconf, kind: str, name: str) -> None:
        """Do nothing: what is said of it is read at the end."""

    def remove_service(self, network: Zeroconf, kind: str, name: str) -> None:
        """Forget one that has gone."""
        with self._lock:
            self._names.pop(name, None)


def _info(network: Zeroconf, name: str) -> Announcement | None:
    info = network.get_service_info(SERVICE_TYPE, name, _INFO_MS)
    if info is None:
        return None
    return read_announcement(info.properties, info.port or 0, info.parsed_addresses())
