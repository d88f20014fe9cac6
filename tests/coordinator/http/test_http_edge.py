"""The HTTP edge: how long connections last, how bodies are read, how errors are reported, how answers end."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from yarl import URL

from relayline.coordinator.http import layer_handlers
from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge import body as http_body
from relayline.coordinator.http.edge import connection
from relayline.coordinator.http.edge.body import usual_path
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.server import LIMITS, start_http
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML, write_tokenizer
from relayline.wire.common.errors import NotReadyError, OverloadedError, StageLostError
from relayline.wire.common.process import OPEN_FILES_MAX
from tests.support.http_support import CREATED, MODEL, FakeGenerator, Gate, Served, serving, tokens
from tests.support.polling import pause

FOR_EVER_S = 1e9
PROMPT = json.dumps({"prompt": "x", "max_tokens": 5}).encode()


def gzipped(data: bytes) -> bytes:
    """Without the time of day, so that a test has the same id in every process."""
    return gzip.compress(data, mtime=0)


def head(path: str = "/v1/completions", *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers]
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def asked(body: bytes, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    return head(path, f"Content-Length: {len(body)}", *headers, version=version) + body


@contextlib.asynccontextmanager
async def connected(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_to(served: Served, sent: bytes) -> bytes:
    """All that the server says to `sent` until it closes."""
    async with connected(served) as (reader, writer):
        writer.write(sent)
        return await until_end(reader)


async def until_end(reader: asyncio.StreamReader) -> bytes:
    read = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            read += part
    return read


async def one(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """The next answer of a connection that may stay open."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


def error_of(received: bytes) -> tuple[int, dict[str, Any], bytes]:
    """The one JSON error in an answer that closed its connection: status, the error, the headers."""
    headers, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in headers.lower(), received[:300]
    assert b"connection: close" in headers.lower() or headers.startswith(b"HTTP/1.0"), headers
    error = json.loads(body)["error"]
    assert sorted({*error} - {"retry_after_s"}) == ["code", "message", "param", "type"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    return int(headers.split()[1]), error, headers


# --- bodies -----------------------------------------------------------------------------------------------------------


def packed(coding: str, data: bytes) -> bytes:
    if coding == "deflate":
        return zlib.compress(data)
    if coding == "raw":
        maker = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        return maker.compress(data) + maker.flush()
    return gzipped(data)


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "raw", "members", "GZIP"])
async def test_packed_bodies_are_unpacked(tokenizer: Tokenizer, coding: str) -> None:
    sent = packed(coding, PROMPT)
    if coding == "members":
        sent = gzipped(PROMPT[:7]) + gzipped(b"") + gzipped(PROMPT[7:])
    header = {"raw": "deflate", "members": "gzip"}.get(coding, coding)
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(asked(sent, f"Content-Encoding: {header}"))
        status, _, body = await one(reader)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")


@pytest.mark.parametrize("coding", ["identity", "gzip"])
async def test_a_mark_of_the_byte_order_is_no_part_of_the_json(tokenizer: Tokenizer, coding: str) -> None:
    """.NET's writers put one before their text."""
    sent = b"\xef\xbb\xbf" + PROMPT
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(asked(gzipped(sent) if coding == "gzip" else sent, f"Content-Encoding: {coding}"))
        status, _, body = await one(reader)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")


BOMB = gzipped(bytes(1 << 21))


