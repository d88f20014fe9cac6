"""A coordinator with a page over one fake stage; requests to both are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from relayline.coordinator.engine.stage_client import RoundTrip, StageClient
from relayline.coordinator.engine.telemetry_control import TelemetryControl
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.live import FACTS
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.media.encoder import Encoder
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.http_support import CREATED, MODEL, WAIT_S, FakeGenerator, Gate

MS = 1_000_000


class FakeStage(StageClient):
    """A stage with steps 1 to `n_steps`, a millisecond each; `gate` delays its answers."""

    def __init__(self) -> None:
        self.address, self.max_rows = "127.0.0.1:1", 512
        self.n_steps, self.asked, self.n_beats = 3, [], 0  # type: ignore[var-annotated]
        self.gate: Gate | None = None

    async def beat(self, beat: pb.BeatRequest) -> RoundTrip | None:
        self.n_beats += 1
        return RoundTrip(0, 2 * MS, 1)

    async def status(self, **asked: object) -> pb.StatusResponse | None:
        points = [pb.CostPoint(n_rows=rows, cost_ns=rows * MS) for rows in (1, 8)]
        return pb.StatusResponse(decode_curve=points, prefill_curve=points)

    async def batches(
        self, session_ids: Sequence[int], *, after_step: int = 0, limit: int = 0
    ) -> pb.BatchesResponse | None:
        self.asked.append((tuple(session_ids), after_step, limit))
        if self.gate is not None:
            await self.gate.pass_through()
        steps = range(after_step + 1, self.n_steps + 1)[-limit:]
        batches = [pb.BatchRecord(step=step, start_ns=step * MS, decode_ns=MS, n_rows=1) for step in steps]
        return pb.BatchesResponse(instance_id="i", batches=batches)


class Described(FakeGenerator):
    """A generator of stages with two layers each, one with four; counts how often it is asked."""

    n_asked, n_stages = 0, 1
    more: Mapping[str, object] = {}
    stage: FakeStage

    async def describe(self, since_ns: int | None = None, *, with_recent: bool = True) -> dict[str, object]:
        assert not with_recent, "thousands of numbers that a page doesn't show"
        self.n_asked += 1
        size = 4 // self.n_stages
        stages = [
            {"index": at, "layers": [at * size, (at + 1) * size], "up": True, "instance_id": "i"}
            | {"steps": self.stage.n_steps}
            for at in range(self.n_stages)
        ]
        known = {"phase": "ready", "lanes": 8, "ctx_tokens": 64, "plan": {"overhead_ns": 1}, "stages": stages}
        return known | dict(self.more)


@dataclasses.dataclass
class World:
    url: str
    stage: FakeStage
    generator: Described
    facts: dict[str, object]
    observer: Observer

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        timeout = aiohttp.ClientTimeout(WAIT_S)
        async with (
            aiohttp.ClientSession(
                self.url, timeout=timeout, auto_decompress=False, skip_auto_headers=("Accept-Encoding",)
            ) as session,
            session.request(method, path, headers=headers) as reply,
        ):
            return reply.status, reply.headers, await reply.read()

    async def look(self, after: int = 0) -> dict[str, Any]:
        status, _, body = await self.get(f"/v1/pipeline/live?after={after}")
        assert status == 200, body
        found = json.loads(body)
        assert isinstance(found, dict)
        return found


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer,
    keys: Path | None = None,
    *,
    encoder: Encoder | None = None,
    stage: FakeStage | None = None,
    adapters: tuple[str, ...] = (),
    n_stages: int = 1,
) -> AsyncIterator[World]:
    stage, generator = stage or FakeStage(), Described()
    generator.n_stages = n_stages
    generator.stage = stage
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    observer = Observer()
    control = TelemetryControl(observer, lambda: [stage] * n_stages)
    limits = HttpLimits(adapters=adapters)
    app = make_app(generator, ServedModel(MODEL, CREATED, tokenizer, chat, encoder), limits, control)
    with protect_http(app, HttpListener(api_keys_file=keys)):
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            yield World(f"http://127.0.0.1:{port}", stage, generator, app[FACTS], observer)
        finally:
            await runner.cleanup()
