"""A coordinator is killed in the middle of a background response and of a chain: its clients get what was promised."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import openai

from relayline.deploy.machine.ports import free_port
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import running
from tests.support.openai_client import leave, openai_client
from tests.support.polling import pause

MIN_TOKENS, MAX_TOKENS = 200, 480  # the context has 512
WAIT_S = 120


async def again(client: openai.AsyncOpenAI, id: str) -> Any:
    """A response, once a coordinator answers again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await client.responses.retrieve(id)
            except openai.APIConnectionError:
                await pause()


def pids(state: Path) -> dict[str, int]:
    """The coordinator, and one of the stages."""
    (file,) = state.rglob("state.json")
    return {each["role"]: each["pid"] for each in json.loads(file.read_bytes())["processes"]}


async def under_way(client: openai.AsyncOpenAI, model: str, stage: int) -> list[Any]:
    """The first events of a response whose stage stands still, so that nothing ends meanwhile.

    A busy client may read the beginning of one that has ended by then. It asks again.
    """
    while True:
        stream = await client.responses.create(
            model=model,
            input="Write a long text.",
            max_output_tokens=MAX_TOKENS,
            background=True,
            stream=True,
            extra_body={"min_tokens": MIN_TOKENS},
        )
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if sum(each.type == "response.output_text.delta" for each in seen) == 5:
                os.kill(stage, signal.SIGSTOP)
                break
        await leave(stream)
        if (await client.responses.retrieve(seen[0].response.id)).status == "in_progress":
            return seen
        os.kill(stage, signal.SIGCONT)


async def test_a_killed_coordinator_goes_on_with_what_it_has_promised(tmp_path: Path) -> None:
    state, kept = tmp_path / "state", tmp_path / "kept"
    flags = ("--name", "keeps", "--stages", "2", "--split-dir", tmp_path / "split", "--state-dir", state, "--json")
    address = f"127.0.0.1:{free_port()}"
    with running("up", DEMO_MODEL, *flags, "--http", address, "--responses-dir", kept) as process:
        model = process.event["model"]
        async with openai_client(f"http://{address}") as client:
            first = await client.responses.create(model=model, input="Copy the tree.", max_output_tokens=8)
            whole = await client.responses.create(
                model=model, input="Copy the links.", max_output_tokens=8, background=True, temperature=0
            )
            while (await client.responses.retrieve(whole.id)).status != "incomplete":
                await pause()
            async with asyncio.timeout(WAIT_S):
                while not [*(kept / "stored").glob(first.id)]:
                    await pause()
            ended = pids(state)
            seen = await under_way(client, model, ended["stage"])
            id = seen[0].response.id
            os.kill(ended["coordinator"], signal.SIGKILL)
            try:
                assert (await again(client, id)).status == "in_progress"
            finally:
                os.kill(ended["stage"], signal.SIGCONT)
            last = seen[-1].sequence_number
            rest = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=last)]
            numbers = [event.sequence_number for event in [*seen, *rest]]
            assert numbers == [*range(len(numbers))]
            end = rest[-1].response
            text = "".join(each.delta for each in [*seen, *rest] if each.type == "response.output_text.delta")
            assert (end.status in ("completed", "incomplete"), end.output_text) == (True, text)
            assert end.usage.output_tokens >= MIN_TOKENS
            assert [event async for event in await client.responses.retrieve(id, stream=True)] == [*seen, *rest]
            more = await client.responses.create(model=model, input="And?", previous_response_id=first.id)
            assert more.previous_response_id == first.id
            await client.responses.create(model=model, input="And?", previous_response_id=whole.id)