@pytest.mark.parametrize(
    ("sent", "coding", "status", "code"),
    [
        (BOMB, "gzip", 413, "body_too_large"),
        (zlib.compress(bytes(1 << 21)), "deflate", 413, "body_too_large"),
        (gzipped(bytes(1 << 19)) * 4, "gzip", 413, "body_too_large"),
        (gzipped(b"") * 2_000, "gzip", 400, "bad_body"),
        (BOMB[:-9], "gzip", 413, "body_too_large"),
        (gzipped(PROMPT)[:-9], "gzip", 400, "bad_body"),
        (gzipped(PROMPT) + b"more", "gzip", 400, "bad_body"),
        (zlib.compress(PROMPT) * 2, "deflate", 400, "bad_body"),
        (b"plain", "gzip", 400, "bad_body"),
        (PROMPT, "br", 415, "unsupported_encoding"),
        (PROMPT, "zstd", 415, "unsupported_encoding"),
        (gzipped(gzipped(PROMPT)), "gzip, gzip", 415, "unsupported_encoding"),
        (PROMPT, "x" * 5_000, 415, "unsupported_encoding"),
    ],
)
async def test_bodies_with_wrong_coding_or_too_many_bytes(
    tokenizer: Tokenizer, sent: bytes, coding: str, status: int, code: str
) -> None:
    async with serving(tokenizer, body_bytes_max=1 << 20) as served:
        found, error, headers = error_of(await answer_to(served, asked(sent, f"Content-Encoding: {coding}")))
    assert (found, error["code"]) == (status, code)
    assert (b"accept-encoding: gzip, deflate" in headers.lower()) == (status == 415)


async def test_a_bomb_is_unpacked_to_its_bound_and_off_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = zlib.decompressobj

    class Counting:
        def __init__(self, wbits: int) -> None:
            self._real = real(wbits)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def decompress(self, data: bytes, n_max: int) -> bytes:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            part = self._real.decompress(data, n_max)
            made.append(len(part))
            return part

    monkeypatch.setattr(http_body.zlib, "decompressobj", Counting)
    async with serving(tokenizer, body_bytes_max=1 << 20) as served:
        bomb = gzipped(bytes(1 << 26))
        assert error_of(await answer_to(served, asked(bomb, "Content-Encoding: gzip")))[0] == 413
    assert 1 << 20 < sum(made) <= (1 << 20) + max(made)
    assert max(made) <= 256 * 1024


REFUSED = [
    ("/nowhere", "POST", (), 404),
    ("/v1/completions", "PUT", (), 405),
    ("/v1/models", "POST", (), 405),
    ("/v1/completions", "POST", ("Content-Encoding: br",), 415),
    ("/v1/completions", "POST", ("Expect: tea",), 417),
]


@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("path", "method", "headers", "status"), REFUSED)
async def test_the_body_of_a_refused_request_is_not_awaited_and_the_connection_ends(
    tokenizer: Tokenizer, path: str, method: str, headers: tuple[str, ...], status: int, framing: str
) -> None:
    async with serving(tokenizer) as served:  # only the beginning of the body is sent
        received = await answer_to(served, head(path, framing, *headers, method=method) + b"2\r\n{}\r\n")
    assert error_of(received)[0] == status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("refusal", "status"), [(NotReadyError("draining"), 503), (OverloadedError("full"), 429)])
async def test_a_long_body_is_not_read_in_vain(
    tokenizer: Tokenizer, path: str, refusal: Exception, status: int
) -> None:
    async with serving(tokenizer) as served:
        served.generator.ready = not isinstance(refusal, NotReadyError)
        served.generator.full = refusal
        for framing in ("Content-Length: 1000000", "Transfer-Encoding: chunked"):
            found, _, headers = error_of(await answer_to(served, head(path, framing, "Expect: 100-continue")))
            assert found == status
            assert b"retry-after" in headers.lower()


