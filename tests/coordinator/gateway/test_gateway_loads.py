"""Models that clients load and unload at a gateway, as llama-server's router and Ollama let them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.gateway import awake, loads, model_handlers
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from relayline.wire.common.phase import Phase
from tests.coordinator.gateway.test_gateway_swaps import House, chat, held, house
from tests.support.gateway_world import changing_gateway, gateway, pipelines, until
from tests.support.http_support import WAIT_S, Gate
from tests.support.polling import pause

pytestmark = pytest.mark.usefixtures("quick")

KEY, OTHER_KEY = "gateway-key-0123456789", "pipeline-key-0123456789"
LOADED, LOADING, UNLOADED = ({"value": value, "args": []} for value in ("loaded", "loading", "unloaded"))
FAILED = UNLOADED | {"failed": True, "exit_code": 1}
SUCCESS = (200, {"success": True})


@pytest.fixture(params=[0.0], autouse=True)
def answer_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a load is waited for before its client gets its answer."""
    monkeypatch.setattr(loads, "LOAD_ANSWER_S", request.param)
    monkeypatch.setattr(model_handlers, "STATUS_EVERY_S", 0.02)


waits_for_loads = pytest.mark.parametrize("answer_s", [WAIT_S], indirect=True)


async def post(world: House, path: str, body: Any, **more: Any) -> tuple[int, Any]:
    async with world.session.post(path, json=body, **more) as answer:
        return answer.status, await answer.json()


async def load(world: House, model: str, what: str = "load", **more: Any) -> tuple[int, Any]:
    status, found = await post(world, f"/models/{what}", {"model": model}, **more)
    return status, found["error"]["message"] if "error" in found else found


async def statuses(world: House) -> dict[str, Any]:
    return {each["id"]: each["status"] for each in (await world.get("/models"))["data"]}


