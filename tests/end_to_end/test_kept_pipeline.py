"""Background responses that a restart cuts, over real stages: what is said then is what would have been said."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.opening import opened
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.http.responses.orders import OrderFiles
from relayline.coordinator.sessions.generation import GenerationRequest, Generator, TokenEvent, TokenStream
from relayline.coordinator.sessions.request_log import RequestRecord
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.settings.table import ServingSettings
from tests.end_to_end.test_images_pipeline import Borrowed, Model, model_fixture, needs_library, url_of
from tests.support.fleet import CTX, fleet
from tests.support.openai_client import openai_client
from tests.support.polling import pause
from tests.support.tiny_models import CHAT_TEMPLATE, END_TOKEN, TOKENS
from tests.support.tiny_projectors import picture

FIXTURES = (model_fixture,)
pytestmark = [needs_library, pytest.mark.parametrize("model", ["mlp"], indirect=True)]
WAIT_S = 60
CUT, ENDLESS = 7, -1  # tokens before it
SCHEMA = {
    "type": "object",
    "properties": {"all": {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 4}},
    "required": ["all"],
    "additionalProperties": False,
}
IMAGE = [
    {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": None}]}
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "extra_body": {"min_tokens": 30}},
    "seeded": {"temperature": 0.9, "extra_body": {"seed": 5, "min_tokens": 30}},
    "penalised": {
        "temperature": 0.7,
        "extra_body": {"min_tokens": 30, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 40},
    },
    "schema": {
        "temperature": 0,
        "text": {"format": {"type": "json_schema", "name": "all", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 400,
    },
    "seeded schema": {
        "temperature": 1.0,
        "text": {"format": {"type": "json_schema", "name": "all", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 400,
        "extra_body": {"seed": 7},
    },
    "tool": {
        "temperature": 0,
        "tools": [{"type": "function", "name": "all", "parameters": SCHEMA, "strict": True}],
        "tool_choice": "required",
        "max_output_tokens": 400,
    },
    "image": {"temperature": 0, "extra_body": {"min_tokens": 30}, "input": IMAGE},
}
ENDING = ("schema", "seeded schema", "tool")


class Held:
    """A stream that stops behind some tokens."""

    def __init__(self, stream: TokenStream, n_left: int) -> None:
        self._stream, self._events, self._n_left = stream, aiter(stream), n_left

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._n_left:
            await self._stream.aclose()  # the next one has the lane
            await asyncio.Event().wait()
        self._n_left -= 1
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Holding:
    """A pipeline whose streams stop behind some tokens."""

    def __init__(self, pipeline: Generator, n_tokens: int) -> None:
        self._pipeline, self._n_tokens = pipeline, n_tokens
        self.n_said: list[int] = []  # before each request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def open(self, request: GenerationRequest, record: RequestRecord | None = None) -> TokenStream:
        self.n_said.append(len(request.said))
        return Held(self._pipeline.open(request, record), self._n_tokens)


@contextlib.asynccontextmanager
async def served(model: Model, generator: Generator, kept: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    tokenizer = Tokenizer.load(model.tokenizer)
    app = make_app(
        generator, ServedModel("tiny", 1, tokenizer, ChatTemplate(CHAT_TEMPLATE), Borrowed(model.encoder)), HttpLimits()
    )
    stopping, settings = asyncio.Event(), ServingSettings(responses_dir=str(kept))
    try:
        async with opened(app, HttpListener(port=0), settings, generator, stopping=stopping) as (port, _):
            async with openai_client(f"http://127.0.0.1:{port}") as client:
                yield client
            stopping.set()
    finally:
        tokenizer.close()


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await pause()
    return found


def said(response: Any) -> tuple[Any, ...]:
    texts = [getattr(item, "arguments", None) or item.content[0].text for item in response.output]
    return response.status, texts, response.usage.output_tokens, response.usage.input_tokens


async def test_a_restart_changes_no_answer(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs alone: company moves logits, and near ties would fall otherwise."""
    written: Counter[str] = Counter()
    add = OrderFiles.add

    def counted_add(files: OrderFiles, id: str, events: Sequence[TokenEvent]) -> None:
        add(files, id, events)
        written[id] += len(events)

    monkeypatch.setattr(OrderFiles, "add", counted_add)
    IMAGE[0]["content"][1]["image_url"] = url_of(picture(5))  # type: ignore[index]
    common: dict[str, Any] = {"model": "tiny", "background": True, "max_output_tokens": 40, "input": "hello"}
    bodies = [common | fields for fields in CASES.values()]
    sizes: dict[str, Any] = {"n_vocab": len(TOKENS), "ctx_tokens": 4 * CTX, "n_lanes": 1}
    async with fleet(model.paths, file=model.file, is_end=TOKENS.index(END_TOKEN).__eq__, **sizes) as running:
        async with served(model, cast(Generator, Holding(running.pipeline, CUT)), tmp_path) as client:
            ids = [(await client.responses.create(**body)).id for body in bodies]
            async with asyncio.timeout(WAIT_S):
                while sum(written.values()) < CUT * len(ids):
                    await pause()
        going_on = Holding(running.pipeline, ENDLESS)
        async with served(model, cast(Generator, going_on), tmp_path) as client:
            cut = [said(await ended(client, id)) for id in ids]
            again = [(await client.responses.create(**body)).id for body in bodies]
            whole = [said(await ended(client, id)) for id in again]
    assert going_on.n_said == [CUT] * len(ids) + [0] * len(ids)
    assert cut == whole
    for case, (_, texts, *_) in zip(CASES, whole, strict=True):
        assert case not in ENDING or len(json.loads(texts[0])["all"]) == 4, case
