"""Background responses that a restart cuts at any token: their items and events are those of an answer in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.http.dialects.test_responses import CALL, TEMPLATE, TOOL
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, Step, tokens
from tests.support.kept_responses import serving_kept
from tests.support.openai_client import leave, openai_client
from tests.support.polling import pause

TOP = ((104, -0.5), (105, -1.5))
CASES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a thought and two calls": (b"<think>hm</think>" + CALL + CALL, {"tools": [TOOL]}),
    "text beside a thought": ("<think>a\u00e9</think>b\u20ac".encode(), {}),
    "a stop string": (b"hello stop here", {"extra_body": {"stop": ["stop here", "nothing"]}}),
    "its most tokens": (b"hello", {"max_output_tokens": 4}),
    "logprobs": (b"hello", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
}


class CutOnce(FakeGenerator):
    """Says one text from behind what was said before. Where it cuts, each stream stops behind a few tokens more."""

    def __init__(self, text: bytes) -> None:
        super().__init__(self.play)
        self.text = text
        self.cuts: Iterator[int] | None = None
        self.gates: list[Gate] = []

    def play(self, request: GenerationRequest) -> Iterable[Step]:
        steps: list[Step] = [*tokens(request, self.text, top=TOP if request.sampling.n_logprobs > 0 else ())]
        steps = steps[len(request.said) :]
        if self.cuts is not None:
            self.gates.append(Gate())
            steps.insert(next(self.cuts), self.gates[-1])
        return steps


def bare(found: Any) -> Any:
    """A response or an event without what differs from one request to the next."""
    if isinstance(found, dict):
        left_out = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: bare(value) for key, value in found.items() if key not in left_out}
    return [bare(each) for each in found] if isinstance(found, list) else found


async def told(client: openai.AsyncOpenAI, id: str) -> tuple[Any, Any]:
    """The events of a response from the first one on, and how it has ended."""
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in await client.responses.retrieve(id, stream=True)]
        while (whole := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await pause()
    return bare([event.to_dict() for event in events]), bare(whole.to_dict())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
async def test_an_answer_is_the_same_wherever_it_was_cut(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text, fields = CASES[case]
    cuts = range(0, fields.get("max_output_tokens", len(text) + 1), 1 if len(text) < 32 else 5)
    body: dict[str, Any] = {"model": MODEL, "background": True, "stream": True, **fields}
    ids: list[str] = []
    first, second = CutOnce(text), CutOnce(text)
    async with serving_kept(tokenizer, tmp_path, first, template=TEMPLATE) as url, openai_client(url) as client:
        before = await client.responses.create(model=MODEL, input="well", store=True, max_output_tokens=1)
        body |= {"input": "hi", "previous_response_id": before.id}
        first.cuts = iter(cuts)
        for _ in cuts:
            stream = await client.responses.create(**body)
            ids.append((await anext(stream)).response.id)
            await leave(stream)
        async with asyncio.timeout(WAIT_S):
            for gate in first.gates:
                await gate.reached.wait()
    async with serving_kept(tokenizer, tmp_path, second, template=TEMPLATE) as url, openai_client(url) as client:
        stream = await client.responses.create(**body)
        (whole_id,) = [event.response.id async for event in stream if event.type == "response.created"]
        whole = await told(client, whole_id)
        for at, id in zip(cuts, ids, strict=True):
            assert await told(client, id) == whole, f"cut behind {at} tokens"
    assert max(len(request.said) for request in second.requests) >= cuts[-1] // 2, "nothing was cut"
