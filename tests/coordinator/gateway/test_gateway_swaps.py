"""A gateway whose pipelines do not fit into memory together: one sleeps before another wakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.gateway import awake
from relayline.coordinator.gateway.forward import PIPELINE_HEADER
from relayline.coordinator.gateway.gate import wakes
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError
from relayline.wire.common.phase import Phase
from tests.support.gateway_world import Pipeline, SleepyReplica, changing_gateway, gateway, pipelines, until
from tests.support.http_support import Gate, Script, says, tokens
from tests.support.polling import pause

pytestmark = pytest.mark.usefixtures("quick")


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5} | more


def held(gate: Gate) -> Script:
    def script(request: GenerationRequest) -> Any:
        yield from tokens(request, b"he", ends=False)
        yield gate
        yield from tokens(request, b"llo")

    return script


class House:
    """Pipelines a, b... of models chat, small..., of which one may be awake."""

    def __init__(self, served: list[Pipeline], session: aiohttp.ClientSession) -> None:
        self.served, self.session = served, session
        for replica in self.replicas:
            replica.on_wake = self._check

    @property
    def replicas(self) -> list[SleepyReplica]:
        return [each.generator for each in self.served if isinstance(each.generator, SleepyReplica)]

    def _check(self) -> None:
        assert sum(replica.ready for replica in self.replicas) == 1

    async def ask(self, model: str, path: str = "/v1/chat/completions") -> tuple[int, str, Any]:
        async with self.session.post(path, json=chat(model)) as answer:
            return answer.status, answer.headers.get(PIPELINE_HEADER, ""), await answer.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as answer:
            return await answer.json()

    async def until_waiting(self, n_requests: int) -> None:
        while (await self.get("/v1/pipeline"))["waiting"] != n_requests:
            await pause()


@contextlib.asynccontextmanager
async def house(tokenizer: Tokenizer, *models: str) -> AsyncIterator[House]:
    async with pipelines(tokenizer, *models, sleep=True) as served, gateway(served, awake_max=1) as session:
        yield House(served, session)


async def test_requests_in_turn_wake_one_pipeline_and_put_the_other_to_sleep(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        world.served[1].generator.script = says(b"small")
        for model, name, text in [("chat", "a", "hello"), ("small", "b", "small"), ("small", "b", "small")] * 2:
            status, answered, found = await world.ask(model)
            assert (status, answered, found["choices"][0]["message"]["content"]) == (200, name, text)
        assert [replica.n_wakes for replica in world.replicas] == [2, 2]
        await until(world.session, a="sleeping", b="ready")
        listed = {each["id"]: each["status"] for each in (await world.get("/v1/models"))["data"]}
        assert listed == {"chat": {"value": "unloaded", "args": []}, "small": {"value": "loaded", "args": []}}
        named = [[each["name"] for each in (await world.get(path))["models"]] for path in ("/api/tags", "/api/ps")]
        assert named == [["chat", "small"], ["small"]]
        assert await world.get("/v1/models/small") == (await world.get("/v1/models"))["data"][1]
        state = await world.get("/v1/pipeline")
        assert ([each["phase"] for each in state["pipelines"]], state["awake_max"]) == (["sleeping", "ready"], 1)
        async with world.session.get("/metrics") as answer:
            text = await answer.text()
        for name, value in (("swaps_total", 2), ("requests_waited_total", 1), ("pipeline_asleep", 1)):
            assert f'relayline_gateway_{name}{{pipeline="a"}} {value}.0' in text


async def test_a_stream_is_not_cut_by_a_request_for_another_model(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        gate = Gate()
        world.served[0].generator.script = held(gate)
        long = asyncio.create_task(world.ask("chat"))
        await gate.reached.wait()
        other = asyncio.create_task(world.ask("small"))
        await world.until_waiting(1)
        assert world.replicas[0].ready
        gate.opened.set()
        assert (await long)[2]["choices"][0]["message"]["content"] == "hello"
        assert (await other)[:2] == (200, "b")


async def test_a_client_that_leaves_waits_no_more(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        gate = Gate()
        world.served[0].generator.script = held(gate)
        long = asyncio.create_task(world.ask("chat"))
        await gate.reached.wait()
        other = asyncio.create_task(world.ask("small"))
        await world.until_waiting(1)
        other.cancel()
        await world.until_waiting(0)
        gate.opened.set()
        assert (await long)[0] == 200
        assert (await world.ask("chat"))[0] == 200
        assert world.replicas[1].n_wakes == 0


async def test_one_that_waits_too_long_is_told_when_to_come_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(tokenizer, "chat", "small") as world:
        await world.ask("chat")
        world.replicas[0].refuses = InvalidRequestError("its stages do not sleep")
        monkeypatch.setattr(awake, "WAIT_MAX_S", 0.1)
        async with world.session.post("/v1/chat/completions", json=chat("small")) as answer:
            assert (answer.status, int(answer.headers["Retry-After"]) > 0) == (503, True)
            found = await answer.json()
        assert found["error"]["code"] == "not_ready"
        assert "1 of the pipelines here may be awake at once; this one has waited" in found["error"]["message"]
        assert (await world.ask("chat"))[0] == 200


async def test_a_replica_that_sleeps_stays_asleep_while_another_one_answers(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "chat") as world:
        gates = [Gate() for _ in range(6)]
        scripts = iter(map(held, gates))
        for replica in world.replicas:
            replica.script = lambda request: next(scripts)(request)
        asking = [asyncio.create_task(world.ask("chat"))]
        await gates[0].reached.wait()
        awake_name = next(each.name for each in world.served if each.generator.ready)
        await until(world.session, **{awake_name: "ready"})
        asking += [asyncio.create_task(world.ask("chat")) for _ in gates[1:]]
        for gate in gates:  # more than it has lanes
            await gate.reached.wait()
            gate.opened.set()
        assert {name for _, name, _ in await asyncio.gather(*asking)} == {awake_name}


async def test_one_that_still_wakes_sleeps_before_another_one_wakes(tokenizer: Tokenizer) -> None:
    """Its client has left; what it answers when it is told to sleep is 200, too."""
    async with house(tokenizer, "chat", "small") as world:
        first, _ = world.replicas
        await world.ask("chat")
        first.ready, first.otherwise = False, Phase.WAKING
        await until(world.session, a="waking")
        other = asyncio.create_task(world.ask("small"))
        await world.until_waiting(1)
        first.otherwise = Phase.SLEEPING
        assert (await other)[:2] == (200, "b")


async def test_one_that_loads_is_told_to_sleep_once_it_can(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        first, _ = world.replicas
        await world.ask("chat")
        first.ready, first.otherwise = False, Phase.LOADING
        first.refuses = AssertionError("it was told too early")
        await until(world.session, a="loading")
        other = asyncio.create_task(world.ask("small"))
        await world.until_waiting(1)
        first.ready, first.refuses = True, None
        assert (await other)[:2] == (200, "b")


async def test_one_that_somebody_else_wakes_counts(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        await world.ask("chat")
        world.replicas[1].ready = True
        await until(world.session, a="sleeping", b="ready")
        async with world.session.post("/pipelines/a/wake_up") as answer:
            assert answer.status == 200
        await until(world.session, a="ready", b="sleeping")


async def test_a_start_waits_for_its_place_and_ends_with_its_gateway(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small", sleep=True) as served:
        async with changing_gateway(served, awake_max=1) as (session, whole):
            world = House(served, session)
            await world.ask("chat")
            async with whole.starting("b"):
                assert not world.replicas[0].ready, "it sleeps first"
            gate = Gate()
            served[0].generator.script = held(gate)
            long = asyncio.create_task(world.ask("chat"))
            await gate.reached.wait()
            starting = whole.starting("b")
            waits = asyncio.create_task(starting.__aenter__())
            await pause()
            assert not waits.done()
            gate.opened.set()
            await long
            await waits
        await starting.__aexit__(None, None, None)  # later than the gateway


async def test_a_pipeline_that_dies_gives_its_place_away(tokenizer: Tokenizer) -> None:
    async with house(tokenizer, "chat", "small") as world:
        await world.ask("chat")
        await world.served[0].kill()
        world.replicas[0].ready = False
        assert (await world.ask("small"))[:2] == (200, "b")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/messages?beta=true", True),
        ("POST", "/wake_up", True),
        ("POST", "/v1/responses", True),
        ("POST", "/api/chat", True),
        ("POST", "/sleep", False),
        ("POST", "//v1//tokenize/", False),
        ("POST", "/v1/messages/count_tokens", False),
        ("POST", "/v1/messages/batches", True),
        ("POST", "/v1/messages/batches/msgbatch_1/cancel", False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/v1/pipeline/drain", False),
        ("GET", "/v1/responses/resp_1", False),
        ("GET", "/metrics", False),
    ],
)
def test_these_requests_wake_a_pipeline(method: str, path: str, expected: bool) -> None:
    assert wakes(method, path) is expected
