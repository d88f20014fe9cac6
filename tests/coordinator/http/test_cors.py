"""Web pages of other hosts: which may read the API, with and without keys, and the headers that their browsers get."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.cors import read_origins
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.wire.common.errors import UsageError

KEY = "k" * 32
PAGE, OTHER = "https://chat.example", "https://evil.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@contextlib.asynccontextmanager
async def served(cors: tuple[str, ...], keys: Path | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write_eof(b"done")
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", stream)])
    with protect_http(app, HttpListener(api_keys_file=keys, cors=cors)):
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                yield session
        finally:
            await runner.cleanup()


async def asked(session: aiohttp.ClientSession, method: str, **headers: str) -> tuple[int, str | None]:
    async with session.request(method, "/v1/completions", headers=headers) as reply:
        return reply.status, reply.headers.get("Access-Control-Allow-Origin")


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_page_that_is_named_may_ask_and_read(tmp_path: Path, has_keys: bool) -> None:
    keys = None
    if has_keys:
        keys = tmp_path / "keys"
        keys.write_text(KEY)
        keys.chmod(0o600)
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with served((PAGE,), keys) as session:
        async with session.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT}) as reply:
            assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (204, PAGE)
            assert {"POST", "DELETE"} <= {*reply.headers["Access-Control-Allow-Methods"].split(", ")}
            assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert reply.headers["Vary"] == "Origin"
        assert await asked(session, "POST", Origin=PAGE, **bearer) == (200, PAGE)
        assert (await asked(session, "OPTIONS", Origin=OTHER, **PREFLIGHT))[1] is None
        assert (await asked(session, "POST", Origin=OTHER, **bearer))[1] is None
        assert (await asked(session, "POST", **bearer)) == (200, None)
        if has_keys:
            assert await asked(session, "POST", Origin=PAGE) == (401, PAGE), "the page can read why"


async def test_without_keys_other_pages_stay_out() -> None:
    async with served((PAGE,)) as session:
        assert await asked(session, "POST", Origin=OTHER) == (403, None)
        assert await asked(session, "POST", Origin=PAGE, Host="chat.example") == (403, PAGE), "it is no name of ours"
    async with served(("*",)) as session:
        assert await asked(session, "POST", Origin=OTHER) == (200, OTHER)
    async with served(()) as session:
        assert await asked(session, "POST", Origin=PAGE) == (403, None)


def test_origins_are_read_as_browsers_send_them() -> None:
    assert read_origins(" https://Chat.Example, http://localhost:3000,,") == (PAGE, "http://localhost:3000")
    assert read_origins("*") == ("*",)
    assert read_origins("") == ()
    for wrong in ("chat.example", "https://chat.example/", "https://a@b", "ftp://a", "https://", "https://a:b"):
        with pytest.raises(UsageError, match="is not an origin like"):
            read_origins(wrong)
