"""A client of one served pipeline for tests, and a comparison of two greedy answers to one prompt."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from tests.support.attention import near
from tests.support.polling import pause

# Nats between two tokens below which batch shape may decide. The unsplit demonstration model itself moves by up to 0.35
# in logits between batch shapes (`relayline certify`): activations are quantised before each product.
NEAR_TIE = near(0.25, 0.35)
N_TOP = 5


class Client:
    """Sends greedy requests, and records the time of each token."""

    def __init__(self, session: aiohttp.ClientSession, event: dict[str, Any]) -> None:
        self.session, self.url, self.model = session, event["url"], event["model"]

    def body(self, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 40} | more

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def complete(self, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
        return await self.post("/v1/completions", self.body(prompt, **more))

    async def stream(self, prompt: str, on_event: Any = None, **more: Any) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        body = self.body(prompt, stream=True, return_token_ids=True, **more)
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                    assert "error" not in events[-1], events[-1]
                    if on_event is not None:
                        on_event(events[-1])
        return events

    async def pipeline(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/v1/pipeline") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def stages(self) -> list[dict[str, Any]]:
        """Every stage of a standing pipeline as it says itself: one that is too busy to answer is asked again."""
        while True:
            found: list[dict[str, Any]] = (await self.pipeline())["stages"]
            if all(stage["up"] for stage in found):
                return found
            await pause()

    async def until_ready(self, after_epoch: int = 0) -> dict[str, Any]:
        """Wait for the pipeline of a later epoch. All answers may have been on their way before a loss, which is still
        noticed."""
        while True:
            described = await self.pipeline()
            if described["phase"] == "ready" and described["epoch"] > after_epoch:
                return described
            await pause()


class OnceAllBegan:
    """Acts once, with the event by which all of n answers have begun.

    It acts there, and not in a task that waits for this. The events of a whole answer may wait for a busy client: it
    then reads them all before any other task runs.
    """

    def __init__(self, n_answers: int, act: Callable[[], object]) -> None:
        self._n_answers, self._act, self._begun = n_answers, act, set[str]()
        self.acted = asyncio.Event()

    def __call__(self, event: dict[str, Any]) -> None:
        self._begun.add(event["id"])
        if len(self._begun) == self._n_answers and not self.acted.is_set():
            self._act()
            self.acted.set()


async def stopped_under_way(
    client: Client, ask: Callable[[OnceAllBegan], Coroutine[Any, Any, Any]], n_answers: int, stage: int
) -> asyncio.Task[Any]:
    """Ask, and stop a stage's process in the middle of all answers; they go on once it goes on or is replaced.

    A busy client may read the beginning of an answer that is over at the coordinator by then. It asks again.
    """
    while True:
        stop = OnceAllBegan(n_answers, lambda: os.kill(stage, signal.SIGSTOP))
        asking = asyncio.create_task(ask(stop))
        acted = asyncio.create_task(stop.acted.wait())
        await asyncio.wait({asking, acted}, return_when=asyncio.FIRST_COMPLETED)
        acted.cancel()
        if stop.acted.is_set() and (await client.pipeline())["running"] == n_answers:
            return asking
        os.kill(stage, signal.SIGCONT)
        await asking


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]


async def assert_same_greedy(
    client: Client, prompt: str | Sequence[int], left: Sequence[int], right: Sequence[int]
) -> None:
    """Equal, or different from a near-tie on: batch shape may move the last bits of a sum.

    Where they differ, the model is asked again with the prompt and their common part. A third answer to the prompt
    alone might differ from both earlier.
    """
    assert len(left) == len(right) > 0
    if list(left) == list(right):
        return
    n_common = next(at for at, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    if isinstance(prompt, str):
        ids = (await client.post("/tokenize", {"content": prompt, "add_special": True}))["tokens"]
    else:
        ids = list(prompt)
    reply = await client.complete([*ids, *left[:n_common]], max_tokens=1, logprobs=N_TOP)
    (top,) = reply["choices"][0]["logprobs"]["top_logprobs"]
    names = [(await client.post("/detokenize", {"tokens": [answer[n_common]]}))["content"] for answer in (left, right)]
    behind = max(top.values()) - min(top.get(name, -math.inf) for name in names)
    assert behind < NEAR_TIE, f"{prompt!r}: {names[0]!r} became {names[1]!r} at token {n_common}, {behind} nats behind"
