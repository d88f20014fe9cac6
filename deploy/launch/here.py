"""Finds the hosts of a manifest that are this machine, and the address at which other hosts find it.

A manifest is written for all machines at once, so it names this one as well. Processes on this machine's own hosts are
started here.
"""

from __future__ import annotations

import concurrent.futures
import ipaddress
import socket
from collections.abc import Callable, Sequence

from relayline.deploy.machine.addresses import addresses_of, is_this_machine
from relayline.deploy.manifest import Manifest, is_local
from relayline.wire.links.security import is_loopback

LOOKUP_S = 5.0  # for all names together; a name that is not found by then is another host's
_ANYWHERE = ("192.0.2.1", 9)  # no host has it (RFC 5737); the way there is the way out of this machine

_OF_KIND = {4: ("192.0.2.1", "127.0.0.1"), 6: ("2001:db8::1", "::1")}  # such a host (RFC 3849), and this machine alone

IsHere = Callable[[str], bool]
Facing = Callable[[str], str]


def facing(host: str) -> str:
    """Return this machine's address on the way to `host`, or out of the machine where it is not known; empty for none.

    Nothing is sent.
    """
    found = addresses_of(host)
    ways = [(family, (address, 9)) for family, address in found] or [(socket.AF_INET, _ANYWHERE)]
    for family, target in ways:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def reached_by(listens: str, host: str, way: Facing = facing) -> str:
    """Return where clients reach what listens on every interface: at `host`, this machine's, if they can.

    0.0.0.0 is every address of IPv4 alone, :: of IPv6. If `host` is an address of the other kind, it is this machine's
    own address of the right kind.
    """
    kind, other = _kind(listens), _kind(host)
    if not (kind and other) or kind == other:
        return host
    somewhere, loopback = _OF_KIND[kind]
    return loopback if is_loopback(host) else way(somewhere) or loopback


def _kind(host: str) -> int:
    """Return 4 or 6 for an address, 0 for a name."""
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return 0


def at_home(manifest: Manifest, is_here: IsHere = is_this_machine, way: Facing = facing) -> Manifest:
    """Return the manifest with `localhost` for every host that is this machine, and with a coordinator that the others
    can reach.

    The coordinator is here, so its own host is this machine. Where the manifest leaves `coordinator.host` away and
    stages are on other hosts, it becomes the address of this machine that faces them.
    """
    coordinator = manifest.spec.coordinator
    elsewhere = list(dict.fromkeys(stage.host for stage in manifest.members if not stage.is_local))
    if not elsewhere:
        return manifest
    here = {coordinator.host} | _those(elsewhere, is_here)
    data = manifest.model_dump(mode="json", by_alias=True, exclude_unset=True)
    away = []
    stages = data["spec"].get("stages", [])
    for stage in [*(stages if isinstance(stages, list) else []), *data["spec"].get("spares", [])]:
        if stage.get("host") in here and not is_local(stage["host"]):
            stage["host"] = "localhost"
        elif stage.get("host") in elsewhere:
            away.append(stage["host"])
    if away and "host" not in coordinator.model_fields_set and (address := way(away[0])) and not is_local(address):
        data["spec"].setdefault("coordinator", {})["host"] = address
    return Manifest.model_validate(data).with_directory(manifest.directory)


def _those(hosts: Sequence[str], is_here: IsHere) -> set[str]:
    """Return the hosts that are here; asked for side by side, because an unknown name takes seconds."""
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=len(hosts))
    asked = {pool.submit(is_here, host): host for host in hosts}
    done, _ = concurrent.futures.wait(asked, LOOKUP_S)
    pool.shutdown(wait=False, cancel_futures=True)
    return {asked[future] for future in done if future.result()}
