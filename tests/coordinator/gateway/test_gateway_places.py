"""Pipelines hold a gateway's places, whether they answer late, wrongly or not at all."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import aiohttp
import pytest
from yarl import URL

from relayline.coordinator.gateway import links as gateway_links
from relayline.coordinator.gateway.awake import Awake, Told
from relayline.coordinator.gateway.bounds import LOST_AFTER_S
from relayline.coordinator.gateway.gate import Gate, PipelineLostError
from relayline.coordinator.gateway.links import BackendConfig, Link, Links
from relayline.coordinator.gateway.router import Backend, Heard, Router
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.gateway_world import changing_gateway, pipelines

AWAKE = Heard(("chat",), is_ready=True)
NS = 1_000_000_000


def two_links() -> tuple[Links, Link, Link]:
    """One of two pipelines may be awake; nobody listens at their addresses."""
    links = Links([BackendConfig(name, "http://127.0.0.1:9") for name in "ab"], awake_max=1)
    first, second = links.links.values()
    return links, first, second


def is_awake(links: Links, link: Link) -> None:
    now_ns = time.monotonic_ns()
    link.backend.heard(AWAKE, now_ns)
    links.gate.heard(link.backend, now_ns)


async def never(_link: Link) -> Heard:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_slow_answer_gives_no_place_away(monkeypatch: pytest.MonkeyPatch) -> None:
    links, first, _ = two_links()
    is_awake(links, first)
    monkeypatch.setattr(gateway_links, "POLL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(links, "_heard", never)
    await links.ask(first)
    assert first.backend.state == "dead", "it gets no requests"
    assert not links.router.awake.has_place, "and is awake all the same"
    first.backend.heard_ns -= round(LOST_AFTER_S * NS)
    await links.ask(first)
    assert links.router.awake.has_place


async def test_one_that_refuses_connections_holds_no_place() -> None:
    links, first, _ = two_links()
    is_awake(links, first)
    links.failed(first, "it refuses connections", is_refused=True)
    assert links.router.awake.has_place


async def test_requests_wait_on_while_their_pipeline_is_slow() -> None:
    links, first, second = two_links()
    is_awake(links, first)
    second.backend.heard_ns = time.monotonic_ns()
    first.backend.n_others = 1
    links.gate.heard(first.backend, time.monotonic_ns())

    async def ask() -> None:
        async with links.gate.place(second.backend):
            pass

    waits = asyncio.create_task(ask())
    await asyncio.sleep(0)
    links.failed(second, "no answer within 3 s")
    await asyncio.sleep(0)
    assert not waits.done()
    links.failed(second, "it refuses connections", is_refused=True)
    with pytest.raises(PipelineLostError):
        await waits


async def test_one_that_is_removed_while_it_is_asked_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    links, first, _ = two_links()

    async def removed(link: Link) -> Heard:
        del links.links[link.backend]
        links.gate.removed(link.backend)
        return AWAKE

    monkeypatch.setattr(links, "_heard", removed)
    await links.ask(first)
    assert links.router.awake.has_place


async def test_a_removed_pipeline_that_took_a_place_gives_it_back() -> None:
    links, first, second = two_links()
    del links.links[first.backend]
    links.gate.removed(first.backend)
    async with links.gate.place(first.backend):
        pass
    async with asyncio.timeout(60), links.gate.place(second.backend):
        assert await links._put_to_sleep(first.backend) is Told.ASLEEP


@pytest.mark.usefixtures("quick")
async def test_a_request_goes_to_the_pipeline_that_has_its_name_once_it_is_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, replaced, named = asyncio.Event(), asyncio.Event(), Router.named

    def seen(router: Router, name: str) -> Backend | None:
        looked_up.set()
        return named(router, name)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "chat", '
        await replaced.wait()
        yield b'"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}'

    async with pipelines(tokenizer, "chat", "chat") as served, changing_gateway(served[:1]) as (session, whole):
        monkeypatch.setattr(Router, "named", seen)
        headers = {"Content-Type": "application/json"}
        asking = asyncio.create_task(session.post("/pipelines/a/v1/chat/completions", data=body(), headers=headers))
        await looked_up.wait()
        await whole.add(BackendConfig("a", served[1].url))
        await whole.forget_leaving("a")
        replaced.set()
        async with await asking as answer:
            assert answer.status == 200
        assert served[1].generator.streams


@pytest.mark.usefixtures("quick")
async def test_a_start_asks_its_pipeline_only_where_places_are_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for awake_max in (0, 1):
        async with (
            pipelines(tokenizer, "chat", sleep=True) as served,
            changing_gateway(served, awake_max=awake_max) as (_, whole),
        ):
            ask = AsyncMock()
            async with whole.starting("a"):
                monkeypatch.setattr(Links, "ask", ask)
            assert ask.await_count == awake_max
            monkeypatch.undo()


async def test_a_gateway_that_ends_tells_no_further_pipeline_to_sleep() -> None:
    told: list[str] = []

    async def tell(backend: Backend) -> Told:
        told.append(backend.name)
        await asyncio.Event().wait()
        return Told.ASLEEP

    gate = Gate(Awake(1), tell)
    for name in "ab":
        backend = Backend(name)
        backend.heard(AWAKE, time.monotonic_ns())
        gate.heard(backend, time.monotonic_ns())
    await asyncio.sleep(0)
    assert told == ["a"], "one too many is awake"
    await gate.close()
    await asyncio.sleep(0)
    assert told == ["a"]


async def test_one_that_cannot_sleep_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    links, first, _ = two_links()
    caplog.set_level("INFO", logger="relayline.gateway")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first.base = URL(f"http://127.0.0.1:{listener.getsockname()[1]}")  # nobody listens there from now on
    async with aiohttp.ClientSession() as links.session:
        for _ in range(3):
            assert await links._put_to_sleep(first.backend) is Told.AWAKE
    assert caplog.messages == [
        "pipeline a is put to sleep: 1 may be awake at once",
        "pipeline a does not fall asleep, so others cannot wake: it refuses connections",
    ]
