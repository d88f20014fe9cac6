"""JSON has whole numbers of any size, and msgpack does not: each of them is answered or refused as the client's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relayline.coordinator.http.llama.asking import LlamaBody
from relayline.coordinator.http.messages.asking import MessagesBody
from relayline.coordinator.http.requests.bodies import ChatBody, CompletionBody
from relayline.coordinator.http.responses.bodies import ResponsesBody
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from tests.support.http_support import FakeGenerator, says, serving

HUGE = (-(10**30), 1 << 63, 1 << 64, 10**30)
MESSAGES = [{"role": "user", "content": "x"}]
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": MESSAGES}),
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    "/completion": (LlamaBody, {"prompt": "x"}),
    "/v1/responses": (ResponsesBody, {"input": "x"}),
    "/v1/messages": (MessagesBody, {"messages": MESSAGES, "max_tokens": 2}),
}
LISTS = ("stop_token_ids", "allowed_token_ids")


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.gguf"))


def bodies_of(kind: type[msgspec.Struct], base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Bodies with a huge number in each field that takes numbers, alone and beside a limit."""
    for number in HUGE:
        for field in msgspec.structs.fields(kind):
            if "int" in str(field.type) and field.name not in base.keys() - {"max_tokens"}:
                yield base | {field.name: number}
        if issubclass(kind, MessagesBody):
            continue
        yield base | {"options": {"seed": number}}
        for name in LISTS:
            yield base | {name: [number]}
        for biases in ([[number, 1]], {str(number): 1}):
            yield base | {"logit_bias": biases}
        yield base | {"prediction": {"type": "content", "content": [number]}}
        yield base | {"tools": [{"type": "function", "name": "f", "parameters": {"maximum": number}}]}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_huge_number_is_no_fault_of_the_server(tokenizer: Tokenizer, path: str) -> None:
    kind, base = ROUTES[path]
    async with (
        serving(tokenizer, FakeGenerator(says(b"x"))) as served,
        aiohttp.ClientSession(served.url) as session,
    ):
        for body in bodies_of(kind, base):
            async with session.post(path, json=body) as reply:
                assert reply.status in (200, 400), (body, await reply.text())


async def test_a_huge_limit_is_all_that_the_context_leaves(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession(served.url) as session:
        for body in ({"max_tokens": 1 << 70}, {"n_predict": 1 << 70}, {"n_predict": -1}):
            async with session.post("/completion", json={"prompt": "x"} | body) as reply:
                assert reply.status == 200, await reply.text()
        assert len({request.max_tokens for request in served.generator.requests}) == 1
