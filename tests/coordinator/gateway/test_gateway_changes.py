"""A gateway's pipelines change while it serves: every answer that has begun is finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.gateway import bounds, serve
from relayline.coordinator.gateway.forward import PIPELINE_HEADER
from relayline.coordinator.gateway.links import BackendConfig
from relayline.coordinator.gateway.router import Heard, Router
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import UsageError
from tests.support.gateway_world import Pipeline, changing_gateway, pipelines, until
from tests.support.http_support import Gate, Step, tokens

pytestmark = pytest.mark.usefixtures("quick")

KEY = "0123456789abcdef"


def config(pipeline: Pipeline, name: str = "") -> BackendConfig:
    return BackendConfig(name or pipeline.name, pipeline.url)


async def asked(session: aiohttp.ClientSession, model: str, text: str = "hi") -> tuple[int, str, dict[str, Any]]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_completion_tokens": 5}
    async with session.post("/v1/chat/completions", json=body) as answer:
        return answer.status, answer.headers.get(PIPELINE_HEADER, ""), await answer.json()


async def names_of(session: aiohttp.ClientSession) -> list[str]:
    async with session.get("/v1/pipeline") as answer:
        return [each["name"] for each in (await answer.json())["pipelines"]]


def held(gate: Gate) -> Any:
    def script(request: GenerationRequest) -> Iterable[Step]:
        yield from tokens(request, b"he", ends=False)
        yield gate
        yield from tokens(request, b"llo")

    return script


async def test_a_pipeline_that_leaves_ends_its_answers_and_gets_no_more(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served) as (session, whole):
        gate = Gate()
        served[0].generator.script = held(gate)
        running = asyncio.create_task(asked(session, "chat"))
        await served[0].generator.streams_opened.wait()
        whole.leave("a")
        leaving = asyncio.create_task(whole.forget_leaving("a"))
        for at in range(4):
            assert (await asked(session, "chat", f"{at}"))[:2] == (200, "b")
        assert await names_of(session) == ["a", "b"], "it is not gone yet"
        assert not leaving.done()
        async with session.get("/pipelines/a/v1/models") as answer:
            assert answer.status == 404
        gate.opened.set()
        status, name, answer_body = await running
        assert (status, name) == (200, "a")
        assert answer_body["choices"][0]["message"]["content"] == "hello", "no answer is lost"
        await leaving
        assert await names_of(session) == ["b"]


async def test_a_model_comes_and_goes_while_others_are_asked(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small") as served, changing_gateway(served[:1]) as (session, whole):
        assert (await asked(session, "small"))[0] == 404
        await whole.add(config(served[1]))
        assert (await asked(session, "small"))[:2] == (200, "b")
        async with session.get("/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["chat", "small"]
        whole.arrange(["b", "a"])
        assert await names_of(session) == ["b", "a"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5}
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.headers[PIPELINE_HEADER] == "b", "the first one's model is meant without a name"
        whole.leave("b")
        await whole.forget_leaving("b")
        assert (await asked(session, "small"))[0] == 404
        assert (await asked(session, "chat"))[:2] == (200, "a")
        async with session.get("/metrics") as answer:
            assert 'pipeline="b"' not in await answer.text()


async def test_a_pipeline_takes_the_name_of_another(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served[:1]) as (session, whole):
        gate = Gate()
        served[0].generator.script = held(gate)
        running = asyncio.create_task(asked(session, "chat"))
        await served[0].generator.streams_opened.wait()
        await whole.add(config(served[1], "a"))
        assert (await asked(session, "chat"))[:2] == (200, "a")
        assert len(served[1].generator.requests) == 1, "the new one has answered"
        gate.opened.set()
        assert (await running)[2]["choices"][0]["message"]["content"] == "hello"
        await whole.forget_leaving("a")
        await served[0].kill()
        assert (await asked(session, "chat"))[:2] == (200, "a")


async def test_a_pipeline_is_shown_the_key_that_it_demands_now(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    async with (
        pipelines(tokenizer, "chat", keys=tmp_path / "keys") as served,
        changing_gateway(served) as (session, whole),
    ):
        async with session.get("/v1/pipeline") as answer:
            assert (await answer.json())["pipelines"][0]["problem"] == "it requires an API key"
        whole.set_key("gone", KEY)
        whole.set_key("a", KEY)
        assert await whole.until_ready("a")


async def test_one_that_is_replaced_is_no_unknown_model_meanwhile(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served[:1]) as (session, whole):
        await served[1].kill()  # it is being started
        await whole.add(config(served[1], "a"))
        status, _, body = await asked(session, "chat")
        assert (status, body["error"]["code"]) == (503, "not_ready")
        await served[1].start()
        await until(session, a="ready")
        assert (await asked(session, "chat"))[0] == 200


async def test_a_replaced_pipeline_is_waited_for_until_it_takes_requests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline that is next in turn may leave then: a request finds this one."""
    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served[:1]) as (session, whole):
        await served[1].kill()
        await whole.add(config(served[1], "a"))
        waiting = asyncio.create_task(whole.until_ready("a"))
        assert (await asked(session, "chat"))[0] == 503
        assert not waiting.done()
        await served[1].start()
        assert await waiting
        assert (await asked(session, "chat"))[0] == 200
        assert not await whole.until_ready("nobody")
        monkeypatch.setattr(serve, "READY_TIMEOUT_S", 0.05)
        await served[1].kill()
        assert not await whole.until_ready("a")


async def test_only_a_pipeline_that_was_there_is_missed(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """`up` starts a gateway before its pipelines: that these refuse connections at first is nothing to warn of."""
    caplog.set_level(logging.INFO, "relayline.gateway")
    async with pipelines(tokenizer, "chat") as served:
        await served[0].kill()
        async with changing_gateway(served) as (session, _):
            assert "pipeline a is not there yet: it refuses connections" in caplog.messages
            await served[0].start()
            await until(session, a="ready")
            assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
            await served[0].kill()
            await until(session, a="dead")
            assert "pipeline a gets no requests: it refuses connections" in caplog.messages


async def test_endless_requests_are_given_up_and_too_many_pipelines_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "LEAVE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(serve, "BACKENDS_MAX", 1)
    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served[:1]) as (session, whole):
        served[0].generator.script = held(Gate())
        running = asyncio.create_task(asked(session, "chat"))
        await served[0].generator.streams_opened.wait()
        with pytest.raises(UsageError, match="has at most 1 pipelines"):
            await whole.add(config(served[1]))
        whole.leave("a")
        await whole.add(config(served[1]))
        await whole.forget_leaving("a")
        assert (await running)[1] == "b", "its client had been sent nothing, so another one answered"
        with pytest.raises(UsageError, match="no certificates"):
            await whole.add(BackendConfig("b", served[1].url, ca_file=str(tmp_path / "none.pem")))
        assert (await asked(session, "chat"))[:2] == (200, "b"), "nothing has changed"
    assert bounds.LEAVE_TIMEOUT_S > 0


def test_stored_responses_of_one_that_leaves_are_looked_for_elsewhere() -> None:
    router = Router(["a", "b"])
    first, second = router.backends
    for backend in router.backends:
        backend.heard(Heard(("m",), is_ready=True), 0)
    router.learn("resp_1", first)
    router.learn("resp_2", second)
    router.leave(first)
    router.learn("resp_3", first)
    assert router.holder("resp_1") is router.holder("resp_3") is None
    assert router.holder("resp_2") is second
    assert router.models() == {"m": [second]}
    assert router.named("a") is None
