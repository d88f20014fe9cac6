"""Parses the setting that is the address of a web page. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit


def read_page_url(text: str) -> str:
    """Return the address without a slash at its end. Raises ValueError if it is none."""
    try:
        parts = urlsplit(text)
        is_page = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_page = False
    if not is_page:
        raise ValueError("give an address such as http://HOST:16686")
    return text.rstrip("/")