async def until_statuses(world: House, **expected: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while await statuses(world) != expected:
            await pause()


@contextlib.asynccontextmanager
async def busy(world: House) -> AsyncIterator[Gate]:
    """Within the context `chat` writes an answer, which is whole in the end."""
    gate = Gate()
    world.served[0].generator.script = held(gate)
    long = asyncio.create_task(world.ask("chat"))
    await gate.reached.wait()
    yield gate
    gate.opened.set()
    assert (await long)[2]["choices"][0]["message"]["content"] == "hello"


@waits_for_loads
async def test_a_model_is_loaded_in_the_place_of_another_and_unloaded(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        assert await statuses(world) == {"chat": UNLOADED, "small": UNLOADED}
        assert await load(world, "chat") == SUCCESS
        assert await load(world, "small") == SUCCESS
        assert await statuses(world) == {"chat": UNLOADED, "small": LOADED}
        assert await load(world, "small") == (400, "model is already running")
        assert await load(world, "small", "unload") == SUCCESS
        assert await statuses(world) == {"chat": UNLOADED, "small": UNLOADED}
        assert await load(world, "small", "unload") == (400, "model is not running")
        for what in ("load", "unload"):
            status, message = await load(world, "huge", what)
            assert (status, "use one of chat, small" in message) == (404, True)
            assert (await post(world, f"/models/{what}", {}))[0] == 400
        assert [replica.n_wakes for replica in world.replicas] == [1, 1]
        await world.served[0].kill()
        await until(world.session, a="dead")
        assert await statuses(world) == {"chat": FAILED, "small": UNLOADED}
        for what in ("load", "unload"):
            assert (await load(world, "chat", what))[0] == 503


async def test_a_load_cuts_no_answer_and_its_client_does_not_wait(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        async with busy(world):
            assert await load(world, "small") == SUCCESS
            await until_statuses(world, chat=LOADED, small=LOADING)
            assert await load(world, "small") == (400, "model is already running")
            await world.until_waiting(1)
        await until_statuses(world, chat=UNLOADED, small=LOADED)


async def test_a_load_that_waits_is_given_up_by_an_unload(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        async with busy(world):
            assert await load(world, "small") == SUCCESS
            assert await load(world, "small", "unload") == SUCCESS
            await until_statuses(world, chat=LOADED, small=UNLOADED)
            await world.until_waiting(0)
        assert (await world.ask("chat"))[0] == 200
        assert world.replicas[1].n_wakes == 0


async def test_a_pipeline_that_loads_is_told_to_sleep_by_an_unload(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        first = world.replicas[0]
        gate = first.waking = Gate()
        assert await load(world, "chat") == SUCCESS
        await gate.reached.wait()
        assert await statuses(world) == {"chat": LOADING, "small": UNLOADED}
        assert await load(world, "chat", "unload") == SUCCESS
        assert first.n_wakes == 0, "as the fake has it, a wake ends with its client"


async def test_an_unload_during_an_answer_lets_it_end(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        async with busy(world):
            assert await load(world, "chat", "unload") == SUCCESS
            assert (await statuses(world))["chat"] == LOADED
        world.replicas[0].ready = False  # as it was told
        await until_statuses(world, chat=UNLOADED, small=UNLOADED)


async def test_a_load_whose_turn_does_not_come_has_failed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tokenizer, "chat", "small") as world:
        async with busy(world):
            assert await load(world, "small") == SUCCESS
            await world.until_waiting(1)
            monkeypatch.setattr(awake, "WAIT_MAX_S", 0.0)
            await until_statuses(world, chat=LOADED, small=FAILED)
        assert world.replicas[1].n_wakes == 0


@waits_for_loads
async def test_a_load_takes_back_an_unload_that_waits_for_an_answer(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        first = world.replicas[0]
        async with busy(world):
            assert await load(world, "chat", "unload") == SUCCESS
            assert first.is_asked
            assert await load(world, "chat") == SUCCESS
            assert not first.is_asked
            assert await load(world, "chat") == (400, "model is already running")
        assert await load(world, "chat", "unload") == SUCCESS
        assert await load(world, "chat") == SUCCESS, "it sleeps: this wakes it"
        assert await load(world, "chat") == (400, "model is already running")


@waits_for_loads
async def test_a_load_that_fails_soon_is_refused(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        first = world.replicas[0]
        first.cannot_wake = NotReadyError("the pipeline cannot wake: b: no memory")
        assert await load(world, "chat") == (503, "the pipeline cannot wake: b: no memory")
        assert await statuses(world) == {"chat": FAILED, "small": UNLOADED}
        first.cannot_wake = None
        assert (await world.ask("chat"))[0] == 200
        await until_statuses(world, chat=LOADED, small=UNLOADED)
        assert await load(world, "chat", "unload") == SUCCESS
        assert (await statuses(world))["chat"] == UNLOADED, "no failure any more"
        first.ready, first.refuses = True, InvalidRequestError("these stages do not sleep")
        assert await load(world, "chat", "unload") == (400, "these stages do not sleep")


async def test_whoever_watches_hears_of_each_change(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world, world.session.get("/models/sse") as feed:
        assert feed.headers["Content-Type"].startswith("text/event-stream")

        async def heard() -> tuple[str, str, Any]:
            async with asyncio.timeout(WAIT_S):
                while not (line := await feed.content.readline()).startswith(b"data: "):
                    assert line in (b"\n", b": ping\n")
            event = json.loads(line.removeprefix(b"data: "))
            return event["model"], event["event"], event.get("data")

        first = world.replicas[0]
        for cannot_wake, expected in (
            (NotReadyError("no memory"), {"status": "unloaded", "exit_code": 1}),
            (None, {"status": "loaded"}),
        ):
            gate = first.waking = Gate()
            first.cannot_wake = cannot_wake
            await load(world, "chat")
            assert await heard() == ("chat", "status_change", {"status": "loading"})
            gate.opened.set()
            assert await heard() == ("chat", "status_change", expected)
        await load(world, "chat", "unload")
        assert await heard() == ("chat", "status_change", {"status": "unloaded"})


async def test_other_models_are_told_and_the_feed_ends_with_its_gateway(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small", sleep=True) as served, aiohttp.ClientSession() as client:
        async with changing_gateway(served) as (_, whole):
            feed = await client.get(f"{whole.url}/models/sse")
            assert await feed.content.readline() == b": ping\n"
            whole.leave("b")
            await feed.content.readuntil(b'data: {"model":"*","event":"models_reload"}\n\n')
        async with asyncio.timeout(WAIT_S):
            assert await feed.content.read() == b"", "whole: it was ended in order"


async def test_a_gateway_that_ends_gives_up_its_loads(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", sleep=True) as served, contextlib.AsyncExitStack() as stack:
        session, _ = await stack.enter_async_context(changing_gateway(served, awake_max=1))
        world = House(served, session)
        gate = world.replicas[0].waking = Gate()
        assert await load(world, "chat") == SUCCESS
        await gate.reached.wait()
        async with asyncio.timeout(WAIT_S):
            await stack.aclose()


@waits_for_loads
async def test_one_replica_is_loaded_and_all_are_unloaded(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat", sleep=True) as served, gateway(served) as session:
        world = House(served, session)
        for replica in world.replicas:
            replica.on_wake = lambda: None
        assert await load(world, "chat") == SUCCESS
        assert sorted(replica.n_wakes for replica in world.replicas) == [0, 1]
        for replica in world.replicas:
            replica.ready = True
        assert await load(world, "chat", "unload") == SUCCESS
        assert [replica.ready for replica in world.replicas] == [False, False]


@waits_for_loads
async def test_a_replica_that_dies_while_it_waits_to_be_unloaded_is_not_loaded(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat", sleep=True) as served, gateway(served) as session:
        world, gate = House(served, session), Gate()
        first, second = world.replicas
        for replica in world.replicas:
            replica.on_wake = lambda: None
        first.script = held(gate)
        async with session.post("/v1/chat/completions", json=chat("chat", stream=True)) as answer:
            await answer.content.readany()
            await gate.reached.wait()
            assert await load(world, "chat", "unload") == SUCCESS
            assert first.is_asked
            await served[0].kill()
        await until_statuses(world, chat=UNLOADED)
        assert await load(world, "chat") == SUCCESS
        assert second.n_wakes == 1


@waits_for_loads
@pytest.mark.parametrize("checks", [True, False], ids=["the gateway checks keys", "it passes them on"])
async def test_who_may_not_steer_neither_loads_nor_unloads(tokenizer: Tokenizer, tmp_path: Path, checks: bool) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    for path, text in (
        (own, f"guest: {KEY} steers=no\nowner: {KEY[::-1]}\nother: {KEY[::-1]}x models=small\n"),
        (theirs, f"{OTHER_KEY}\nguest: {KEY} steers=no\nowner: {KEY[::-1]}\n"),
    ):
        path.write_text(text)
        path.chmod(0o600)
    listener = {"api_keys_file": own} if checks else {}
    async with (
        pipelines(tokenizer, "chat", keys=theirs, sleep=True) as served,
        gateway(served, key=OTHER_KEY, awake_max=1, **listener) as session,
    ):
        world = House(served, session)
        guest, owner, other = ({"Authorization": f"Bearer {key}"} for key in (KEY, KEY[::-1], f"{KEY[::-1]}x"))
        unload = {"model": "chat", "keep_alive": 0}
        refusal = "this API key may not steer the pipeline (steers=no)"
        assert await load(world, "chat", headers=guest) == (403, refusal)
        assert world.replicas[0].n_wakes == 0
        assert await load(world, "chat", headers=owner) == SUCCESS
        assert await load(world, "chat", "unload", headers=guest) == (403, refusal)
        assert await post(world, "/api/generate", unload, headers=guest) == (403, {"error": refusal})
        assert world.replicas[0].ready
        status, found = await post(world, "/api/chat", {"model": "chat"}, headers=guest)
        assert (status, found["done_reason"]) == (200, "load"), "as any question would"
        assert (await post(world, "/api/generate", unload, headers=owner))[0] == 200
        assert not world.replicas[0].ready
        if checks:
            assert (await load(world, "chat", headers=other))[0] == 404
            assert (await post(world, "/api/chat", unload, headers=other))[0] == 404
            assert (await load(world, "chat"))[0] == 401


async def test_ollamas_clients_load_and_unload_without_a_question(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        for model in ("chat", "small", "small:latest"):
            status, found = await post(world, "/api/generate", {"model": model})
            assert (status, found["done_reason"]) == (200, "load")
        await until_statuses(world, chat=UNLOADED, small=LOADED)
        unload = {"model": "chat", "messages": [], "keep_alive": "0s"}
        for path in ("/api/chat", "/pipelines/a/api/chat"):
            status, found = await post(world, path, unload)
            assert (status, found["done_reason"], found["message"]["content"]) == (200, "unload", "")
        assert await statuses(world) == {"chat": UNLOADED, "small": LOADED}, "it took no place"
        assert (await post(world, "/api/generate", {"model": "small", "keep_alive": 0}))[1]["response"] == ""
        assert await statuses(world) == {"chat": UNLOADED, "small": UNLOADED}
        assert (await post(world, "/api/generate", {"model": "huge", "keep_alive": 0}))[0] == 404
        assert [replica.n_wakes for replica in world.replicas] == [1, 1]
        question = {"model": "chat", "prompt": "hi", "keep_alive": 0, "stream": False}
        assert (await post(world, "/api/generate", question))[1]["response"] == "hello"
        await until_statuses(world, chat=LOADED, small=UNLOADED)  # beside a question it is ignored


async def test_llama_servers_clients_see_a_router(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        found = await world.get("/props")
        assert (found["role"], found["max_instances"], found["models_autoload"]) == ("router", 1, True)
        assert (await world.get("/props?model=small"))["model_alias"] == "small"
        assert world.replicas[1].phase is Phase.SLEEPING
        for method, path, expected in (
            ("POST", "/models", 405),
            ("DELETE", "/models?model=chat", 405),
            ("POST", "/pipelines/a/models/load", 404),
            ("HEAD", "/models/sse", 404),
        ):
            async with world.session.request(method, path) as answer:
                assert answer.status == expected, path
