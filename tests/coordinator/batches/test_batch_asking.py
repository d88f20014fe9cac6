"""A batch against a server that is busy, breaks connections, refuses or talks nonsense."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relayline.coordinator.batches.asking import STREAMS_ELSEWHERE, Asking, client, lanes_of, streams_at, streams_for
from relayline.coordinator.batches.lines import Asked
from relayline.coordinator.batches.patience import Attempts, Terms, Trouble, trouble_of
from relayline.deploy.launch.certificates import init_authority, issue
from relayline.wire.common.errors import StartError
from relayline.wire.links.roles import Role
from relayline.wire.links.tls_server import server_context

Reply = Callable[[web.Request], web.StreamResponse]


class Lines:
    """A sink in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.n_synced = 0

    def add(self, line: bytes) -> None:
        assert line.endswith(b"\n")
        self.lines.append(json.loads(line))

    def is_unsynced(self) -> bool:
        return False

    def sync(self) -> None:
        self.n_synced = len(self.lines)

    @property
    def by_id(self) -> dict[str, Any]:
        assert len({line["custom_id"] for line in self.lines}) == len(self.lines)
        return {line["custom_id"]: line for line in self.lines}


def status(code: int, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: web.json_response({"error": {"message": "no"}}, status=code, headers=named)


def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def good(_: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "hi", "usage": {"completion_tokens": 3}}, headers={"x-request-id": "req-9"})


class Server:
    """Plays replies by the body's `name`, then answers; counts what runs at once, and holds it there if asked."""

    def __init__(self, replies: dict[str, list[Reply]]) -> None:
        self.replies, self.n_asked = replies, collections.Counter[str]()
        self.n_now = self.n_most = 0
        self.wanted, self.full = 0, asyncio.Event()
        self.is_held, self.released = False, asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["name"]
        self.n_asked[name] += 1
        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        if self.wanted:
            if self.n_now >= self.wanted:
                self.full.set()
            await self.full.wait()
        if self.is_held:
            await self.released.wait()
        self.n_now -= 1
        waiting = self.replies.get(name, [])
        return (waiting.pop(0) if waiting else good)(request)


@contextlib.asynccontextmanager
async def served(replies: dict[str, list[Reply]] | None = None, described: Any = None) -> AsyncIterator[Server]:
    server = Server(replies or {})
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    if described is not None:

        async def describe(_: web.Request) -> web.Response:
            return web.json_response(described)

        app.router.add_get("/v1/pipeline", describe)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def asked(*names: str) -> Iterator[Asked]:
    return (Asked(name, "/v1/completions", {"name": name, "model": "theirs"}) for name in names)


async def run(
    server: Server, *names: str, n_streams: int = 2, terms: Terms | None = None
) -> tuple[Asking, Lines, Lines, list[float]]:
    answers, errors, waits_s = Lines(), Lines(), list[float]()

    async def sleep(wait_s: float) -> None:
        waits_s.append(wait_s)

    async with client({}, True) as session:
        asking = Asking(session, server.url, terms or Terms(), answers=answers, errors=errors, sleep=sleep)
        await asking.run(asked(*names), n_streams)
    assert (answers.n_synced, errors.n_synced) == (len(answers.lines), len(errors.lines))
    return asking, answers, errors, waits_s


async def test_all_are_answered_as_many_at_once_as_there_are_streams() -> None:
    async with served() as server:
        server.wanted = 3
        asking, answers, errors, _ = await run(server, *"abcdefg", n_streams=3)
    assert (set(answers.by_id), errors.lines, server.n_most) == (set("abcdefg"), [], 3)
    response = answers.by_id["a"]["response"]
    assert (response["status_code"], response["request_id"], response["body"]["text"]) == (200, "req-9", "hi")
    progress = asking.progress
    assert (progress.n_answered, progress.n_failed, progress.n_tokens, progress.n_in_flight) == (7, 0, 21, 0)


async def test_a_busy_server_is_waited_for_as_long_as_it_says() -> None:
    replies = {"a": [status(429, retry_after="7"), status(503, retry_after="2"), status(503)], "b": [broken]}
    async with served(replies) as server:
        _, answers, errors, waits_s = await run(server, "a", "b", n_streams=1)
    assert (set(answers.by_id), errors.lines) == ({"a", "b"}, [])
    assert waits_s == [7.0, 2.0, 4.0, 1.0], "its own words, else twice as long each time"


