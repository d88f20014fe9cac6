"""Conversations behind a gateway: each is of one pipeline, and so are the responses that go on with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.coordinator.gateway.forward import PIPELINE_HEADER
from relayline.coordinator.gateway.links import BackendConfig
from relayline.coordinator.gateway.peek import Asked, peek
from relayline.coordinator.gateway.router import Heard, Router
from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError, NotReadyError
from tests.support.gateway_world import Pipeline, changing_gateway, gateway, pipelines, until
from tests.support.http_support import WAIT_S, Gate, Script, tokens

KEY = "gateway-key-0123456789"
PATH = "/v1/conversations"

pytestmark = pytest.mark.usefixtures("quick")


async def asked(
    session: aiohttp.ClientSession, method: str, path: str, body: Any = None, **more: Any
) -> tuple[int, str, dict[str, Any]]:
    """Status, the pipeline that answered, and the answer."""
    async with session.request(method, path, json=body, **more) as answer:
        return answer.status, answer.headers.get(PIPELINE_HEADER, ""), await answer.json()


def response(conversation: Any, model: str | None = "chat") -> dict[str, Any]:
    named = {"model": model} if model is not None else {}
    return named | {"input": "hi", "max_output_tokens": 2, "conversation": conversation}


def others_first(served: list[Pipeline], name: str) -> list[Pipeline]:
    return sorted(served, key=lambda each: each.name == name)


async def test_all_that_is_about_a_conversation_goes_where_it_is(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "chat", "small") as served:
        async with gateway(served) as session:
            status, home, begun = await asked(session, "POST", PATH, {"metadata": {"a": "b"}})
            assert status == 200
            assert home in ("a", "b"), "one of those that answer without a model"
            item = {"items": [{"role": "user", "content": "one"}]}
            path = f"{PATH}/{begun['id']}"
            for method, where, body in (
                ("GET", path, None),
                ("POST", path, {"metadata": {}}),
                ("POST", f"{path}/items", item),
                ("GET", f"{path}/items?limit=1", None),
                *[("POST", "/v1/responses", response(begun["id"]))] * 3,
                ("POST", "/v1/responses", response({"id": begun["id"]}, None)),
                ("POST", "/v1/responses/input_tokens", response(begun["id"])),
            ):
                assert (await asked(session, method, where, body))[:2] == (200, home), (method, where)
        async with gateway(others_first(served, home)) as session:  # it knows nothing, and asks the right one last
            for _ in range(3):
                assert (await asked(session, "GET", f"{path}/items"))[:2] == (200, home)
            _, _, found = await asked(session, "GET", "/v1/pipeline")
            assert {each["name"]: each["sent"] for each in found["pipelines"]} == {
                each.name: 3 if each.name == home else 1 for each in served
            }, "it asks all once"
        async with gateway(others_first(served, home)) as session:
            assert (await asked(session, "POST", "/v1/responses", response(begun["id"], None)))[:2] == (200, home)
            assert (await asked(session, "DELETE", path))[:2] == (200, home)
            status, _, found = await asked(session, "GET", path)
            assert (status, found["error"]["code"]) == (404, "conversation_not_found")
            status, _, found = await asked(session, "POST", "/v1/responses", response(begun["id"]))
            assert (status, found["error"]["code"]) == (404, "conversation_not_found")


async def test_what_a_pipeline_that_starts_again_may_have_is_not_said_to_be_gone(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small") as served, changing_gateway(served) as (session, whole):
        _, home, begun = await asked(session, "POST", PATH, {"model": "small"})
        _, _, answered = await asked(session, "POST", "/v1/responses", response(begun["id"], "small"))
        assert home == "b"
        await served[1].kill()
        await whole.add(BackendConfig("b", served[1].url))  # as a restart does, which takes another one to its place
        more = {"model": "chat", "input": "hi", "previous_response_id": "resp_1"}
        ways = (
            ("GET", f"{PATH}/{begun['id']}", None),
            ("GET", f"/v1/responses/{answered['id']}", None),
            ("POST", f"/v1/responses/{answered['id']}/cancel", {}),
            ("POST", "/v1/responses", response(begun["id"], None)),
        )
        for way in ways:
            status, _, found = await asked(session, *way)
            assert (status, found["error"]["code"]) == (503, "not_ready"), way
            assert "it may be at a pipeline that does not answer now (b: it refuses connections)" in str(found), way
        assert (await asked(session, "POST", "/v1/responses", more))[:2] == (404, "a"), "only its model's count"
        await served[1].start()
        await until(session, b="ready")
        for way in ways:
            assert (await asked(session, *way))[0] == 404, "each has said so"


async def test_a_model_chooses_the_pipeline_of_a_conversation(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small") as served:
        async with gateway(served) as session:
            _, home, begun = await asked(session, "POST", PATH, {"model": "small"})
            assert home == "b"
            assert (await asked(session, "POST", f"{PATH}?model=small", {}))[:2] == (200, "b")
            assert (await asked(session, "POST", "/v1/responses", response(begun["id"], "small")))[:2] == (200, "b")
            assert (await asked(session, "POST", "/v1/responses", response(begun["id"], None)))[:2] == (200, "b")
            status, _, found = await asked(session, "POST", "/v1/responses", response(begun["id"]))
            assert (status, found["error"]["param"]) == (400, "conversation")
            assert found["error"]["message"] == (
                "conversation: it is kept with the model 'small', and 'chat' is served elsewhere; name the model that "
                "is to answer when you create a conversation"
            )
        async with gateway(served) as session:  # one that has to find out
            assert (await asked(session, "POST", "/v1/responses", response(begun["id"])))[0] == 400
            chat = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "conversation": begun["id"]}
            assert (await asked(session, "POST", "/v1/chat/completions", chat))[:2] == (200, "a"), "a field of others"


async def test_a_key_begins_conversations_with_a_model_that_it_may_use(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {KEY} models=small\n")
    keys.chmod(0o600)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with pipelines(tokenizer, "chat", "small") as served, gateway(served, api_keys_file=keys) as session:
        for path, body, expected in (
            (PATH, {}, 200),
            (PATH, {"model": "small"}, 200),
            (PATH, {"model": "chat"}, 404),
            (f"{PATH}?model=chat", {}, 404),
        ):
            status, name, _ = await asked(session, "POST", path, body, headers=headers)
            assert (status, name) == (expected, "b" if expected == 200 else "")


def held(gate: Gate) -> Script:
    def script(request: GenerationRequest) -> Any:
        yield from tokens(request, b"h", ends=False)
        yield gate
        yield from tokens(request, b"i")

    return script


async def test_conversations_wait_for_no_pipeline_that_may_not_wake(tokenizer: Tokenizer) -> None:
    async with pipelines(tokenizer, "chat", "small", sleep=True) as served, gateway(served, awake_max=1) as session:
        await until(session, a="sleeping", b="sleeping")
        gate = Gate()
        served[0].generator.script = held(gate)
        answering = asyncio.create_task(asked(session, "POST", "/v1/responses", {"model": "chat", "input": "hi"}))
        async with asyncio.timeout(WAIT_S):
            await gate.reached.wait()
            _, name, begun = await asked(session, "POST", PATH, {"model": "small"})
            body = {"items": [{"role": "user", "content": "one"}]}
            assert (await asked(session, "POST", f"{PATH}/{begun['id']}/items", body))[:2] == (200, name) == (200, "b")
        assert not answering.done(), "the one that may be awake"
        gate.opened.set()
        assert (await answering)[:2] == (200, "a")
        assert served[1].generator.phase.value == "sleeping"


def test_a_conversation_is_read_in_either_form() -> None:
    assert peek(b'{"conversation": "conv_1"}').conversation_id == "conv_1"
    assert peek(b'{"conversation": {"id": "conv_1"}}').conversation_id == "conv_1"
    for other in (b'{"conversation": 5}', b'{"conversation": {}}', b'{"conversation": null}', b"{}"):
        assert peek(other).conversation_id == ""


def test_a_conversation_binds_its_responses_to_its_pipeline() -> None:
    router = Router(["a", "b", "c"])
    for backend, model in zip(router.backends, ("chat", "chat", "small"), strict=True):
        backend.heard(Heard((model,), is_ready=True), 0)
    _, b, c = router.backends
    router.learn("conv_b", b)
    router.learn("conv_c", c)
    for key in range(9):
        b.sent(key, Asked())
    assert router.choose(Asked("chat", conversation_id="conv_b")) is b
    assert router.choose(Asked(conversation_id="conv_c")) is c
    with pytest.raises(InvalidRequestError, match="kept with the model 'small', and 'chat' is served elsewhere"):
        router.choose(Asked("chat", conversation_id="conv_c"))
    b.failed("gone")
    with pytest.raises(NotReadyError, match="b: gone"):
        router.choose(Asked("chat", conversation_id="conv_b"))
