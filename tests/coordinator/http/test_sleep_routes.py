"""Routes of a pipeline's sleep, and what the other routes say while it sleeps."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import NotReadyError
from relayline.wire.common.phase import Phase
from tests.support.http_support import FakeGenerator, serving


class Control:
    """Sleeps at once, unless requests run; may fail to wake."""

    def __init__(self) -> None:
        self.n_requests, self.is_sleeping, self.problem = 0, False, ""

    def describe(self) -> dict[str, object]:
        return {"is_sleeping": self.is_sleeping, "requests": self.n_requests}

    async def ask(self) -> dict[str, object]:
        self.is_sleeping = not self.n_requests
        return self.describe()

    async def wake(self) -> dict[str, object]:
        if self.problem:
            raise NotReadyError(self.problem)
        self.is_sleeping = False
        return self.describe()


def app_of(tokenizer: Tokenizer, control: Control) -> web.Application:
    model = ServedModel("m", 0, tokenizer, ChatTemplate(None))
    return make_app(FakeGenerator(), model, sleep=control)


async def test_the_routes_are_vllms(tokenizer: Tokenizer) -> None:
    control = Control()
    async with TestClient(TestServer(app_of(tokenizer, control))) as client:
        control.n_requests = 2
        answer = await client.post("/sleep")
        assert (answer.status, await answer.json()) == (202, {"is_sleeping": False, "requests": 2})
        control.n_requests = 0
        assert (await client.post("/sleep?level=1")).status == 200
        assert (await (await client.get("/is_sleeping")).json())["is_sleeping"] is True
        assert (await client.post("/wake_up")).status == 200
        control.problem = "the pipeline cannot wake: b: no memory"
        answer = await client.post("/wake_up")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert (await answer.json())["error"]["message"] == control.problem


@pytest.mark.parametrize("phase", [Phase.SLEEPING, Phase.WAKING])
async def test_probes_hear_that_a_request_would_be_taken(tokenizer: Tokenizer, phase: Phase) -> None:
    generator = FakeGenerator()
    generator.ready, generator.otherwise = False, phase
    async with serving(tokenizer, generator) as server, aiohttp.ClientSession(server.url) as session:
        async with session.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": phase.value})
        async with session.get("/props") as answer:
            assert (await answer.json())["is_sleeping"] is (phase is Phase.SLEEPING)