@pytest.mark.parametrize(
    ("reply", "n_attempts", "code"),
    [(broken, 3, "connection_broken"), (status(500), 3, 500), (status(502), 3, 502), (status(400), 1, 400),
     (status(500, x_should_retry="false"), 1, 500), (status(404), 1, 404), (status(501), 1, 501),
     (lambda _: web.Response(text="<html>", status=404), 1, "no_json"),
     (lambda _: web.Response(text="<html>"), 3, "no_json")],
)  # fmt: skip
async def test_a_request_that_fails_is_kept_as_an_error(reply: Reply, n_attempts: int, code: int | str) -> None:
    async with served({"a": [reply] * 9}) as server:
        asking, answers, errors, _ = await run(server, "a", "b", terms=Terms(n_attempts=3))
    assert (set(answers.by_id), set(errors.by_id)) == ({"b"}, {"a"})
    line = errors.by_id["a"]
    assert code == (line["response"]["status_code"] if line["response"] else line["error"]["code"])
    assert (server.n_asked["a"], asking.progress.n_failed) == (n_attempts, 1)


async def test_a_refused_key_ends_the_run_and_fails_nothing() -> None:
    async with served({"a": [status(401)]}) as server:
        with pytest.raises(StartError, match=r"answered 401 \(no\); give it the right API key with --api-key"):
            await run(server, "a", "b", n_streams=1)


async def test_a_server_that_stays_away_ends_the_run_and_fails_nothing() -> None:
    async with served() as server:
        pass  # its port is closed from here on
    with pytest.raises(StartError, match="answered nothing for too long: the server cannot be reached"):
        await run(server, "a", terms=Terms(wait_s=0.0))


async def test_one_that_is_refused_for_ever_is_kept_while_others_are_answered() -> None:
    now = iter([0.0])
    attempts, terms = Attempts(next(now)), Terms(wait_s=10.0)
    waits = [attempts.next_wait_s(Trouble.BUSY, None, at, terms) for at in (0.0, 5.0, 10.0)]
    assert waits == [1.0, 2.0, None]


async def test_one_that_never_answered_is_asked_a_few_times_and_one_that_goes_away_for_long() -> None:
    attempts, terms, now_s, waits = Attempts(0.0), Terms(), 0.0, list[float]()
    at_first = dataclasses.replace(terms, wait_s=terms.first_answer_s)
    while (wait_s := attempts.next_wait_s(Trouble.BUSY, None, now_s, at_first)) is not None:
        now_s += wait_s
        waits.append(wait_s)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    async with served() as server:
        url = server.url
    async with client({}, True) as session:  # the port is closed by now
        with pytest.raises(aiohttp.ClientConnectorError):
            await streams_at(session, url, Terms(first_answer_s=0.0), lambda _: None)


def test_waits_have_a_bound() -> None:
    attempts, terms = Attempts(0.0), Terms(n_attempts=50)
    waits = [attempts.next_wait_s(Trouble.BROKEN, None, 0.0, terms) for _ in range(49)]
    assert max(each for each in waits if each is not None) == 60.0
    assert attempts.next_wait_s(Trouble.BUSY, 1e9, 0.0, terms) == 600.0
    assert trouble_of(403, may_retry=False) is Trouble.REFUSED


@pytest.mark.parametrize(
    ("described", "n_lanes", "n_streams"),
    [
        ({"lanes": 8}, 8, 10),
        ({"kind": "gateway", "pipelines": [{"lanes": 3}, {"lanes": 1}, {"name": "away"}]}, 4, 5),
        ({"lanes": 1}, 1, 2),
        ({"kind": "gateway", "pipelines": [{"phase": "sleeping", "lanes": 8}, {"phase": "loading"}]}, 8, 10),
        (["nonsense"], 0, STREAMS_ELSEWHERE),
        (None, 0, STREAMS_ELSEWHERE),
    ],
)
async def test_as_many_in_flight_as_lanes_and_a_few_in_line(described: Any, n_lanes: int, n_streams: int) -> None:
    async with served(described=described) as server, client({}, True) as session:
        assert await lanes_of(session, server.url) == n_lanes
    assert streams_for(n_lanes) == n_streams


@pytest.mark.parametrize("is_gateway", [True, False])
async def test_lanes_are_counted_once_the_stages_have_loaded(is_gateway: bool) -> None:
    pipeline = {"phase": "loading", "lanes": 1}  # the coordinator knows of no more before its stages are there
    described = {"kind": "gateway", "pipelines": [pipeline]} if is_gateway else pipeline
    waits_s, told = list[float](), list[Exception | None]()

    async def sleep(wait_s: float) -> None:
        waits_s.append(wait_s)
        if len(waits_s) == 2:
            pipeline.update(phase="ready", lanes=8)

    async with served(described=described) as server, client({}, True) as session:
        assert await streams_at(session, server.url, Terms(), told.append, sleep) == streams_for(8)
        pipeline["phase"] = "loading"
        assert await streams_at(session, server.url, Terms(wait_s=0), told.append, sleep) == STREAMS_ELSEWHERE
    assert (waits_s, told) == ([1.0, 2.0], [None])


