"""The whole system with real processes: `relayline up`, HTTP requests, tokens, faults, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from relayline.deploy.testing.forked import own_processes
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import Running, child_running, children, relayline, running, wait_gone
from tests.support.http_client import Client, assert_same_greedy, stopped_under_way, text_of, tokens_of
from tests.support.openai_client import openai_client
from tests.support.polling import pause

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


@pytest.fixture(scope="module", params=["auto", pytest.param("unified", marks=pytest.mark.nightly)])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("split")
    # Two groups: where a busy host makes the links look slow, the plan is right to send each of eight streams alone.
    flags = ("--stages", "3", "--split-dir", directory, "--http", "127.0.0.1:0", "--json", "--ctx", "1024", "--lanes",
             "16", "--threads", "1", "--kv-layout", request.param, "--groups", "2", "--group-rows", "4")  # fmt: skip
    # Once as a user's are. Each costs seconds of processor time, so no other process of this file is one.
    begun = own_processes() if request.param == "auto" else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        with begun:
            process = stack.enter_context(running("up", DEMO, *flags))
        process.event["asked"] = request.param
        yield process


async def test_eight_streams_equal_one_at_a_time_and_share_batches(served: Running) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        alone = [tokens_of(await client.stream(prompt)) for prompt in PROMPTS]
        before = await client.stages()
        together = [tokens_of(events) for events in await asyncio.gather(*map(client.stream, PROMPTS))]
        after = await client.stages()
        for prompt, left, right in zip(PROMPTS, alone, together, strict=True):
            await assert_same_greedy(client, prompt, left, right)
    layout = {"auto": "per-lane", "unified": "unified"}[served.event["asked"]]
    assert {stage["kv_layout"] for stage in after} == {layout}
    # Steps with several sessions: they really ran side by side. (The order in which a client hears says little.)
    for stage_before, stage_after in zip(before, after, strict=True):
        batched = sum(
            count - stage_before["steps_by_sessions"].get(size, 0)
            for size, count in stage_after["steps_by_sessions"].items()
            if int(size) > 1
        )
        assert batched > 0, f"no batch formed at stage {stage_after['index']}"


async def test_a_client_that_leaves_frees_its_lane(served: Running) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        body = client.body("def f(", stream=True, max_tokens=480)
        async with session.post(f"{client.url}/v1/completions", json=body) as response:
            await response.content.readline()
        async with asyncio.timeout(60):
            while any(stage["lanes_used"] for stage in await client.stages()):
                await pause()


async def test_seeded_sampling_is_reproducible(served: Running) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
        first, again, other = await asyncio.gather(
            *(client.complete("def main(", seed=seed, **options) for seed in (7, 7, 8))
        )
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert first["choices"][0]["text"] != other["choices"][0]["text"]


async def test_the_next_turn_of_a_chat_is_not_read_from_its_beginning(served: Running) -> None:
    history = list(b"# The quick brown fox jumps over the lazy dog, then it does so again.\n")
    is_on = served.event["asked"] == "auto"  # by default, where lanes have separate cells
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        for turn in range(3):
            answer = await client.complete(history, max_tokens=12, return_token_ids=True, ignore_eos=True)
            n_cached = len(history) - 1 - 5 if turn and is_on else 0
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": n_cached}
            alone = await client.complete(
                history, max_tokens=12, return_token_ids=True, ignore_eos=True, cache_prompt=False
            )
            assert alone["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            tokens = answer["choices"][0]["token_ids"]
            await assert_same_greedy(client, history, tokens, alone["choices"][0]["token_ids"])
            history += [*tokens, *b"hello"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def test_answers_have_the_shape_that_was_asked_for(served: Running) -> None:
    """A model of Python's library would not say this by itself. One concurrent stream asks for nothing."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)

        async def one(seed: int, fields: dict[str, Any]) -> str:
            body = {"model": client.model, "prompt": PROMPTS[seed], "max_tokens": 300, "seed": seed, **fields}
            async with session.post(f"{client.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                choice = (await response.json())["choices"][0]
            assert choice["finish_reason"] == "stop"
            return str(choice["text"])

        people = (one(seed, {"response_format": schema, "temperature": seed / 4}) for seed in range(4))
        number = one(5, {"guided_regex": "[0-9]{3}-[0-9]{4}"})
        plain = client.stream(PROMPTS[6])
        *texts, matched, _ = await asyncio.gather(*people, number, plain)
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", matched)


async def test_tools_are_called_as_they_want_to_be(served: Running) -> None:
    """The bundled model has never seen a tool: it says what the grammar allows."""
    tools = [
        {"type": "function", "function": {"name": "greet", "description": "Greet", "parameters": PERSON}},
        {"type": "function", "function": {"name": "wave", "parameters": {"type": "object", "properties": {}}}},
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 400}
    body["parallel_tool_calls"] = False  # it would call on and on
    async with openai_client(served.event["url"], max_retries=2) as client:

        async def called(seed: int, choice: Any) -> list[Any]:
            asked = {**body, "model": "relayline-demo", "seed": seed, "tool_choice": choice, "temperature": seed / 2}
            reply = await client.chat.completions.create(**asked)
            assert reply.choices[0].finish_reason == "tool_calls"
            async with client.chat.completions.stream(**asked) as stream:
                streamed = await stream.get_final_completion()
            whole = [call.function for call in reply.choices[0].message.tool_calls]
            pieces = [call.function for call in streamed.choices[0].message.tool_calls]
            return whole + pieces

        greet = {"type": "function", "function": {"name": "greet"}}
        answers = await asyncio.gather(*(called(seed, choice) for seed in range(3) for choice in ("required", greet)))
    for functions in answers:
        for function in functions:
            arguments = json.loads(function.arguments)
            assert arguments == {} if function.name == "wave" else jsonschema.validate(arguments, PERSON) is None
    assert {function.name for functions in answers[1::2] for function in functions} == {"greet"}


async def test_metrics_and_the_bench_command_see_the_same_server(served: Running) -> None:
    bench = await asyncio.to_thread(
        relayline, "bench", served.event["url"], "--streams", "1,3", "--rounds", "2", "--tokens", "8", "--json"
    )
    assert bench.returncode == 0, bench.stderr
    lines = [json.loads(line) for line in bench.stdout.splitlines()]
    assert [(line["load"], line["n_tokens"]) for line in lines] == [("1", 16), ("3", 48)]
    drawn = ("bench", served.event["url"], "--streams", "2", "--tokens", "4", "--temperature", ".7", "--top-p", ".9")
    assert (await asyncio.to_thread(relayline, *drawn, "--json")).returncode == 0
    too_long = ("bench", served.event["url"], "--streams", "1", "--prompt-tokens", "5000")
    table = await asyncio.to_thread(relayline, *too_long)
    refused = await asyncio.to_thread(relayline, *too_long, "--json")
    assert (table.returncode, refused.returncode) == (1, 1)
    assert "maximum context length" in refused.stderr
    assert "nan" not in table.stdout.lower()
    assert "NaN" not in refused.stdout
    assert json.loads(refused.stdout)["ttft_ms"]["p50"] is None, "no token, no time"
    async with aiohttp.ClientSession() as session:
        text = ""
        while 'relayline_stage_up{stage="2"} 1.0' not in text:  # a busy host takes longer than a picture waits
            async with session.get(f"{served.event['url']}/metrics") as response:
                assert response.status == 200
                text = await response.text()
    assert "relayline_overlap_ratio" in text


async def test_identical_greedy_requests_share_one_session(served: Running) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        before = (await client.pipeline())["shared_requests"]
        stage = child_running(served.process.pid, "stage-1")
        os.kill(stage, signal.SIGSTOP)  # no answer ends before all have come
        try:
            asking = [asyncio.create_task(client.stream("class Shared(", max_tokens=200)) for _ in range(3)]
            async with asyncio.timeout(60):
                while (await client.pipeline())["shared_requests"] != before + 2:
                    await pause()
        finally:
            os.kill(stage, signal.SIGCONT)
        answers = await asyncio.gather(*asking)
        assert len({text_of(answer) for answer in answers}) == 1
        assert len({answer[0]["id"] for answer in answers}) == 3


async def test_a_client_of_a_shared_session_keeps_its_answer_when_the_opener_leaves(served: Running) -> None:
    """One decode for a client that goes away, a whole answer, two choices, and one that ends at a stop string."""
    prompt, n_tokens = "class SharedQueue(", 400
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        stage = child_running(served.process.pid, "stage-1")
        opener = await stopped_under_way(
            client, functools.partial(client.stream, prompt, max_tokens=n_tokens), 1, stage
        )
        before = (await client.pipeline())["shared_requests"]

        async def shared() -> int:
            return int((await client.pipeline())["shared_requests"]) - before

        try:
            joined: list[asyncio.Task[Any]] = [
                asyncio.create_task(client.complete(prompt, max_tokens=n_tokens)),
                asyncio.create_task(client.complete(prompt, max_tokens=n_tokens, n=2)),
                asyncio.create_task(client.stream(prompt, max_tokens=n_tokens, stop=["\n"])),
            ]
            async with asyncio.timeout(60):
                while await shared() < 4:
                    await pause()
            opener.cancel()  # closes its connection, and so its stream
        finally:
            os.kill(stage, signal.SIGCONT)
        whole, two, stopped = await asyncio.gather(*joined)
        assert await shared() == 4, "a choice each, and two"
    (choice,) = whole["choices"]
    assert whole["usage"]["completion_tokens"] == n_tokens
    assert choice["finish_reason"] == "length"
    assert [other["text"] for other in two["choices"]] == [choice["text"]] * 2
    assert two["usage"]["completion_tokens"] == 2 * n_tokens
    assert text_of(stopped) == choice["text"].split("\n")[0]
    assert stopped[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({whole["id"], two["id"], stopped[0]["id"]}) == 3


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, None),
        ({"model": "another", "prompt": "x"}, 404, "model_not_found"),
        ({"prompt": "x " * 2000, "max_tokens": 8}, 400, "context_length_exceeded"),
        ({"prompt": [5] * 1024, "max_tokens": 5000}, 400, "context_length_exceeded"),
        ({"prompt": [999999], "max_tokens": 1}, 400, None),
    ],
)
async def test_wrong_requests_get_one_clear_line(served: Running, body: Any, status: int, code: str | None) -> None:
    async with aiohttp.ClientSession() as session:
        raw = body if isinstance(body, bytes) else json.dumps({"model": served.event["model"]} | body).encode()
        async with session.post(f"{served.event['url']}/v1/completions", data=raw) as response:
            answer = (await response.json())["error"]
            assert response.status == status
            assert "\n" not in answer["message"]
            assert code is None or answer["code"] == code
            if code == "context_length_exceeded":
                assert "1024" in answer["message"]


