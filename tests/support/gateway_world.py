"""Pipelines that tests control, behind a gateway, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
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
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from tests.support.http_support import FakeGenerator
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


class Pipeline:
    """One served pipeline, which can be killed and started again at its port."""

    def __init__(self, tokenizer: Tokenizer, name: str, model: str, keys: Path | None = None) -> None:
        self.name, self.model, self.generator = name, model, Replica()
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
        app = make_app(self.generator, ServedModel(self.model, self.n_starts, self._tokenizer, chat), LIMITS)
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
async def pipelines(tokenizer: Tokenizer, *models: str, keys: Path | None = None) -> AsyncIterator[list[Pipeline]]:
    """Serve pipelines of these models, named a, b, c and so on."""
    found = [Pipeline(tokenizer, "abcdef"[at], model, keys) for at, model in enumerate(models)]
    try:
        for pipeline in found:
            await pipeline.start()
        yield found
    finally:
        for pipeline in found:
            await pipeline.kill()


@contextlib.asynccontextmanager
async def gateway(served: list[Pipeline], key: str = "", **listener: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway before pipelines, and a client of it."""
    async with changing_gateway(served, key, **listener) as (session, _):
        yield session


@contextlib.asynccontextmanager
async def changing_gateway(
    served: list[Pipeline], key: str = "", **listener: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, ServedGateway]]:
    """A client of a gateway, and the gateway as its process changes it."""
    backends = tuple(BackendConfig(each.name, each.url, key) for each in served)
    settings = GatewayConfig(backends, HttpListener(port=0, **listener))
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
