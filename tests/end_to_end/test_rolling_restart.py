"""Replicas that need a restart restart one after the other, and no request is refused meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from relayline.coordinator.gateway.forward import PIPELINE_HEADER
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import relayline, running
from tests.support.gateway_world import TWO_REPLICAS, until

PIPELINE = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: chat}}
spec:
  model: {{path: {model}}}
  stages: 1
  context: {{tokens: {tokens}, lanes: {lanes}}}
  batching: {{calibrate: false}}
"""


def manifest(tokens: int, lanes: int = 4) -> str:
    return PIPELINE.format(model=DEMO, tokens=tokens, lanes=lanes)


class Clients:
    """Four clients that send one request after another, as long as they exist."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session, self._model = session, model
        self.answers: Counter[tuple[int, str]] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.create_task(self._ask(at)) for at in range(4)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    async def _ask(self, at: int) -> None:
        body = {"model": self._model, "prompt": f"def f{at}", "max_tokens": 24, "ignore_eos": True, "stream": True}
        while True:
            async with self._session.post("/v1/completions", json=body) as answer:
                raw = await answer.content.read()
                assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]
                self.answers[answer.status, answer.headers[PIPELINE_HEADER]] += 1


async def processes(state: Path) -> dict[str, dict[str, Any]]:
    (house,) = json.loads((await asyncio.to_thread(relayline, "status", "--state-dir", state, "--json")).stdout)
    return {each["name"]: each for each in house["processes"]}


async def pids(state: Path) -> dict[str, int]:
    return {name: each["pid"] for name, each in (await processes(state)).items() if each["state"] == "ready"}


async def context_of(session: aiohttp.ClientSession, name: str) -> int:
    async with session.get(f"/pipelines/{name}/v1/pipeline") as answer:
        found: int = (await answer.json())["ctx_tokens"]
        return found


async def test_replicas_take_a_changed_manifest_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(manifest(512))
    (tmp_path / "house.yaml").write_text(TWO_REPLICAS)
    state = tmp_path / "state"
    again = ("up", tmp_path / "house.yaml", "--state-dir", state)
    with running("up", tmp_path / "house.yaml", "--json", "--state-dir", state) as process:
        model = process.event["model"]
        async with aiohttp.ClientSession(process.event["url"]) as session:
            await until(session, **{"chat": "ready", "chat-2": "ready"})
            before = await pids(state)
            (tmp_path / "chat.yaml").write_text(manifest(256))
            async with Clients(session, model) as clients:
                done = await asyncio.to_thread(relayline, *again, timeout_s=150)
                assert done.returncode == 0, done.stderr
                after = await pids(state)
                assert before.keys() == after.keys()
                assert not {*before.values()} & {*after.values()}, "each was started again"
                assert [await context_of(session, name) for name in ("chat", "chat-2")] == [256, 256]
                assert "house-chat-2: context.tokens: 512 -> 256: starts it again" in done.stdout
                assert done.stdout.index("house-chat serves") < done.stdout.index("house-chat-2 serves")
                # A replica that does not come up again serves as before; the other one stays as it is.
                (tmp_path / "chat.yaml").write_text(manifest(1_048_576, lanes=255))
                failed = await asyncio.to_thread(relayline, *again, timeout_s=150)
                assert failed.returncode == 1
                assert "chat-2: not changed, because another one did not come up" in failed.stderr
                assert "house-chat serves as before, because it could not start again: " in failed.stderr
                assert "house-chat serves\n" not in failed.stdout
                assert await context_of(session, "chat") == 256
                left = (await processes(state))["house-chat-2"]
                assert (left["pid"], left["state"]) == (after["house-chat-2"], "ready")
                assert "runs as before the last change" in left["detail"]
                (tmp_path / "chat.yaml").write_text(manifest(256))
                mended = await asyncio.to_thread(relayline, *again, timeout_s=150)
                assert mended.returncode == 0, mended.stderr
                restarted = await asyncio.to_thread(
                    relayline, "restart", "house", "chat-2", "--state-dir", state, timeout_s=150
                )
                assert restarted.returncode == 0, restarted.stderr
            assert {status for status, _ in clients.answers} == {200}
            assert {name for _, name in clients.answers} == {"chat", "chat-2"}
        refused = relayline("restart", "house", "small", "--state-dir", state)
        assert (refused.returncode, "no pipeline 'small'; it has chat, chat-2" in refused.stderr) == (2, True)