async def test_an_end_of_the_run_leaves_no_request_behind() -> None:
    async with served() as server:
        server.wanted = 2
        server.is_held = True
        running = asyncio.create_task(run(server, "a", "b"))
        await asyncio.wait_for(server.full.wait(), 60)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()
        server.released.set()


async def test_the_model_may_be_named_once_for_all() -> None:
    seen = []

    def answer(request: web.Request) -> web.StreamResponse:
        seen.append(json.loads(request._read_bytes or b"{}")["model"])
        return good(request)

    async with served({"a": [answer]}) as server, client({}, True) as session:
        asking = Asking(session, server.url, Terms(), answers=Lines(), errors=Lines(), model="ours")
        await asking.run(asked("a"), 1)
    assert seen == ["ours"]


def test_the_client_has_no_bound_of_its_own_on_connections() -> None:
    async def look() -> tuple[int, bool]:
        async with client({}, True) as session:
            assert isinstance(session.connector, aiohttp.TCPConnector)
            return session.connector.limit, session.connector.force_close

    assert asyncio.run(look()) == (0, True)


async def test_a_body_is_sent_as_short_as_it_was() -> None:
    sent = list[bytes]()

    async def note(request: web.Request) -> web.StreamResponse:
        sent.append(await request.read())
        assert request.content_type == "application/json"
        return good(request)

    body = {"prompt": "Привет, мир \ud83d, 😀"}  # half of a pair, as a cut text has it, is no UTF-8
    async with client({}, True) as session:
        app = web.Application()
        app.router.add_post("/v1/completions", note)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        answers = Lines()
        asking = Asking(session, url, Terms(), answers=answers, errors=answers)
        await asking.run(iter([Asked("a", "/v1/completions", body)]), 1)
        await runner.cleanup()
    assert sent == ['{"prompt":"Привет, мир \\ud83d, 😀"}'.encode()]
    assert json.loads(sent[0]) == body


class Nowhere(aiohttp.abc.AbstractResolver):
    """Knows no host, and says so as the system's resolver does."""

    def __init__(self, code: int) -> None:
        self.code, self.n_asked = code, 0

    async def resolve(self, *_: Any, **__: Any) -> list[aiohttp.abc.ResolveResult]:
        self.n_asked += 1
        raise socket.gaierror(self.code, "no such host")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("code", "n_asked"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 3)])
async def test_a_host_that_has_no_address_is_not_waited_for(code: int, n_asked: int) -> None:
    nowhere, slept = Nowhere(code), list[float]()

    async def sleep(wait_s: float) -> None:
        slept.append(wait_s)
        if len(slept) == 2:
            nowhere.code = socket.EAI_NONAME  # no typing error then
        if len(slept) == 3:
            raise RuntimeError("still waiting")

    connector = aiohttp.TCPConnector(resolver=nowhere, use_dns_cache=False)
    async with aiohttp.ClientSession(connector=connector) as session:
        expected = aiohttp.ClientConnectorDNSError if n_asked == 1 else RuntimeError
        with pytest.raises(expected):
            await streams_at(session, "http://mistyped.test", Terms(), lambda _: None, sleep)
    assert (nowhere.n_asked, len(slept)) == (n_asked, 0 if n_asked == 1 else 3)


@contextlib.asynccontextmanager
async def closing_at_once(context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """A port that ends every connection after its first bytes; plain with no context."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(1)
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("is_tls", [True, False])
async def test_a_port_that_speaks_tls_is_not_waited_for(tmp_path: Path, is_tls: bool) -> None:
    now = datetime.datetime.now(datetime.UTC)
    init_authority(tmp_path / "ca", "small", now)
    issue(tmp_path / "ca", "127.0.0.1", (), 30, tmp_path / "own", now, role=Role.COORDINATOR)
    context = server_context(tmp_path / "own" / "cert.pem", tmp_path / "own" / "key.pem") if is_tls else None

    async def sleep(_: float) -> None:
        raise RuntimeError("it waits")

    async with closing_at_once(context) as place, client({}, True) as session:
        if is_tls:
            with pytest.raises(StartError, match=f"its port speaks TLS; give https://{place}"):
                await streams_at(session, f"http://{place}", Terms(), lambda _: None, sleep)
        else:
            with pytest.raises(RuntimeError, match="it waits"):
                await streams_at(session, f"http://{place}", Terms(), lambda _: None, sleep)
