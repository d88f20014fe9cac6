"""The gateway's connections to its pipelines, and the questions by which it knows how they are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
from aiohttp import hdrs
from yarl import URL

from relayline.coordinator.engine.sleep import SleepState
from relayline.coordinator.gateway.awake import Told
from relayline.coordinator.gateway.bounds import (
    ANSWER_BYTES_MAX,
    CONNECT_TIMEOUT_S,
    LOST_AFTER_S,
    MODELS_PER_BACKEND_MAX,
    NS,
    POLL_S,
    POLL_TIMEOUT_S,
    SLEEP_TIMEOUT_S,
)
from relayline.coordinator.gateway.gate import Gate
from relayline.coordinator.gateway.router import Backend, Health, Heard, Router
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import Phase
from relayline.wire.common.tasks import cancel_all, end_task
from relayline.wire.common.texts import system_reason

log = logging.getLogger("relayline.gateway")

_RESTING = tuple(phase for phase in Phase if phase.rests)
_REFUSALS = {401: "it requires an API key", 403: "it refuses this gateway"}


@dataclasses.dataclass(frozen=True, slots=True)
class BackendConfig:
    """One pipeline behind a gateway."""

    name: str
    """By which routes, logs and metrics call it."""
    url: str
    """Its address, without /v1."""
    key: str = ""
    """An API key of it, where it demands one."""
    ca_file: str = ""
    """Certificates (PEM) that its HTTPS is checked by, besides the system's."""


class _Model(msgspec.Struct):
    id: str
    created: int = 0


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


class _Pipeline(msgspec.Struct):
    phase: str = ""
    running: int = 0
    waiting: int = 0
    lanes: int = 1


class _Sleep(msgspec.Struct):
    state: str


class _Trouble(Exception):
    """Why a pipeline cannot be used, in a few words."""


class Link:
    """One pipeline: its address, its latest state, and its models."""

    def __init__(self, config: BackendConfig, backend: Backend) -> None:
        """Raises UsageError for certificates that cannot be read."""
        self.config, self.backend = config, backend
        self.base = URL(config.url)
        self.cards: dict[str, bytes] = {}  # its entries of /v1/models, by the model's name, as JSON
        self._running: set[asyncio.Timeout] = set()  # of requests, which end when it is lost
        self.tls = _tls(config)
        self.stays_because = ""  # why it did not fall asleep when it was told to last

    def url(self, path: str) -> URL:
        """Return the address of a path with its query, written as it came."""
        return URL(f"{self.base.origin()}{self.base.raw_path.rstrip('/')}{path}", encoded=True)

    @contextlib.asynccontextmanager
    async def until_lost(self) -> AsyncIterator[None]:
        """Wait for this pipeline within. Raises TimeoutError once it is lost."""
        async with asyncio.timeout(None) as patience:
            self._running.add(patience)
            try:
                yield
            finally:
                self._running.discard(patience)

    def lose(self) -> None:
        """Give up every request that runs there."""
        now_s = asyncio.get_running_loop().time()
        for patience in self._running:
            if not patience.expired():
                patience.reschedule(now_s)


def _tls(config: BackendConfig) -> ssl.SSLContext | bool:
    if not config.ca_file:
        return True
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{config.ca_file}: no certificates can be read from it: {error}") from error
    return context


