"""Addresses of images and audio, as the client of this server reads them. Pure.

The host that is held against the list must be the one that is connected to. So both come from one parser: another one
might not fold `http://⑩.0.0.1/` to 10.0.0.1, as this one does.
"""

from __future__ import annotations

from yarl import URL


def url_of(address: str) -> URL | None:
    """Return an address of the web; None where it is none, or has a name and a password."""
    try:
        url = URL(address)
        is_web = url.scheme in ("http", "https") and bool(url.raw_host) and url.port != 0
    except ValueError:
        return None
    return url if is_web and url.user is None and url.password is None else None


def host_of(url: URL | None) -> str:
    """Return the host of an address, in lower case and ASCII; empty for no address."""
    return (url.raw_host or "").lower().rstrip(".") if url is not None else ""