@pytest.mark.parametrize(
    ("path", "headers", "first"),
    [
        ("/v1/completions", ("Content-Length: 2000",), b"HTTP/1.1 413"),
        ("/v1/completions", ("Content-Length: 20", "Content-Encoding: zstd"), b"HTTP/1.1 415"),
        ("/nowhere", ("Content-Length: 20",), b"HTTP/1.1 404"),
        ("/v1/models", ("Content-Length: 20",), b"HTTP/1.1 405"),
        ("/v1/completions", (f"Content-Length: {len(PROMPT)}",), b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
async def test_expect_continue_is_answered_only_where_the_body_is_read(
    tokenizer: Tokenizer, path: str, headers: tuple[str, ...], first: bytes
) -> None:
    async with (
        serving(tokenizer, body_bytes_max=1000) as served,
        connected(served) as (reader, writer),
    ):
        writer.write(head(path, *headers, "Expect: 100-continue"))
        received = await reader.readuntil(b"\r\n\r\n")
        assert received.startswith(first)
        if b"100" in first:
            writer.write(PROMPT)
            assert (await one(reader))[0] == 200


async def test_bodies_together_have_a_bound_that_short_ones_do_not_meet(tokenizer: Tokenizer) -> None:
    bounds = {"bodies_bytes_max": 100_000, "body_free_bytes": 1_000}
    async with serving(tokenizer, **bounds) as served, connected(served) as (_, holder):
        holder.write(head("/v1/completions", "Content-Length: 200000") + b" " * 100_500)
        long = b" " * 50_000 + PROMPT
        while True:  # until the holder's bytes have been read
            async with connected(served) as (reader, writer):
                writer.write(asked(long))
                status, headers, body = await one(reader)
            if status == 503:
                break
        assert (json.loads(body)["error"]["code"], headers["retry-after"]) == ("overloaded", "1")
        async with connected(served) as (reader, writer):
            writer.write(asked(PROMPT))
            assert (await one(reader))[0] == 200
        holder.close()
        while status != 200:
            async with connected(served) as (reader, writer):
                writer.write(asked(long))
                status, _, _ = await one(reader)


async def test_a_body_that_is_worked_on_is_not_counted_for_as_long_as_its_answer_takes(tokenizer: Tokenizer) -> None:
    gate, bounds = Gate(), {"bodies_bytes_max": 60_000, "body_free_bytes": 1_000}
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), gate])
    long = b" " * 50_000 + json.dumps({"prompt": "x", "stream": True}).encode()
    async with serving(tokenizer, generator, **bounds) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            reader, writer = await stack.enter_async_context(connected(served))
            writer.write(asked(long))
            assert b" 200 " in await reader.readline()


async def test_bodies_in_chunks_of_a_byte_do_not_keep_the_loop_busy(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(head("/v1/completions", "Transfer-Encoding: chunked"))
        writer.write(b"1\r\n \r\n" * 400_000)
        status, error, _ = error_of(await until_end(reader))
    assert (status, error["code"]) == (400, "bad_body")


class Layers:
    """Layers without a holder: an order to change them is refused earlier, for its body."""

    def move(self, cuts: tuple[int, ...]) -> None:
        raise AssertionError(cuts)

    async def drain(self, name: str, *, is_drained: bool) -> None:
        raise AssertionError((name, is_drained))

    def add(self, name: str) -> None:
        raise AssertionError(name)

    def describe(self) -> dict[str, object]:
        return {}


NO_BODY = {  # the path says it all
    "/v1/responses/{id}/cancel",
    "/v1/requests/{id}/cancel",
    "/v1/batches/{id}/cancel",
    "/v1/messages/batches/{id}/cancel",
}
BODY_MAY_BE_EMPTY = {"/v1/conversations"}


async def test_every_route_bounds_its_body_and_none_reads_a_long_one_on_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    decode = msgspec.json.decode

    def counted(raw: bytes, **options: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            read.append(len(raw))
        return decode(raw, **options)

    monkeypatch.setattr(msgspec.json, "decode", counted)
    limits = HttpLimits(body_bytes_max=1 << 20, linger_s=0.05)
    model = ServedModel(MODEL, CREATED, tokenizer, ChatTemplate(CHATML))
    app = make_app(FakeGenerator(), model, limits, layers=Layers())
    routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]
    asking = [
        (method, path) for method, path in routes if method not in ("GET", "HEAD", "DELETE") and path not in NO_BODY
    ]
    assert {("PUT", layer_handlers.PATH), ("PUT", "/v1/telemetry"), ("POST", "/v1/completions")} <= {*asking}
    runner, port = await start_http(app, "127.0.0.1", 0)
    served = Served(f"http://127.0.0.1:{port}", port, FakeGenerator())
    try:
        for method, path in asking:
            where = path.replace("{name}", "a").replace("{id}", "a")
            received = await answer_to(served, head(where, f"Content-Length: {(1 << 20) + 1}", method=method))
            assert received.split()[1] in (b"413", b"501"), (method, path)  # 501: refused before a look at its body
            body = json.dumps({"zzz": "x" * 100_000}).encode()
            sent = head(where, f"Content-Length: {len(body)}", "Connection: close", method=method) + body
            expected = (b"200",) if path in BODY_MAY_BE_EMPTY else (b"400", b"413", b"501")
            assert (await answer_to(served, sent)).split()[1] in expected, (method, path)
    finally:
        await runner.cleanup()
    assert max(read, default=0) <= http_body.SMALL_BYTES_MAX


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"\r\n\r\n", None),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nX-A: ", 408),
        (head("/v1/completions", "Content-Length: 100") + b"{", 408),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{", 408),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"2;" + b"a" * 100, 408),
    ],
)
async def test_connections_end_that_bring_no_whole_request(
    tokenizer: Tokenizer, sent: bytes, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, linger_s=FOR_EVER_S) as served, connected(served) as (reader, writer):
        writer.write(sent)
        await is_read(served)
        received = await Clock(monkeypatch).passes_until(until_end(reader))
    assert (error_of(received)[0] if received else None) == status