async def test_a_killed_stage_is_a_pause_not_a_failure(served: Running) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(session, served.event)
        undisturbed = tokens_of(await client.stream(PROMPTS[1], max_tokens=400))
        epoch = (await client.pipeline())["epoch"]
        victim = child_running(served.process.pid, "stage-1")
        seen = 0

        def kill_once(_: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            if seen == 3:
                os.kill(victim, signal.SIGKILL)

        disturbed = tokens_of(await client.stream(PROMPTS[1], kill_once, max_tokens=400))
        await client.until_ready(epoch)
        await assert_same_greedy(client, PROMPTS[1], undisturbed, disturbed)


@pytest.mark.slow
def test_stop_leaves_no_process(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = Running(
            ["up", DEMO, "--name", "ends", "--stages", "2", "--split-dir", tmp_path, "--http", "127.0.0.1:0", "--json"]
        )
        pids = children(process.process.pid)
        assert len(pids) == 3
        assert process.stop(number) == 0
        wait_gone(pids)


def test_children_leave_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    process = Running(
        ["up", DEMO, "--name", "ends", "--stages", "2", "--split-dir", tmp_path, "--http", "127.0.0.1:0", "--json"]
    )
    pids = children(process.process.pid)
    process.stop(signal.SIGKILL)
    wait_gone(pids)
