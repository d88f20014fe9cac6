"""The hosts that chats may name in addresses of images and audio: `--media-hosts`. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

PUBLIC = "*"  # any host with a public address
MEDIA_HOSTS_MAX = 64
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAME = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9_.-]{0,250}[a-z0-9])?\.?")


def read_media_hosts(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas, in lower case: HOST, *.HOST for the hosts below it, or *.

    Raises ValueError.
    """
    names = tuple(part.strip().lower() for part in text.split(","))
    if len(names) > MEDIA_HOSTS_MAX:
        raise ValueError(f"{len(names)} hosts; at most {MEDIA_HOSTS_MAX} can be named")
    for name in names:
        if name != PUBLIC and not _NAME.fullmatch(name) and _address_of(name.strip("[]")) is None:
            raise ValueError("give names of hosts separated by commas, such as example.org,*.example.com, or *")
    return names


def is_named(host: str, names: Sequence[str]) -> bool:
    """Whether some name of the list is this host's: it may be fetched from whatever its address is."""
    return any(_matches(host, name.strip("[]").rstrip(".")) for name in names if name != PUBLIC)


def may_be_asked(host: str, names: Sequence[str]) -> bool:
    """Whether a host may be fetched from, as far as its name tells: a name that * alone allows is looked up first."""
    if is_named(host, names):
        return True
    if _is_number(host):
        return PUBLIC in names and is_public(host)
    return bool(host) and PUBLIC in names


def is_public(text: str) -> bool:
    """Whether an IP address belongs to the internet, and not to a host, a local network or a group."""
    address = _address_of(text)
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        # Other ranges, and tunnels, may lead to an address of the other kind in a local network.
        if mapped is None and (address not in _GLOBAL_UNICAST or address.sixtofour or address.teredo):
            return False
        address = mapped or address
    return address is not None and address.is_global and not address.is_multicast


def _is_number(host: str) -> bool:
    """Whether a host is an IP address, or a number that systems read as one, such as 2130706433 and 127.1."""
    return ":" in host or host.replace(".", "").isdigit()


def _matches(host: str, name: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host == name or ((address := _address_of(name)) is not None and address == _address_of(host))


def _address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
