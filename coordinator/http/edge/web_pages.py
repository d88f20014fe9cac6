"""Keeping web pages out of a server that demands no key: any page that its user opens may send requests to it.

A browser says where a page is from (`Origin`) and under which name it found the server (`Host`). The name gives away a
page whose own name has been pointed at this machine (DNS rebinding): the browser takes both for one origin.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from relayline.coordinator.http.edge.cors import ANY
from relayline.coordinator.http.edge.errors import HttpRefusal
from relayline.coordinator.http.edge.middleware import OUTERMOST, refused
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import is_loopback

PROBE_PATHS = frozenset({"/health", "/v1/health", "/live"})  # probes name the server as they like, and learn nothing
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True, slots=True)
class PageRule:
    """Which names of the server, and which pages, are no strangers."""

    allowed: frozenset[str]  # names besides those of loopback, in lower case
    is_local: bool  # the server is reached on loopback only
    checks_names: bool  # otherwise it is unknown under which names the server is reached
    origins: frozenset[str] = frozenset()  # pages that may use the server, see coordinator.http.edge.cors; "*": all

    def problem(self, hosts: Iterable[str], origins: Iterable[str]) -> str | None:
        """Return why a request with these Host and Origin headers is refused, or None."""
        given = list(hosts)
        names = [_name_of(host) for host in given]
        for name in names:
            if self.checks_names and not self._is_own(name):
                shown = repr(name) if name else "a Host header that is no name"
                return f"this server does not answer to {shown}; {self._remedy(name)}"
        for origin in origins:
            name = _origin_name(origin)
            same = not self.checks_names and name is not None and name in names
            # A page of this very server: its own, whose name has been checked above where names are.
            same |= name is not None and any(_is_same_place(host, origin) for host in given)
            same |= not self.origins.isdisjoint({origin.strip().lower(), ANY})
            if not (same or self._is_allowed(name)):
                return f"web pages of {origin[:200]!r} may not use this server; {self._remedy(name)}"
        return None

    def _is_own(self, name: str | None) -> bool:
        # A page that points its own name here has that name and no address.
        return self._is_allowed(name) or (not self.is_local and name is not None and _is_address(name))

    def _is_allowed(self, name: str | None) -> bool:
        return name is not None and (name in self.allowed or is_loopback(name))

    @staticmethod
    def _remedy(name: str | None) -> str:
        any_name = "with --api-keys, and without --allow-host, any name is allowed"
        return f"--allow-host {name} allows it; {any_name}" if name else "see --allow-host"


def page_rule(listen_host: str, allowed: Iterable[str], origins: Iterable[str] = ()) -> PageRule:
    """Return the rule for a server that listens on `listen_host`. Raises UsageError for an invalid host name."""
    names: set[str] = set()
    for name in allowed:
        bare = name.strip("[]")
        if not (_NAME.fullmatch(bare) or _is_address(bare)):
            raise UsageError(f"--allow-host {name!r} is not a host name; give it without scheme and port")
        names.add(bare.lower().removesuffix("."))
    is_local = is_loopback(listen_host)
    return PageRule(frozenset(names), is_local, checks_names=is_local or bool(names), origins=frozenset(origins))


def keep_pages_out(app: web.Application, rule: PageRule) -> None:
    """Refuse what `rule` refuses, before anything else is done. Call it before the app is started."""

    @web.middleware
    async def check_page(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PROBE_PATHS and hdrs.ORIGIN not in request.headers:
            return await handler(request)
        problem = rule.problem(request.headers.getall(hdrs.HOST, []), request.headers.getall(hdrs.ORIGIN, []))
        if problem is not None:
            return refused(HttpRefusal(403, problem, "forbidden"))
        return await handler(request)

    app.middlewares.insert(OUTERMOST, check_page)


def _name_of(host: str) -> str | None:
    """Return the name in a Host header, in lower case; None for an invalid header."""
    found = _HOST.fullmatch(host.strip())
    return found["name"].strip("[]").lower().removesuffix(".") if found else None


def _origin_name(origin: str) -> str | None:
    """Return the host of a page's origin; None for pages of files, sandboxes, and invalid origins."""
    try:
        parts = urlsplit(origin.strip())
    except ValueError:
        return None
    return _name_of(parts.netloc) if parts.scheme in ("http", "https") else None


def _is_same_place(host: str, origin: str) -> bool:
    """Return whether a page's origin is the host and port that its request names: browsers write both alike."""
    return urlsplit(origin.strip()).netloc.lower() == host.strip().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