async def test_a_connection_ends_some_time_after_its_last_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        for _ in range(2):
            writer.write(head("/live", method="GET"))
            assert (await one(reader))[0] == 200
        assert await clock.passes_until(reader.read()) == b""
    async with serving(tokenizer, linger_s=FOR_EVER_S) as served, connected(served) as (reader, writer):
        writer.write(head("/live", method="GET"))
        assert (await one(reader))[0] == 200
        writer.write(b"GET /live HTTP/1.1\r\nHo")
        await is_read(served)
        assert error_of(await clock.passes_until(until_end(reader)))[0] == 408


class Clock:
    """The event loop's clock, which a test puts forward: a slow host is never late for what comes before that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._time, self._ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: self._time() + self._ahead_s)

    async def passes_until(self, awaited: Coroutine[Any, Any, bytes]) -> bytes:
        """Return what is awaited, which some timer brings about, or several."""
        task = asyncio.create_task(awaited)
        while not task.done():
            self._ahead_s += 5.0
            await pause()
        return task.result()


async def is_read(served: Served) -> None:
    """Return when the server has read what was sent to it before."""
    assert await answer_to(served, head("/live", "Connection: close", method="GET"))


async def test_a_trickled_body_has_a_slowest_rate(tokenizer: Tokenizer) -> None:
    bounds = {"body_grace_s": 0.3, "body_rate_min": 1_000_000, "linger_s": 0.1}
    async with serving(tokenizer, **bounds) as served, connected(served) as (reader, writer):
        writer.write(head("/v1/completions", "Content-Length: 1000"))
        answer = asyncio.create_task(until_end(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.02)
        assert error_of(answer.result())[0] == 408


@pytest.mark.parametrize("is_cut", [False, True])
async def test_an_answer_that_nobody_reads_ends(is_cut: bool) -> None:
    large = bytes(1 << 25)  # more than systems keep for a reader

    async def whole(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=large)

    async def cut(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        writing = asyncio.create_task(reply.write(large))
        await asyncio.wait({writing}, timeout=0.1)
        writing.cancel()
        raise RuntimeError("the handler gives up, and what it wrote is still there")

    app = web.Application()
    app[LIMITS] = HttpLimits(write_timeout_s=0.3, close_timeout_s=0.3)
    app.add_routes([web.get("/", cut if is_cut else whole)])
    runner, port = await start_http(app, "127.0.0.1", 0)
    with socket.socket() as link:
        link.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(link, ("127.0.0.1", port))
        await loop.sock_sendall(link, head("/", method="GET"))
        await until(lambda: n_open(port) == 1)
        await until(lambda: n_open(port) == 0)
    await runner.cleanup()


def n_open(port: int) -> int:
    """Server sides of connections to a port that the system still holds for a process."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return sum(row[1].endswith(f":{port:04X}") and row[3] in ("01", "08") and row[9] != "0" for row in rows)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the system's tables send no event
        await asyncio.sleep(0)


# --- how many ---------------------------------------------------------------------------------------------------------


