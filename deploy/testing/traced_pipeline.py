"""A real traced pipeline for tests: stage processes, a coordinator process, and the reports of each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp

from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import TIMEOUT_S, Running, running
from relayline.wire.links import rpc
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

PROMPTS = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "import os\n",
    '"""Return a list of the names',
    "    def close(self):\n        ",
    "for key, value in sorted(",
    "x",
    "# This module provides a class and the functions to read it.\n" * 8,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """One running pipeline and the addresses of its processes."""

    url: str
    model: str
    stages: tuple[str, ...]  # gRPC addresses in layer order
    stage_metrics: tuple[str, ...]  # URLs of the stages' /metrics
    processes: tuple[Running, ...]  # stages in order, then the coordinator


@contextlib.contextmanager
def traced_pipeline(
    directory: Path,
    environment: dict[str, str],
    *,
    n_stages: int = 3,
    level: str = "batches",
    ctx: int = 512,
    lanes: int = 16,
    more: Sequence[str] = (),
    skews_s: Mapping[int, float] | None = None,
) -> Iterator[Traced]:
    """Run stages and coordinator as processes; `environment` is added to theirs (OTEL_*). skews_s: seconds by which the
    clocks of some stages run ahead, by index.
    """
    split_model(DEMO, directory, n_stages=n_stages)
    file = load_pipeline(directory)
    # Spans come soon after their end instead of once a second; this only makes tests quicker. A receiver in the
    # process of a busy test may take long.
    usual = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "100"}
    with contextlib.ExitStack() as stack, mock.patch.dict(os.environ, usual | environment):
        processes: list[Running] = []
        for stage in file.stages:
            arguments = ["stage", "--artifact", directory / stage.file, "--listen", "127.0.0.1:0", "--json",
                         "--ctx", str(ctx), "--lanes", str(lanes), "--threads", "1", "--trace-level", level,
                         "--metrics", "127.0.0.1:0"]  # fmt: skip
            skew_s = (skews_s or {}).get(stage.index, 0.0)
            processes.append(stack.enter_context(running(*map(str, arguments), skew_s=skew_s)))
        stages = tuple(str(process.event["address"]) for process in processes)
        metrics = tuple(f"http://{process.event['metrics']}/metrics" for process in processes)
        arguments = ["serve", "--pipeline", directory, "--stages", ",".join(stages), "--http", "127.0.0.1:0", "--json",
                     "--no-share", "--trace-level", level, *more]  # fmt: skip
        processes.append(stack.enter_context(running(*map(str, arguments))))
        event = processes[-1].event
        yield Traced(event["url"], event["model"], stages, metrics, tuple(processes))


async def ask(
    session: aiohttp.ClientSession, traced: Traced, prompt: str, n_tokens: int = 40, request_id: str = ""
) -> dict[str, Any]:
    """Stream one greedy completion; returns id, n_tokens and the usage that the server reports."""
    body = {
        "model": traced.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": n_tokens,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    found: dict[str, Any] = {"id": "", "tokens": [], "usage": None}
    headers = {"x-request-id": request_id} if request_id else {}
    async with session.post(f"{traced.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                found["id"] = event["id"]
                found["usage"] = event.get("usage") or found["usage"]
                for choice in event["choices"]:
                    found["tokens"] += choice.get("token_ids") or []
    return found


async def ask_all(
    traced: Traced, prompts: Sequence[str] = PROMPTS, n_tokens: int = 40, *, request_ids: bool = False
) -> list[dict[str, Any]]:
    """Stream all prompts at once, with request ids `caller-0`, `caller-1`, ..., or without."""
    ids = [f"caller-{index}" if request_ids else "" for index in range(len(prompts))]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = [ask(session, traced, prompt, n_tokens, name) for prompt, name in zip(prompts, ids, strict=True)]
        return list(await asyncio.gather(*asking))


async def text_of(url: str) -> str:
    """Return the body of a GET."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def _call(address: str, name: str, request: Any, answer: Any) -> Any:
    async with rpc.open_channel(address) as channel:
        return await rpc.call(channel, name, request, answer, address, TIMEOUT_S)


async def ring_of(address: str) -> pb.BatchesResponse:
    """Return every batch that a stage remembers."""
    found: pb.BatchesResponse = await _call(address, "Batches", pb.BatchesRequest(), pb.BatchesResponse)
    return found


async def status_of(address: str) -> pb.StatusResponse:
    """Return a stage's live counters with its recent waits."""
    found: pb.StatusResponse = await _call(address, "Status", pb.StatusRequest(with_recent=True), pb.StatusResponse)
    return found


async def settled(stages: tuple[str, ...]) -> list[pb.StatusResponse]:
    """Return the counters of all stages once every session was closed there; each reading is a round trip."""
    async with asyncio.timeout(60):
        while True:
            statuses = [await status_of(address) for address in stages]
            if not any(status.lanes_used for status in statuses):
                return statuses
