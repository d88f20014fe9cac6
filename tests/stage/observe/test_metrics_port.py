"""Goal: a client of a stage's metrics port costs the event loop, which links share, little, whatever it sends.

Method: raw connections on loopback to the port itself, with an answer made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from relayline.stage.observe import metrics_port
from relayline.stage.observe.metrics_port import CONNECTIONS_MAX, serving
from relayline.wire.links import tls_door
from relayline.wire.links.tls_server import server_context
from tests.support.identities import make_identities

PACKED = gzip.compress(b"x" * 100_000)


async def echo(request: web.BaseRequest) -> web.Response:
    return web.Response(body=await request.read())


@contextlib.asynccontextmanager
async def port_of(context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async with serving("127.0.0.1", 0, echo, context) as (_, port):
        yield port


async def asked(port: int, request: bytes) -> bytes:
    """All that comes back until the other end closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def request(line: str, body: bytes = b"", *headers: str) -> bytes:
    length = f"Content-Length: {len(body)}"
    return "\r\n".join([f"{line} HTTP/1.1", "Host: x", length, *headers, "", ""]).encode() + body


async def test_no_body_is_unpacked_and_a_connection_has_one_request() -> None:
    async with port_of() as port:
        packed = request("GET /metrics", PACKED, "Content-Encoding: gzip")
        head, _, body = (await asked(port, packed + request("GET /metrics"))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body == PACKED
        for line, status in (("POST /metrics", b"405"), ("GET /else", b"404"), ("DELETE /", b"404")):
            answer = await asked(port, request(line, PACKED, "Content-Encoding: gzip"))
            assert answer.split(b" ", 2)[1] == status


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-A: ", request("GET /metrics", b"x")[:-1]]
)
async def test_a_connection_that_brings_no_request_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "CONNECTION_S", 0.2)
    async with port_of() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_the_oldest_of_too_many_goes(is_tls: bool, tmp_path: Path) -> None:
    ids = make_identities(tmp_path / "ids")
    context = server_context(ids.box1 / "cert.pem", ids.box1 / "key.pem") if is_tls else None
    async with port_of(context) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX + 1)]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(idle[0][0].read(), 20) == b"", "the oldest"
        reader, writer = idle[1]
        if not is_tls:
            writer.write(request("GET /metrics"))
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 "), "the next one stays"
        for _, writer in idle:
            writer.close()


async def test_a_handshake_that_is_not_finished_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_door, "HANDSHAKE_TIMEOUT_S", 0.2)
    ids = make_identities(tmp_path / "ids")
    async with port_of(server_context(ids.box1 / "cert.pem", ids.box1 / "key.pem")) as port:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(asked(port, b"\x16\x03\x01"), 20) == b""