async def test_idle_connections_make_room_for_new_ones(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, connections_max=3) as served, contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(served)) for _ in range(5)]
        assert await answer_to(served, head("/live", "Connection: close", method="GET"))
        for reader, _ in idle[:3]:
            assert await reader.read() == b""
        reader, writer = idle[4]
        writer.write(head("/live", method="GET"))
        assert (await one(reader))[0] == 200


async def test_busy_connections_do_not(tokenizer: Tokenizer) -> None:
    gate = Gate()
    generator = FakeGenerator(lambda _: [gate])
    async with serving(tokenizer, generator, connections_max=2) as served, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            _, writer = await stack.enter_async_context(connected(served))
            writer.write(asked(PROMPT))
        await until(lambda: len(generator.streams) == 2)
        status, error, _ = error_of(await answer_to(served, b""))
        assert (status, error["code"]) == (503, "overloaded")
        gate.opened.set()


async def test_the_open_file_limit_of_the_moment_bounds_connections(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer) as served, contextlib.AsyncExitStack() as stack:
        limit = (connection.KEPT_FILES + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        monkeypatch.setattr(connection.resource, "getrlimit", lambda _: limit)
        idle = [await stack.enter_async_context(connected(served)) for _ in range(3)]
        assert await idle[0][0].read() == b""


def test_a_process_raises_its_own_limit_of_open_files() -> None:
    code = (
        "import resource; from relayline.wire.common.process import run\n"
        "async def main(stopping): print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "for lowered in ((64, hard), (64, 80)):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, lowered); run(main)"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    raised = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str((raised, hard)), "(80, 80)"]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", 400),
        (b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nA B: c\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n", 400),
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9_000 + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
        (head("/v1/completions", "Content-Length: x"), 400),
        (head("/v1/completions", "Content-Length: -1"), 400),
        (head("/v1/completions", "Content-Length: 1", "Content-Length: 2"), 400),
        (head("/v1/completions", "Content-Length: 3", "Transfer-Encoding: chunked") + b"3\r\n", 400),
        (head("/v1/completions", "Transfer-Encoding: gzip") + b"3\r\n", 400),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (head("/v1/completions", "Transfer-Encoding: chunked") + b"2\r\n{}more", 400),
        (head("*", method="OPTIONS"), 404),
        (b"CONNECT other:443 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (head("/v1/completions", "Expect: the unexpected", f"Content-Length: {len(PROMPT)}") + PROMPT, 417),
    ],
)
async def test_every_error_is_a_json_error(tokenizer: Tokenizer, sent: bytes, status: int) -> None:
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(sent)
        found, headers, body = await one(reader)
        error = json.loads(body)["error"]
    assert (found, sorted(error)) == (status, ["code", "message", "param", "type"])
    assert headers["x-request-id"]
    assert headers["content-type"].startswith("application/json")
    assert len(error["message"]) < 400


async def test_many_headers_that_are_each_short_enough_are_too_many_together(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, head_bytes_max=20_000) as served, connected(served) as (reader, writer):
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n")
        for _ in range(5):
            writer.write(b"X: " + b"a" * 5_000 + b"\r\n")
            await writer.drain()
        assert error_of(await until_end(reader))[0] == 431


# --- how answers end --------------------------------------------------------------------------------------------------

STREAMS = [
    ("/v1/completions", {"prompt": "x", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
]


def streamed(path: str, body: dict[str, Any], version: str) -> bytes:
    return asked(json.dumps(body).encode(), path=path, version=version)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_that_fails_does_not_end_like_a_whole_one(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], version: str
) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), StageLostError("gone")])
    async with serving(tokenizer, generator) as served, connected(served) as (reader, writer):
        writer.write(streamed(path, body, version))
        received = await reader.readuntil(b"stage_lost")
        if version == "1.0":  # the end of the connection is the end of the answer there
            with pytest.raises(ConnectionResetError):
                await reader.read()
            assert b"chunked" not in received
        else:
            received += await reader.read()
            assert b"Transfer-Encoding: chunked" in received
            assert not received.endswith(b"0\r\n\r\n")
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(streamed(path, body, version).replace(b"Host", b"Connection: close\r\nHost"))
        received = await reader.read()
        assert received.endswith(b"data: [DONE]\n\n" if version == "1.0" else b"0\r\n\r\n")


