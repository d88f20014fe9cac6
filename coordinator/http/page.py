"""The page at `/`: files of this package, read once, and the policy that a browser gets for them.

The page loads without a key and asks for one where keys are set, because all its data comes from the API.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from aiohttp import hdrs, web

FILES_DIR = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_BREAKS = re.compile(r"[;,]")

HEADERS = {
    # Nothing but files of this server runs, draws or is asked, and no other page may hold this one in a frame. A blob
    # is an image, audio or video file that the user attached.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # kept, and asked for by its tag: a page of before an update would not fit the API
}
_PLAIN = b"relayline serves an OpenAI-compatible API at /v1 (try GET /v1/models) and a page for browsers at /.\n"


@dataclasses.dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    packed: bytes
    """The same, gzipped."""
    content_type: str
    tag: str
    """Changes with the body: an ETag without its quotes."""

    def answer(self, request: web.Request) -> web.Response:
        """Return the file, or 304 if the client has it."""
        headers = {**HEADERS, hdrs.ETAG: f'"{self.tag}"', hdrs.VARY: "Accept, Accept-Encoding"}
        known = request.if_none_match or ()
        if any(tag.value in (self.tag, "*") for tag in known):
            return web.Response(status=304, headers=headers)
        body = self.body
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            body, headers[hdrs.CONTENT_ENCODING] = self.packed, "gzip"
        return web.Response(body=body, headers=headers, content_type=self.content_type, charset="utf-8")


@functools.cache
def read_files() -> dict[str, PageFile]:
    """Return the files of the page by their paths at the server; `/` is the page itself."""
    found = {}
    for path in sorted(FILES_DIR.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            packed = gzip.compress(body, mtime=0)
            tag = hashlib.sha256(body).hexdigest()[:20]
            where = "/" if path.name == _INDEX else f"/page/{path.name}"
            found[where] = PageFile(body, packed, _TYPES[path.suffix], tag)
    return found


def routes(files: dict[str, PageFile]) -> Iterator[web.RouteDef]:
    """Yield a route for each file; `/` gives clients that are no browsers the API's address."""
    for path, file in files.items():
        yield web.get(path, functools.partial(_send, file, is_page=path == "/"))


async def _send(file: PageFile, request: web.Request, *, is_page: bool) -> web.StreamResponse:
    if is_page and not wants_page(request):
        return web.Response(body=_PLAIN, content_type="text/plain", charset="utf-8", headers={hdrs.VARY: "Accept"})
    return file.answer(request)


def wants_page(request: web.Request) -> bool:
    """Return whether a client accepts HTML by name; curl and API clients do not."""
    accepted = _BREAKS.split(request.headers.get(hdrs.ACCEPT, "").lower())
    return "text/html" in {part.strip() for part in accepted}
