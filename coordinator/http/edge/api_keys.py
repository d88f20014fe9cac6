"""API keys of the HTTP side: a file with one key per line, checked in constant time, read again on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.clients import CLIENT
from relayline.coordinator.http.edge.cors import allow_pages
from relayline.coordinator.http.edge.errors import plain_body
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.middleware import OUTERMOST
from relayline.coordinator.http.edge.web_pages import keep_pages_out, page_rule
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import is_loopback

log = logging.getLogger("relayline.http")

KEY_CHARS_MIN, KEY_CHARS_MAX = 16, 512  # shorter can be guessed
KEYS_MAX = 10_000  # every request is compared with all of them
PAGE_PATHS = web.AppKey("page_paths", frozenset[str])  # of an application: its page's paths, which need no key
OPEN_PATTERN = web.AppKey("open_pattern", re.Pattern[str])  # and other paths of an application that need none
OPEN_PATHS = frozenset({"/health", "/v1/health", "/live", "/metrics"})
METRICS_PATH = "/metrics"
X_API_KEY = "X-Api-Key"
_FILE_BYTES_MAX = KEYS_MAX * (KEY_CHARS_MAX + 128)
_BEARER = "bearer "
_OTHERS = 0o007
_NAMES_SHOWN = 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiKeys:
    """The keys that are accepted now. Only their SHA-256 is kept, so no dump or log of ours can show one."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises UsageError when it is missing, holds no key, or a line is not a key."""
        self._path = path
        self._digests = parse_keys(_read(path), path)

    @property
    def names(self) -> list[str]:
        """The keys' names in the file, in its order."""
        return list(self._digests)

    @property
    def shown(self) -> str:
        """The names for a log line, the first _NAMES_SHOWN of them."""
        more = len(self._digests) - _NAMES_SHOWN
        return ", ".join(self.names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def accepts(self, sent: str) -> bool:
        """Return whether `sent` is one of the keys; takes as long for every answer."""
        digest = hashlib.sha256(sent.encode(errors="surrogateescape")).digest()
        found = False
        for known in self._digests.values():
            found |= hmac.compare_digest(known, digest)
        return found

    def reload(self) -> None:
        """Read the file again; an unusable file changes nothing, with one line in the log."""
        try:
            self._digests = parse_keys(_read(self._path), self._path)
        except UsageError as error:
            log.warning("keeping the old API keys: %s", error.message)
            return
        log.info("API keys were read again; known keys: %s", self.shown)


def parse_keys(text: str, path: Path) -> dict[str, bytes]:
    """Return name -> SHA-256 of every key: one `KEY` or `NAME: KEY` a line, empty lines and # comments left out.

    A key without a name is called by its line. Raises UsageError; its message never holds a key.
    """
    found: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.rpartition(":")
        name, key = (name.strip() if colon else f"line {number}"), key.strip()
        if not KEY_CHARS_MIN <= len(key) <= KEY_CHARS_MAX or not all("!" <= char <= "~" for char in key):
            raise UsageError(
                f"{path}:{number}: a key is {KEY_CHARS_MIN} to {KEY_CHARS_MAX} printable ASCII characters, no spaces; "
                "make one with: openssl rand -hex 24"
            )
        if not name or name in found:
            what = "another key has this name" if name else "the name before the colon is empty"
            raise UsageError(f"{path}:{number}: {what}")
        found[name] = hashlib.sha256(key.encode()).digest()
    if not found:
        raise UsageError(f"{path} holds no API key; write one per line")
    if len(found) > KEYS_MAX:
        raise UsageError(f"{path} holds more than {KEYS_MAX} API keys")
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
            mode = path.stat().st_mode
        text = data.decode()
    except FileNotFoundError as error:
        raise UsageError(f"API key file {path} does not exist; write one with a key per line") from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"API key file {path} cannot be read: {why}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise UsageError(f"API key file {path} is larger than {_FILE_BYTES_MAX} bytes")
    if mode & _OTHERS:
        log.warning("%s can be read by every user of this machine; run: chmod 600 %s", path, path)
    return text


def protect_http(app: web.Application, listener: HttpListener) -> contextlib.AbstractContextManager[None]:
    """Let only those clients use the application whom `listener` allows. Within the returned context SIGHUP reads the
    keys' file again.

    For an address beyond this machine a warning says if it demands no keys, or if keys travel in the clear. Without
    keys web pages are kept out, except those of its `allow_hosts` and `cors`. Raises UsageError. Call it on the event
    loop, before the app is started.
    """
    host, path = listener.host, listener.api_keys_file
    if path is None or listener.allow_hosts:
        keep_pages_out(app, page_rule(host, listener.allow_hosts, listener.cors))
    if path is None:
        if listener.protect_metrics:
            raise UsageError("--protect-metrics needs --api-keys FILE")
        if not is_loopback(host):
            log.warning("the API on %s is open to everyone who reaches it; --api-keys FILE closes it", host)
        allow_pages(app, listener.cors)
        return contextlib.nullcontext()
    keys = ApiKeys(path)
    if listener.tls is None and not is_loopback(host):
        log.warning("API keys travel to %s in PLAINTEXT: give --http-cert and --http-key, or a proxy with TLS", host)
    log.info("the API requires a key; known keys: %s", keys.shown)
    require_keys(app, keys, protect_metrics=listener.protect_metrics)
    allow_pages(app, listener.cors)  # in front of the keys: preflights bring none
    return _reread_on_hangup(keys)


@contextlib.contextmanager
def _reread_on_hangup(keys: ApiKeys) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, keys.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def require_keys(app: web.Application, keys: ApiKeys, *, protect_metrics: bool) -> None:
    """Demand a key for all but health, the page's files (and metrics, unless protected). Call it before it starts."""
    pattern = app.get(OPEN_PATTERN)
    page_paths: frozenset[str] = app.get(PAGE_PATHS, frozenset())
    open_paths = (OPEN_PATHS - {METRICS_PATH} if protect_metrics else OPEN_PATHS) | page_paths

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_page = pattern is not None and request.method in ("GET", "HEAD") and pattern.fullmatch(request.path)
        if is_page or request.path in open_paths:
            return await handler(request)
        sent = request.headers.get("Authorization", "")
        if not sent and X_API_KEY in request.headers:  # as Anthropic's clients send it
            sent = _BEARER + request.headers[X_API_KEY]
        if sent[: len(_BEARER)].lower() == _BEARER and keys.accepts(sent[len(_BEARER) :].strip()):
            request[CLIENT] = hashlib.sha256(sent.encode(errors="surrogateescape")).hexdigest()
            return await handler(request)
        return _refused("incorrect API key" if sent else "no API key; send it as `Authorization: Bearer KEY`")

    # Before anything is recorded, so that strangers cannot push other requests out of view.
    app.middlewares.insert(OUTERMOST, check_key)


def _refused(message: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(plain_body(401, message, "invalid_api_key")),
        status=401,
        headers={"WWW-Authenticate": 'Bearer realm="relayline"'},
        content_type="application/json",
    )
