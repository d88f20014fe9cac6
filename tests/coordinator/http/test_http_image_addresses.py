"""Images that clients name by an address, in each form of the API: fetched from allowed hosts, and encoded once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from relayline.coordinator.http.replies import media
from relayline.coordinator.http.replies.media import Media
from relayline.coordinator.media.parts import MediaFile, Takes, take_media
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError
from tests.coordinator.http.test_http_images import N_ROWS, PNG, FakeEncoder, post
from tests.support.http_support import WAIT_S, FakeGenerator, serving

HERE = ("127.0.0.1",)


@contextlib.asynccontextmanager
async def pictures() -> AsyncIterator[str]:
    """Serve any picture by its name, but for `gone`; `slow` never comes."""

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == "slow":
            await asyncio.Event().wait()
        return web.Response(status=404) if name == "gone" else web.Response(body=PNG + name.encode())

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chat(address: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]}


def response(address: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": address}]}]}


def message(address: str) -> dict[str, Any]:
    block = {"type": "image", "source": {"type": "url", "url": address}}
    return {"max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}


FORMS = [
    ("/v1/chat/completions", chat, "messages[0].content[0].image_url"),
    ("/v1/responses", response, "input[0].content[0].image_url"),
    ("/v1/messages", message, "messages[0].content[0].source"),
]


@pytest.mark.parametrize(("path", "body_of", "place"), FORMS, ids=["chat", "response", "message"])
async def test_an_address_is_as_good_as_the_image_itself(
    path: str, body_of: Any, place: str, tokenizer: Tokenizer
) -> None:
    generator, encoder = FakeGenerator(), FakeEncoder()
    async with pictures() as url, serving(tokenizer, generator, encoder=encoder, media_hosts=HERE) as served:
        await post(served, path, body_of(f"{url}/1"))
        await post(served, path, body_of(f"{url}/1"))
        gone = await post(served, path, body_of(f"{url}/gone"), 400)
        elsewhere = await post(served, path, body_of("http://10.0.0.1/1"), 400)
    first, second = generator.requests
    assert first.prompt_tokens == second.prompt_tokens
    assert [float(each.rows[0, 0]) for each in first.images] == [float(ord("1"))]
    assert set(encoder.asked.values()) == {1}, "it was encoded again"
    assert f"{url}/gone: its server answered 404" in gone["error"]["message"]
    assert place in gone["error"]["message"]
    assert "this server fetches none from 10.0.0.1" in elsewhere["error"]["message"]


async def test_one_clients_slow_hosts_keep_no_other_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MEDIA_FETCHING_MAX", 2)
    async with pictures() as url:
        here = Media(FakeEncoder(), HERE)
        slow = [asyncio.create_task(here.count("one", asked(f"{url}/slow"))) for _ in range(4)]
        async with asyncio.timeout(WAIT_S):
            assert await here.count("another", asked(f"{url}/1")) == N_ROWS + 2
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            assert await here.count("one", asked(f"{url}/2")) == N_ROWS + 2, "a request that was given up holds a place"
        await here.close()


def asked(address: str) -> list[MediaFile]:
    return take_media(chat(address)["messages"], Takes(images=True), HERE).media


async def test_a_request_that_could_never_fit_is_refused_before_anything_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media, "MEDIA_ROWS_BYTES_MAX", 2 * 4 * 4 * N_ROWS - 1)  # f32 rows of four values
    encoder = FakeEncoder()
    async with pictures() as url:
        here = Media(encoder, HERE)
        files = [*asked(f"{url}/1"), *asked(f"{url}/2")]
        with pytest.raises(InvalidRequestError, match="become rows of 192 B, and a request has at most 191 B"):
            await here.fill("one", [-1, -2], files, 1_000)
        assert all(rows_max == 0 for _, rows_max in encoder.asked), "it was encoded for nothing"
        await here.close()


async def test_an_image_at_an_address_is_counted(tokenizer: Tokenizer) -> None:
    generator, encoder = FakeGenerator(), FakeEncoder()
    async with pictures() as url, serving(tokenizer, generator, encoder=encoder, media_hosts=HERE) as served:
        counted = await post(served, "/v1/messages/count_tokens", message(f"{url}/2"))
        answer = await post(served, "/v1/messages", message(f"{url}/2"))
        gone = await post(served, "/v1/messages/count_tokens", message(f"{url}/gone"), 400)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] > 6
    assert "its server answered 404" in gone["error"]["message"]
