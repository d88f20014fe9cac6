"""Pipelines that tests control, behind a gateway, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from relayline.coordinator.gateway.links import BackendConfig
from relayline.coordinator.gateway.serve import GatewayConfig, ServedGateway, serving_gateway
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.phase import Phase
from tests.support.http_support import FakeGenerator, FakeStream, Gate
from tests.support.polling import pause

N_LANES = 4
# A gateway's manifest before two pipelines of chat.yaml.
TWO_REPLICAS = """apiVersion: relayline.dev/v1alpha1
kind: Gateway
metadata: {name: house}
spec:
  http: {port: 0}
  pipelines:
    - {name: chat, manifest: chat.yaml, replicas: [{stages: [{name: other}]}]}
"""


LIMITS = HttpLimits(ping_interval_s=3_600.0)  # no ping shows that a client has gone


class Replica(FakeGenerator):
    """One pipeline's generator, which describes itself as far as a gateway reads it."""

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        n_running = sum(not stream.closed.is_set() for stream in self.streams)
        live = {"phase": self.phase.value, "running": n_running, "waiting": 0, "lanes": N_LANES}
        return await super().describe(since_ns, with_recent=with_recent) | live


class SleepyReplica(Replica):
    """One that sleeps at first, falls asleep when it is told to, and wakes with a request."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.otherwise = False, Phase.SLEEPING
        self.n_wakes = 0
        self.on_wake: Callable[[], None] = lambda: None
        self.refuses: Exception | None = None
        self.waking: Gate | None = None
        self.is_asked = False  # to sleep after its running requests
        self.cannot_wake: Exception | None = None

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> FakeStream:
        self._wake()
        return super().open(request, record)

    async def ask(self) -> dict[str, object]:
        if self.refuses is not None:
            raise self.refuses
        if self.otherwise is Phase.WAKING:
            return {"is_sleeping": True, "state": "waking"}
        self.ready = self.is_asked = any(not stream.closed.is_set() for stream in self.streams)
        return {"is_sleeping": not self.ready, "state": "awake" if self.ready else "asleep"}

    async def wake(self) -> dict[str, object]:
        if self.waking is not None:
            self.otherwise = Phase.WAKING
            await self.waking.pass_through()
            self.otherwise = Phase.SLEEPING
        if self.cannot_wake is not None:
            raise self.cannot_wake
        self.is_asked = False
        self._wake()
        return {"is_sleeping": False}

    def _wake(self) -> None:
        if not self.ready:
            self.n_wakes += 1
            self.ready = True
            self.on_wake()


class Pipeline:
    """One served pipeline, which can be killed and started again at its port."""

    def __init__(
        self, tokenizer: Tokenizer, name: str, model: str, keys: Path | None = None, *, sleeps: bool = False
    ) -> None:
        self.name, self.model = name, model
        self.generator: Replica = SleepyReplica() if sleeps else Replica()
        self.port, self._runner = 0, None
        self._tokenizer, self._keys = tokenizer, keys
        self._stack = contextlib.ExitStack()
        self._runner: web.AppRunner | None = None
        self.n_starts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        chat = ChatTemplate(CHATML, bos_text=self._tokenizer.bos_text, eos_text=self._tokenizer.eos_text)
        self.n_starts += 1
        model = ServedModel(self.model, self.n_starts, self._tokenizer, chat)
        sleep = self.generator if isinstance(self.generator, SleepyReplica) else None
        app = make_app(self.generator, model, LIMITS, sleep=sleep)
        self._stack.enter_context(protect_http(app, HttpListener(api_keys_file=self._keys)))
        self._runner, self.port = await start_http(app, "127.0.0.1", self.port, shutdown_timeout_s=0.05)

    async def kill(self) -> None:
        """End it at once: its connections are reset."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        self._stack.close()


@contextlib.asynccontextmanager
async def pipelines(
    tokenizer: Tokenizer, *models: str, keys: Path | None = None, sleep: bool = False
) -> AsyncIterator[list[Pipeline]]:
    """Serve pipelines of these models, named a, b, c and so on."""
    found = [Pipeline(tokenizer, "abcdef"[at], model, keys, sleeps=sleep) for at, model in enumerate(models)]
    try:
        for pipeline in found:
            await pipeline.start()
        yield found
    finally:
        for pipeline in found:
            await pipeline.kill()


@contextlib.asynccontextmanager
async def gateway(
    served: list[Pipeline], key: str = "", awake_max: int = 0, **listener: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway before pipelines, and a client of it."""
    async with changing_gateway(served, key, awake_max, **listener) as (session, _):
        yield session


@contextlib.asynccontextmanager
async def changing_gateway(
    served: list[Pipeline], key: str = "", awake_max: int = 0, **listener: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, ServedGateway]]:
    """A client of a gateway, and the gateway as its process changes it."""
    backends = tuple(BackendConfig(each.name, each.url, key) for each in served)
    settings = GatewayConfig(backends, HttpListener(port=0, **listener), awake_max=awake_max)
    async with serving_gateway(settings) as whole, aiohttp.ClientSession(whole.url) as session:
        yield session, whole


async def until(session: aiohttp.ClientSession, **phases: str) -> None:
    """Wait until the gateway knows its pipelines to be so."""
    async with asyncio.timeout(60):
        while True:
            async with session.get("/health") as answer:
                found = (await answer.json())["pipelines"]
            if found | phases == found:
                return
            await pause()