class Links:
    """All pipelines of a gateway. An async context manager, which watches them."""

    def __init__(self, configs: Sequence[BackendConfig], awake_max: int = 0) -> None:
        """`awake_max`: how many pipelines may be awake at once; 0: all."""
        self.router = Router((config.name for config in configs), awake_max)
        self.gate = Gate(self.router.awake, self._put_to_sleep)
        self.links = {
            backend: Link(config, backend) for config, backend in zip(configs, self.router.backends, strict=True)
        }
        self.session: aiohttp.ClientSession
        self._watching: dict[Link, asyncio.Task[None]] = {}
        self._is_closed = False

    async def __aenter__(self) -> Links:
        # Never through a proxy of the environment, and no bound here: the router has one for each pipeline.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._watching = {link: asyncio.create_task(self._watch(link)) for link in self.links.values()}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        await cancel_all(self._watching.values())
        await self.gate.close()
        await self.session.close()

    def add(self, config: BackendConfig) -> Link:
        """Take one more pipeline, and watch it. Raises UsageError for certificates that cannot be read."""
        backend = self.router.add(config.name)
        try:
            link = Link(config, backend)
        except UsageError:
            self.router.remove(backend)
            raise
        self.links[backend] = link
        self._watching[link] = asyncio.create_task(self._watch(link))
        return link

    async def forget(self, link: Link) -> None:
        """Give up a pipeline and every request that runs there."""
        link.lose()
        await end_task(self._watching.pop(link))
        self.router.remove(link.backend)
        self.gate.removed(link.backend)
        del self.links[link.backend]

    def failed(self, link: Link, problem: str, *, is_refused: bool = False) -> None:
        """A pipeline does not answer: no request goes there until it is heard again.

        What it holds is free once it refuses connections, or has been silent for LOST_AFTER_S: it may just be slow.
        """
        if link.backend.health is Health.UNKNOWN:
            log.info("pipeline %s is not there yet: %s", link.backend.name, problem)
        elif link.backend.health is not Health.DEAD:
            log.warning("pipeline %s gets no requests: %s", link.backend.name, problem)
        link.backend.failed(problem)
        if link.backend in self.links and (is_refused or _is_silent(link.backend)):
            self.gate.lost(link.backend)

    async def _watch(self, link: Link) -> None:
        while not self._is_closed:
            asked_ns = time.monotonic_ns()
            await self.ask(link)
            wait_s = POLL_S - (time.monotonic_ns() - asked_ns) / NS
            await asyncio.sleep(max(wait_s, POLL_S / 4))

    async def ask(self, link: Link) -> None:
        """Ask a pipeline for its models and its load."""
        if self._is_closed:
            return
        backend, asked_ns = link.backend, time.monotonic_ns()
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                heard = await self._heard(link)
        except TimeoutError:
            self.failed(link, f"no answer within {POLL_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self.failed(link, _reason(error), is_refused=is_refused(error))
        except RuntimeError:  # between two questions; aiohttp has no other word for it
            if not self._is_closed:
                raise
        except (_Trouble, msgspec.MsgspecError, UnicodeDecodeError) as trouble:
            self.failed(link, str(trouble) if isinstance(trouble, _Trouble) else "it does not answer like relayline")
        else:
            before, now_ns = backend.health, time.monotonic_ns()
            backend.heard(heard, now_ns)
            if backend in self.links:  # it may have been removed while it was asked
                self.gate.heard(backend, asked_ns)
            if before is not backend.health:
                log.info("pipeline %s is %s; its models: %s", backend.name, backend.state, ", ".join(backend.models))
        if backend.health is Health.DEAD and _is_silent(backend):
            link.lose()

    async def _heard(self, link: Link) -> Heard:
        cards = msgspec.json.decode(await self._get(link, "/v1/models"), type=_Models).data[:MODELS_PER_BACKEND_MAX]
        found = msgspec.json.decode(await self._get(link, "/v1/pipeline"), type=_Pipeline)
        if not cards:
            raise _Trouble("it serves no model")
        models = [msgspec.json.decode(card, type=_Model) for card in cards]
        link.cards = {model.id: bytes(card) for model, card in zip(models, cards, strict=True)}
        n_requests = found.running + found.waiting
        rests = found.phase in _RESTING  # a request wakes one that sleeps, and waits for that
        is_ready = rests or found.phase == Phase.READY
        is_asleep = found.phase == Phase.SLEEPING
        started_unix_s = models[0].created
        return Heard(
            tuple(link.cards),
            is_ready,
            n_requests,
            found.lanes,
            started_unix_s,
            rests=rests,
            is_asleep=is_asleep,
            phase=found.phase,
        )

    async def _put_to_sleep(self, backend: Backend) -> Told:
        """Tell a pipeline to sleep, and wait until it does."""
        link = self.links.get(backend)
        if link is None:  # it was removed, and holds nothing
            return Told.ASLEEP
        if not link.stays_because:
            log.info("pipeline %s is put to sleep: %d may be awake at once", backend.name, self.router.awake.limit)
        try:
            async with (
                asyncio.timeout(SLEEP_TIMEOUT_S),
                self.request(link, hdrs.METH_POST, "/sleep", _own_key(link)) as response,
            ):
                if response.status in (200, 202):
                    link.stays_because = ""
                    state = msgspec.json.decode(await _whole(response, "/sleep"), type=_Sleep).state
                    return Told.ASLEEP if state == SleepState.ASLEEP else Told.LATER  # it may just be waking
                why = _REFUSALS.get(response.status, f"it answered {response.status}")
        except TimeoutError:
            why = f"no answer within {SLEEP_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            why = _reason(error)
        except (_Trouble, msgspec.MsgspecError, UnicodeDecodeError):
            why = "it does not answer like relayline"
        if why != link.stays_because:  # it is told again and again
            log.warning("pipeline %s does not fall asleep, so others cannot wake: %s", backend.name, why)
        link.stays_because = why
        return Told.AWAKE

    def request(
        self, link: Link, method: str, path: str, headers: Mapping[str, str], **more: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask a pipeline alone: another server that it names would get the key. `more`: as aiohttp has it."""
        url = link.url(path)
        return self.session.request(method, url, headers=headers, ssl=link.tls, allow_redirects=False, **more)

    async def _get(self, link: Link, path: str) -> bytes:
        async with self.request(link, hdrs.METH_GET, path, _own_key(link)) as response:
            raw = await _whole(response, path)
            if response.status != 200:
                raise _Trouble(_REFUSALS.get(response.status, f"{path} answered {response.status}"))
            return raw


async def _whole(response: aiohttp.ClientResponse, path: str) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > ANSWER_BYTES_MAX:
            raise _Trouble(f"{path} has more than {ANSWER_BYTES_MAX} bytes")
    return bytes(raw)


def _own_key(link: Link) -> dict[str, str]:
    return {"Authorization": f"Bearer {link.config.key}"} if link.config.key else {}


def _is_silent(backend: Backend) -> bool:
    return time.monotonic_ns() - backend.heard_ns > LOST_AFTER_S * NS


def is_refused(error: Exception) -> bool:
    """Return whether nobody listens at a pipeline's address."""
    return isinstance(getattr(error, "os_error", error), ConnectionRefusedError)


def _reason(error: Exception) -> str:
    """Return why there is no connection, without the address: clients read it too."""
    if is_refused(error):
        return "it refuses connections"
    if isinstance(error, aiohttp.ClientSSLError):
        return "its certificate is not trusted"
    return system_reason(error) or "the connection was lost"
