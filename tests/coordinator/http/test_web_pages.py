"""Foreign web pages that reach a server which requires no key."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from relayline.coordinator.http.edge.api_keys import protect_http
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.edge.web_pages import page_rule
from relayline.wire.common.errors import UsageError
from tests.support.http_support import WAIT_S

OWN = ["localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:8080", "127.8.8.8", "[::1]:8080", "a.localhost"]
FOREIGN = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost:8080:80",
    "localhost@evil.example",
    "evil.example@localhost",
    "localhost/",
    "localhost evil.example",
    "",
    ":8080",
    "unix:x",
    "127.1",
    "0x7f000001",
    "[::1",
    "127.0.0.1:x",
]


@pytest.mark.parametrize("host", OWN)
def test_loopback_names_are_known_on_loopback(host: str) -> None:
    assert page_rule("127.0.0.1", ()).problem([host], []) is None
    assert page_rule("127.0.0.1", ()).problem([host], [f"http://{host}"]) is None


@pytest.mark.parametrize("host", [*FOREIGN, "192.0.2.1", "0.0.0.0:8080", "[2001:db8::1]"])
def test_no_others_are(host: str) -> None:
    problem = page_rule("localhost", ()).problem([host], [])
    assert problem is not None
    assert "does not answer to" in problem


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "origin",
    [
        *(f"http://{host}" for host in FOREIGN if host[-1:] not in ("", "/")),
        "null",
        "",
        "file://",
        "app://localhost",
        "localhost",
        "http://[",
    ],
)
def test_pages_of_others_are_foreign(listen: str, origin: str) -> None:
    problem = page_rule(listen, ()).problem(["127.0.0.1:8080"], [origin])
    assert problem is not None
    assert "web pages" in problem


def test_allowed_names_are_names_and_pages() -> None:
    rule = page_rule("127.0.0.1", ["Chat.Example", "192.0.2.1", "[2001:db8::1]"])
    for host in ("chat.example", "CHAT.example:443", "192.0.2.1:80", "[2001:db8::1]:80", "localhost"):
        assert rule.problem([host], [f"https://{host}"]) is None
    assert rule.problem(["other.example"], []) == (
        "this server does not answer to 'other.example'; --allow-host other.example allows it; "
        "with --api-keys, and without --allow-host, any name is allowed"
    )
    for host in ("", "unix:x"):
        expected = "this server does not answer to a Host header that is no name; see --allow-host"
        assert rule.problem([host], []) == expected
    assert rule.problem(["localhost"], ["https://chat.example", "https://other.example"]) is not None


def test_beyond_loopback_a_name_may_be_any_until_some_are_given_and_a_page_its_own() -> None:
    anyone = page_rule("0.0.0.0", ())
    assert anyone.problem(["box.lan:8080"], []) is None
    assert anyone.problem(["box.lan:8080"], ["http://box.lan:3000"]) is None
    assert anyone.problem(["box.lan:8080"], ["http://evil.example"]) is not None
    some = page_rule("0.0.0.0", ["box.lan"])
    assert some.problem(["10.0.0.7:8080"], []) is None, "a probe by address; no page can have pointed a name there"
    assert some.problem(["evil.example"], []) is not None
    assert some.problem(["10.0.0.7:8080"], ["http://10.0.0.8"]) is not None
    assert some.problem(["10.0.0.7:8080"], ["http://10.0.0.7:8080"]) is None, "the server's own page, by address"
    assert some.problem(["10.0.0.7:8080"], ["http://10.0.0.7:3000"]) is not None, "another server's on that machine"
    assert some.problem(["evil.example:8080"], ["http://evil.example:8080"]) is not None


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "a b", "", "*"])
def test_a_bad_host_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        page_rule("127.0.0.1", [name])


@contextlib.asynccontextmanager
async def served(host: str = "127.0.0.1", keys: Path | None = None, allow: tuple[str, ...] = ()) -> AsyncIterator[str]:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="done")

    app = web.Application()
    app.add_routes([web.route("*", path, answer) for path in ("/live", "/health", "/v1/models", "/v1/completions")])
    with protect_http(app, HttpListener(host, api_keys_file=keys, allow_hosts=allow)):
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


async def status_of(url: str, path: str = "/v1/completions", method: str = "POST", **headers: str) -> int:
    timeout = aiohttp.ClientTimeout(WAIT_S)
    async with (
        aiohttp.ClientSession(url, timeout=timeout) as session,
        session.request(method, path, headers=headers) as reply,
    ):
        if reply.status == 403:
            assert sorted(json.loads(await reply.read())["error"]) == ["code", "message", "param", "type"]
        return reply.status


async def test_a_page_can_do_nothing_with_a_server_without_keys() -> None:
    evil = {"Origin": "http://evil.example"}
    async with served() as url:
        assert await status_of(url) == 200
        assert await status_of(url, **evil) == 403
        assert await status_of(url, Host="evil.example") == 403
        assert await status_of(url, "/v1/completions", "OPTIONS", **evil) == 403
        assert await status_of(url, "/nowhere", **evil) == 403
        assert await status_of(url, "/live", "GET", Host="probe.example") == 200
        assert await status_of(url, "/live", "GET", **evil) == 403
        assert await status_of(url, Origin="http://localhost:3000") == 200
    async with served(allow=("evil.example",)) as url:
        assert await status_of(url, Host="evil.example", **evil) == 200


async def test_with_keys_nobody_is_asked_from_where_unless_names_are_given(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-chars")
    keys.chmod(0o600)
    evil = {"Host": "evil.example", "Origin": "http://evil.example", "Authorization": "Bearer a-key-of-sixteen-chars"}
    async with served(keys=keys) as url:
        assert await status_of(url, **evil) == 200
    async with served(keys=keys, allow=("chat.example",)) as url:
        assert await status_of(url, **evil) == 403
        assert await status_of(url, **evil | {"Host": "chat.example", "Origin": "https://chat.example"}) == 200
