"""Two models behind a gateway whose machine has memory for one: real processes, and the whole models' own tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.paths import DEMO_MODEL, HYBRID_DEMO_MODEL
from relayline.deploy.testing.processes import relayline, running
from relayline.deploy.testing.reference import ReferenceModel
from tests.end_to_end.test_end_to_end import PROMPTS
from tests.end_to_end.test_hybrid_demo import assert_said_by
from tests.support.http_client import Client, tokens_of
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

PIPELINE = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: one}}
spec:
  model: {{path: {model}}}
  stages: 1
  context: {{tokens: 512, lanes: 4}}
"""
HOUSE = """apiVersion: relayline.dev/v1alpha1
kind: Gateway
metadata: {name: house}
spec:
  http: {port: 0}
  awakeMax: 1
  pipelines:
    - {name: plain, manifest: plain.yaml}
    - {name: hybrid, manifest: hybrid.yaml}
"""
MODELS = {"plain": DEMO_MODEL, "hybrid": HYBRID_DEMO_MODEL}


class World:
    """The gateway, and how its pipelines are."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.clients = {name: Client(session, {"url": url, "model": path.stem}) for name, path in MODELS.items()}

    async def sleep_of(self, name: str) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/pipelines/{name}/is_sleeping") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def watch(self) -> None:
        """Look all the time whether both are awake. One of them is looked at twice: the other may wake in between."""
        while True:
            before, other, after = [await self.sleep_of(name) for name in ("plain", "hybrid", "plain")]
            both = not (before["is_sleeping"] or other["is_sleeping"] or after["is_sleeping"])
            assert not (both and before["wakes"] == after["wakes"]), "both are awake"
            await pause()

    async def until_phases(self, **phases: str) -> None:
        while True:
            async with self.session.get(f"{self.url}/v1/pipeline") as answer:
                found = {each["name"]: each["phase"] for each in (await answer.json())["pipelines"]}
            if found == phases:
                return
            await pause()


async def test_models_that_do_not_fit_together_answer_in_turn(tmp_path: Path) -> None:
    for name, path in MODELS.items():
        (tmp_path / f"{name}.yaml").write_text(PIPELINE.format(model=path))
    (tmp_path / "house.yaml").write_text(HOUSE)
    state = tmp_path / "state"
    with running("up", tmp_path / "house.yaml", "--json", "--state-dir", state) as process:
        event = process.event
        assert (event["awake_max"], event["asleep"]) == (1, ["hybrid"]), "the first one is awake"
        async with aiohttp.ClientSession() as session, asyncio.timeout(240):
            world = World(session, event["url"])
            watching = asyncio.create_task(world.watch())
            await world.until_phases(plain="ready", hybrid="sleeping")
            await _in_turn(world)
            await _beside_a_stream(world)
            await _as_asked(world)
            assert not watching.done(), watching.exception()
            watching.cancel()
        shown = relayline("status", "--state-dir", state).stdout
        assert [line.split()[1] for line in shown.splitlines() if "/hybrid" in line or " serves " in line] == [
            "ready",
            "sleeping",
        ], shown


async def _in_turn(world: World) -> None:
    for name in ("hybrid", "plain", "plain", "hybrid"):
        client = world.clients[name]
        asked = {"content": PROMPTS[0], "add_special": True}
        prompt = tuple((await client.post(f"/pipelines/{name}/tokenize", asked))["tokens"])
        tokens = tokens_of(await client.stream(PROMPTS[0]))
        with ReferenceModel(MODELS[name], 512, 1) as whole:
            assert_said_by(whole, prompt, tokens)
    await world.until_phases(plain="sleeping", hybrid="ready")
    assert (await world.sleep_of("plain"))["wakes"] == 1


async def _beside_a_stream(world: World) -> None:
    others: list[asyncio.Task[list[dict[str, Any]]]] = []

    def ask(_: dict[str, Any]) -> None:  # at the first event of the stream
        if not others:
            others.append(asyncio.ensure_future(world.clients["plain"].stream(PROMPTS[1])))

    events = await world.clients["hybrid"].stream(PROMPTS[1], ask)
    assert len(tokens_of(events)) == 40, "whole"
    assert len(tokens_of(await others[0])) == 40
    await world.until_phases(plain="ready", hybrid="sleeping")


async def _as_asked(world: World) -> None:
    """Loaded and unloaded without a question, as llama-server's router and Ollama let their clients do."""
    plain, hybrid = (path.stem for path in MODELS.values())

    async def post(path: str, **body: Any) -> dict[str, Any]:
        async with world.session.post(f"{world.url}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    assert await post("/models/load", model=hybrid) == {"success": True}
    await world.until_phases(plain="sleeping", hybrid="ready")
    assert await post("/models/unload", model=hybrid) == {"success": True}
    await world.until_phases(plain="sleeping", hybrid="sleeping")
    assert (await post("/api/generate", model=plain))["done_reason"] == "load"
    await world.until_phases(plain="ready", hybrid="sleeping")
    assert (await post("/api/chat", model=plain, messages=[], keep_alive=0))["done_reason"] == "unload"
    await world.until_phases(plain="sleeping", hybrid="sleeping")
    assert (await post("/pipelines/plain/api/generate", model=plain))["done_reason"] == "load"
    await world.until_phases(plain="ready", hybrid="sleeping")
