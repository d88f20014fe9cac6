"""API keys of the HTTP side: found by their SHA-256, read again on demand. `key_file` says what their file holds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from relayline.coordinator.http.edge.clients import BEHALF, CLIENT, KEY, PAYER, RATE, TENANT, Payer
from relayline.coordinator.http.edge.cors import allow_pages
from relayline.coordinator.http.edge.errors import plain_body
from relayline.coordinator.http.edge.key_file import FILE_BYTES_MAX, KEYS_MAX, ApiKey, parse_keys
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.middleware import OUTERMOST
from relayline.coordinator.http.edge.token_rate import TokenRate
from relayline.coordinator.http.edge.web_pages import keep_pages_out, page_rule
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import has_terminal, may_hang_up
from relayline.wire.links.security import is_loopback

log = logging.getLogger("relayline.http")

PAGE_PATHS = web.AppKey("page_paths", frozenset[str])  # of an application: its page's paths, which need no key
OPEN_PATTERN = web.AppKey("open_pattern", re.Pattern[str])  # and other paths of an application that need none
OPEN_PATHS = frozenset({"/health", "/v1/health", "/live", "/metrics"})
METRICS_PATH = "/metrics"
X_API_KEY = "X-Api-Key"
RATES_MAX = 2 * KEYS_MAX  # keys whose tokens are counted, those of gateways' clients too
_BEARER = "bearer "
_OTHERS = 0o007
_NAMES_SHOWN = 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiKeys:
    """The keys that are accepted now."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises UsageError when it is missing, holds no key, or a line is not a key."""
        self._path = path
        self._take(parse_keys(_read(path), path))
        self._rates: dict[str, TokenRate] = {}  # by the key's name; they outlast another reading of the file

    @property
    def names(self) -> list[str]:
        """The keys' names in the file, in its order."""
        return list(self._keys)

    @property
    def shown(self) -> str:
        """The names for a log line, the first _NAMES_SHOWN of them."""
        more = len(self._keys) - _NAMES_SHOWN
        return ", ".join(self.names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def find(self, sent: str) -> ApiKey | None:
        """Return the key that `sent` is, if it is one. Its time tells nothing of a key: only hashes are compared."""
        return self._by_digest.get(hashlib.sha256(sent.encode(errors="surrogateescape")).digest())

    def payer(self, payer: Payer) -> ApiKey | None:
        """Return the key that pays now, with its client's options where a gateway showed it; None: it is gone."""
        key = self._keys.get(payer.name)
        if key is None or key.is_unnamed:
            key = next((each for each in self._keys.values() if each.lasting_name == payer.name), None)
        if key is None or not payer.behalf:
            return key
        return key.of_behalf(payer.behalf) if key.options.gateway == "yes" else None

    def rate_of(self, key: ApiKey) -> TokenRate | None:
        """Return what is left of the key's tokens; None if it has no bound."""
        per_minute = key.options.tokens_per_minute
        if per_minute is None:
            return None
        rate = self._rates.get(key.name)
        if rate is None or rate.per_minute != per_minute:
            rate = self._rates[key.name] = TokenRate(per_minute, time.monotonic_ns())
            if len(self._rates) > RATES_MAX:
                del self._rates[next(iter(self._rates))]
        return rate

    def reload(self) -> None:
        """Read the file again; an unusable file changes nothing, with one line in the log."""
        try:
            self._take(parse_keys(_read(self._path), self._path))
        except UsageError as error:
            log.warning("keeping the old API keys: %s", error.message)
            return
        log.info("API keys were read again; known keys: %s", self.shown)

    def _take(self, keys: dict[str, ApiKey]) -> None:
        self._keys = keys
        self._by_digest = {key.digest: key for key in keys.values()}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
            mode = path.stat().st_mode
        text = data.decode()
    except FileNotFoundError as error:
        raise UsageError(f"API key file {path} does not exist; write one with a key per line") from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"API key file {path} cannot be read: {why}") from error
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"API key file {path} is larger than {FILE_BYTES_MAX} bytes")
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
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGHUP)
    had_terminal = may_hang_up() and has_terminal()

    def heard() -> None:
        if had_terminal and not has_terminal():
            os.kill(os.getpid(), signal.SIGTERM)  # its terminal has closed, which ends it in order
        else:
            keys.reload()

    loop.add_signal_handler(signal.SIGHUP, heard)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)  # may be to ignore it, or one that comes now would end this process


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
        if PAYER in request:  # which has shown that it comes from inside
            key = keys.payer(request[PAYER])
            if key is None:
                return _refused("the key that asked for this is not known any more")
            request[KEY] = key
            batch = request.get(TENANT)  # unless it is a background response of the key
            own = key.tenant
            request[TENANT] = own if batch is None else dataclasses.replace(batch, models=own.models, circle=own.circle)
            if (rate := keys.rate_of(key)) is not None:
                request[RATE] = rate
            return await handler(request)
        sent = request.headers.get("Authorization", "")
        if not sent and X_API_KEY in request.headers:  # as Anthropic's clients send it
            sent = _BEARER + request.headers[X_API_KEY]
        is_bearer, shown = sent[: len(_BEARER)].lower() == _BEARER, sent[len(_BEARER) :].strip()
        key = keys.find(shown) if is_bearer else None
        if key is not None:
            is_gateway = key.options.gateway == "yes"
            behalf = request.headers.get(BEHALF, "") if is_gateway else ""
            request[PAYER] = Payer(key.lasting_name, behalf)
            client = f"Bearer {shown}"  # one, however it spells the header
            if behalf:
                key, client = key.of_behalf(behalf), f"{client} {behalf}"
            request[KEY] = key
            request[TENANT] = key.tenant
            if (rate := keys.rate_of(key)) is not None:
                request[RATE] = rate
            request[CLIENT] = hashlib.sha256(client.encode(errors="surrogateescape")).hexdigest()
            return await handler(request)
        return _refused("incorrect API key" if sent else "no API key; send it as `Authorization: Bearer KEY`")

    async def add_rate(request: web.Request, response: web.StreamResponse) -> None:
        """Say on any answer how many tokens are left."""
        if (rate := request.get(RATE)) is not None:
            response.headers.update(rate.headers(time.monotonic_ns()))

    app.on_response_prepare.append(add_rate)
    # Before anything is recorded, so that strangers cannot push other requests out of view.
    app.middlewares.insert(OUTERMOST, check_key)


def _refused(message: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(plain_body(401, message, "invalid_api_key")),
        status=401,
        headers={"WWW-Authenticate": 'Bearer realm="relayline"'},
        content_type="application/json",
    )