KILLED = """
import asyncio, sys
from pathlib import Path
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import FakeGenerator, Gate, serving, tokens
from relayline.wire.common.process import run

async def main(stopping):
    generator = FakeGenerator(lambda request: [*tokens(request, b"h", ends=False), Gate()])
    async with serving(Tokenizer.load(Path(sys.argv[1])), generator) as served:
        print(served.port, flush=True)
        await stopping.wait()
        print("draining", flush=True)
        await asyncio.Event().wait()

run(main)
"""


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_second_signal_ends_a_stream_like_a_failure(
    tmp_path_factory: pytest.TempPathFactory, version: str
) -> None:
    file = write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(file), stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(await child.stdout.readline()))
        writer.write(streamed(*STREAMS[0], version))
        received = await reader.readuntil(b"data: ")
        child.terminate()
        assert await child.stdout.readline() == b"draining\n"
        child.terminate()
        if version == "1.0":
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            received += await reader.read()
            assert not received.endswith(b"0\r\n\r\n")
        writer.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_half_closes_gets_its_answer(tokenizer: Tokenizer, stream: bool, version: str) -> None:
    gate = Gate()
    generator = FakeGenerator(lambda request: [gate, *tokens(request, b"hello")])
    async with serving(tokenizer, generator) as served, connected(served) as (reader, writer):
        writer.write(asked(json.dumps({"prompt": "x", "stream": stream}).encode(), version=version))
        await writer.drain()
        writer.write(b"\r\n")  # as some clients do after a body
        writer.write_eof()
        await gate.reached.wait()
        received = await reader.readuntil(b"H")  # the server has seen that its client sends no more
        gate.opened.set()
        received += await reader.read()
    assert received.startswith(f"HTTP/{version} 200 OK\r\n".encode())
    assert (
        received.endswith((b"data: [DONE]\n\n", b"0\r\n\r\n")) if stream else json.loads(received.split(b"\r\n\r\n")[1])
    )


async def test_a_client_that_half_closes_gets_all_of_its_answers(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, connected(served) as (reader, writer):
        writer.write(head("/live", method="GET") + asked(PROMPT) + head("/v1/models", method="GET"))
        writer.write_eof()
        assert [(await one(reader))[0] for _ in range(3)] == [200, 200, 200]
        assert await reader.read() == b""


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_gone_client_is_distinguished_from_a_half_closed_one(
    tokenizer: Tokenizer, stream: bool, version: str
) -> None:
    gate = Gate()  # never opened: nothing is written that would find out
    generator = FakeGenerator(lambda request: [next(tokens(request, b"hello")), gate])
    async with serving(tokenizer, generator) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(asked(json.dumps({"prompt": "x", "stream": stream}).encode(), version=version))
        await gate.reached.wait()
        if stream:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await generator.streams[0].closed.wait()


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1/models?a=/b/", "/v1/models?a=/b/"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/models/", "/v1/models"),
        ("/responses/resp_1/cancel/", "/v1/responses/resp_1/cancel"),
        ("/conversations/conv_1/items?limit=2", "/v1/conversations/conv_1/items?limit=2"),
        ("/models/load", "/models/load"),
        ("/v1/models/org%2Ftiny/", "/v1/models/org%2Ftiny"),
        ("/metrics/", "/metrics/"),
        ("//metrics", "//metrics"),
        ("/", "/"),
        ("*", "*"),
        ("http://host/v1/models/", "http://host/v1/models/"),
    ],
)
def test_routes_as_clients_put_them_together(sent: str, found: str) -> None:
    assert usual_path(sent) == found


async def test_a_route_with_a_slash_too_many_is_found(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession() as session:
        for path in ("//v1/models", "/models", "/v1/models/"):
            async with session.get(URL(f"{served.url}{path}", encoded=True)) as reply:
                assert (reply.status, path) == (200, path)
