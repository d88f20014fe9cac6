"""A launched gateway manifest: two replicas of one model, and one of them is killed while streams run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
  context: {{tokens: 8192, lanes: 4}}
"""
CHANGED = """apiVersion: relayline.dev/v1alpha1
kind: Gateway
metadata: {name: house}
spec:
  http: {port: 0}
  pipelines:
    - {name: chat, manifest: chat.yaml}
    - {name: bad, manifest: bad.yaml}
"""

PIECES = 100  # of an answer, more than can be under way when its pipeline is killed


async def asked(session: aiohttp.ClientSession, model: str, *texts: str) -> tuple[str, int]:
    """Which pipeline answered, and how many tokens of the prompt it knew."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"model": model, "messages": messages, "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return answer.headers[PIPELINE_HEADER], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def stream(
    session: aiohttp.ClientSession, model: str, text: str, begun: asyncio.Event, killed: asyncio.Event
) -> tuple[str, bool]:
    """Which pipeline streamed, and whether it continued after the kill. No answer is over before that."""
    body = {"model": model, "prompt": text, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with session.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        raw, n_further = b"", 0
        try:
            async for piece in answer.content.iter_any():
                begun.set()
                raw += piece
                n_further += killed.is_set()
                if n_further > PIECES:
                    answer.close()
                    return answer.headers[PIPELINE_HEADER], True
        except aiohttp.ClientPayloadError:
            assert b'"code":"stage_lost"' in raw.rstrip().rpartition(b"\n\n")[2]
        return answer.headers[PIPELINE_HEADER], False


async def changed_while_serving(session: aiohttp.ClientSession, model: str, directory: Path, state: Path) -> None:
    """`up` again: a replica is removed in the middle of its answer, and a pipeline is added that cannot start."""
    (directory / "house.yaml").write_text(CHANGED)
    (directory / "bad.yaml").write_text(PIPELINE.format(model=directory / "none.gguf"))
    again = ("up", directory / "house.yaml", "--state-dir", state)
    dry = await asyncio.to_thread(relayline, *again, "--dry-run")
    assert "pipelines[chat-2]: gets no more requests" in dry.stdout
    assert "pipelines[bad]: is added, from" in dry.stdout
    body = {"model": model, "prompt": "def f", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with session.post("/pipelines/chat-2/v1/completions", json=body) as answer:
        raw = await answer.content.readany()
        applying = asyncio.create_task(asyncio.to_thread(relayline, *again, timeout_s=150))
        raw += await answer.content.read()
    assert raw.endswith(b"data: [DONE]\n\n"), "no answer is lost"
    assert b'"completion_tokens":400' in raw
    done = await applying
    assert done.returncode == 1
    assert "none.gguf: no such file; spec.model.path of the manifest names it. The other" in done.stderr
    assert "The other pipelines serve; mend it and run `up` again" in done.stderr
    await asked(session, model, "Still here?")


async def test_replicas_share_a_model_keep_its_chats_and_survive_each_other(tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(PIPELINE.format(model=DEMO))
    (tmp_path / "house.yaml").write_text(TWO_REPLICAS)
    state = tmp_path / "state"
    with running("up", tmp_path / "house.yaml", "--json", "--state-dir", state) as process:
        url, model = process.event["url"], process.event["model"]
        async with aiohttp.ClientSession(url) as session:
            await until(session, **{"chat": "ready", "chat-2": "ready"})
            first = "Copy the whole tree of files and keep all links. " * 12
            one, _ = await asked(session, model, first)
            again, n_known = await asked(session, model, first, "It does.", "Go on.")
            assert again == one
            assert n_known > 100
            events, killed = [asyncio.Event() for _ in range(4)], asyncio.Event()
            streams = [
                asyncio.create_task(stream(session, model, f"{at} def f", begun, killed))
                for at, begun in enumerate(events)
            ]
            await asyncio.gather(*(begun.wait() for begun in events))
            inner = json.loads((state / "pipelines" / "chat" / "state.json").read_bytes())["processes"]
            os.kill(next(each["pid"] for each in inner if each["role"] == "coordinator"), signal.SIGKILL)
            killed.set()
            found = await asyncio.gather(*streams)
            assert {name for name, _ in found} == {"chat", "chat-2"}, "both had some"
            assert all(goes_on == (name == "chat-2") for name, goes_on in found)
            await asked(session, model, "And now?")  # any living replica answers
            await until(session, chat="ready")  # its own `up` has started it again
            await changed_while_serving(session, model, tmp_path, state)
        done = relayline("status", "--state-dir", state, "--json")
        (house,) = json.loads(done.stdout)
        assert [(each["name"], each["state"]) for each in house["processes"]] == [
            ("house-chat", "ready"),
            ("house-bad", "failed"),
        ]
        assert [each["name"] for each in house["pipelines"]] == ["chat"]
        seen = json.loads(relayline("top", "--once", "--json", "--interval", "0.2", "--url", url).stdout)
        assert [(each["name"], each["phase"]) for each in seen["pipelines"]] == [("chat", "ready")]
