"""Files at an address: fetched within bounds of time and bytes, or refused in one line at the place of each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from relayline.coordinator.media import fetching
from relayline.coordinator.media.fetching import Fetcher, LookUp
from relayline.coordinator.media.parts import AUDIO, IMAGE, VIDEO, MediaFile, Takes, take_media
from relayline.coordinator.sessions.media_record import FileRecord
from relayline.wire.common.bounds import MEDIA_ADDRESS_CHARS_MAX, MEDIA_BYTES_MAX
from relayline.wire.common.errors import InternalError, InvalidRequestError
from relayline.wire.telemetry import names

PNG = b"\x89PNG\r\n\x1a\n and more"
WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "
HERE = ("127.0.0.1",)
WAIT_S = 30.0
NO_ADDRESS = "an address is https://HOST/... or https://HOST:PORT/..., without a user's name or password"
BOTH = Takes(images=True, audio=True, video=True)
MP4 = b"\x00\x00\x00\x20ftypisom"


class Site:
    """A web server with some files, which remembers its requests."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.is_waiting = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        name = request.path.removeprefix("/")
        if name == "png":
            return web.Response(body=PNG, headers={"Set-Cookie": "a=b"})
        if name == "wav":
            return web.Response(body=WAV)
        if name == "large":
            return web.Response(body=PNG + bytes(MEDIA_BYTES_MAX))
        if name == "movie":
            return web.Response(body=MP4 + bytes(MEDIA_BYTES_MAX))
        if name == "half":
            return web.Response(body=PNG + bytes(9 * 1024 * 1024))
        if name == "page":
            return web.Response(text="<html>")
        if name == "never":
            self.is_waiting.set()
            await asyncio.Event().wait()
        if name == "cut":
            assert request.transport is not None
            request.transport.close()
        if name.startswith("to="):
            raise web.HTTPFound(name.removeprefix("to="))
        raise web.HTTPNotFound


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[tuple[Site, str]]:
    found, app = Site(), web.Application()
    app.router.add_get("/{name:.*}", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield found, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def at(*addresses: str, kind: str = "image_url") -> list[MediaFile]:
    parts = [{"type": kind, kind: {"url": address}} for address in addresses]
    hosts = ("*", *HERE, "localhost", "*.example")
    return take_media([{"role": "user", "content": parts}], BOTH, hosts).media


async def here(fetcher: Fetcher, files: Sequence[MediaFile], look_ups: set[LookUp] | None = None) -> list[MediaFile]:
    seen = [FileRecord("image") for _ in files]
    try:
        return await fetcher.all_here(files, set() if look_ups is None else look_ups, seen)
    finally:
        assert [list(each.steps) for each in seen] == [[names.SPAN_FETCH] if file.address else [] for file in files]


async def refusal(files: Sequence[MediaFile], hosts: Sequence[str] = HERE, fetch_s: float = 30.0) -> str:
    fetcher = Fetcher(hosts, fetch_s)
    try:
        with pytest.raises(InvalidRequestError) as caught:
            await here(fetcher, files)
    finally:
        fetcher.close()
    assert "\n" not in caught.value.message
    return caught.value.message


async def test_files_are_fetched_in_their_order_and_others_stay_as_they_are() -> None:
    own = MediaFile(b"own", b"hash", "messages[0]")
    async with site() as (served, url):
        fetcher = Fetcher(HERE)
        asked = [*at(f"{url}/png"), own, *at(f"{url}/wav", kind="audio_url"), *at(f"{url}/to=/png")]
        found = await here(fetcher, asked)
        again = await here(fetcher, at(f"{url}/png"))
        assert await here(fetcher, [own]) == [own]
        fetcher.close()
    assert [each.data for each in (*found, *again)] == [PNG, b"own", WAV, PNG, PNG]
    assert found[0].sha256 == hashlib.sha256(PNG).digest()
    assert [each.kind for each in found] == [IMAGE, IMAGE, AUDIO, IMAGE]
    assert found[0].param == "messages[0].content[0].image_url"
    assert not any(each.address for each in found)
    assert all("Cookie" not in request.headers for request in served.asked)


async def test_a_fetched_video_may_be_larger_than_what_a_body_has_room_for() -> None:
    async with site() as (_, url):
        fetcher = Fetcher(HERE)
        asked = at(f"{url}/movie", kind="video_url")
        (found,) = await fetcher.all_here(asked, set(), [FileRecord("video")])
        fetcher.close()
    assert (found.kind, len(found.data)) == (VIDEO, len(MP4) + MEDIA_BYTES_MAX)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("gone", "its server answered 404"),
        ("page", "it is no PNG, JPEG, WebP or GIF"),
        ("large", f"a file has at most {MEDIA_BYTES_MAX} bytes"),
        ("cut", "it cannot be fetched"),
        ("to=http://10.0.0.1/png", "this server does not fetch from there"),
        ("to=file:///etc/passwd", "this server does not fetch from there"),
        ("to=/to=/to=/to=/to=/png", "more than 4 redirects"),
    ],
)
async def test_what_cannot_be_had_is_one_line_at_its_place(path: str, problem: str) -> None:
    async with site() as (_, url):
        message = await refusal(at(f"{url}/png", f"{url}/{path}"))
    assert message.startswith("messages[0].content[1].image_url: ")
    assert problem in message


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Serve the same bytes to everyone, whatever is asked, and then close."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"+secret banner\r\n", "it cannot be fetched: its server's answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"secret" * 20_000, "it cannot be fetched: its server's answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: secret\r\n\r\n", "it cannot be fetched: its server's answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "it cannot be fetched: its server's answer is not complete"),
        (b"", "it cannot be fetched: its server ended the connection"),
        (b"HTTP/1.1 302 F\r\nLocation: http://[::1\r\n\r\n", "it leads to no address"),
        (b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:99999/\r\n\r\n", "it leads to no address"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret", "it is no PNG, JPEG, WebP or GIF"),
    ],
)
async def test_a_bad_answer_is_one_line_that_repeats_none_of_its_bytes(answer: bytes, problem: str) -> None:
    async with answering(answer) as address:
        assert await refusal(at(address)) == f"messages[0].content[0].image_url: {address}: {problem}"


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    async with site() as (served, url):
        message = await refusal(at(f"{url}/never"), fetch_s=0.05)
        await served.is_waiting.wait()
    assert message.endswith("it did not come within 0.05 s")


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as (_, url):
        pass
    place = "messages[0].content[0].image_url"
    assert await refusal(at(f"{url}/png")) == f"{place}: {url}/png: it cannot be fetched: Connection refused"
    monkeypatch.setattr(fetching, "_SHOWN_CHARS", 20)
    assert "http://127.0.0.1:" in await refusal(at(f"{url}/{'x' * 300}"))


async def test_the_files_of_a_request_have_a_bound_together() -> None:
    async with site() as (_, url):
        message = await refusal(at(*[f"{url}/half?{number}" for number in range(4)]))
    assert "the fetched files of a request have at most 33554432 bytes together" in message


async def test_a_name_that_the_list_does_not_say_must_have_a_public_address() -> None:
    async with site() as (served, url):
        local = at(url.replace("127.0.0.1", "localhost") + "/png")
        message = await refusal(local, ("*",))
        assert not served.asked
        fetcher = Fetcher(("localhost",))
        found = await here(fetcher, local)
        fetcher.close()
    assert message.endswith("it cannot be fetched: its host has no public address")
    assert found[0].data == PNG


async def test_a_name_server_that_does_not_answer_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, look_up = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any) -> Any:
        if host.endswith(".example"):
            assert may_answer.wait(WAIT_S)
            raise socket.gaierror(socket.EAI_NONAME, "no such host")
        return look_up(host, *rest)

    monkeypatch.setattr(fetching.socket, "getaddrinfo", slow)
    held: set[LookUp] = set()
    async with site() as (_, url):
        fetcher = Fetcher(("localhost", "*.example"), 0.05)
        many = at(*[f"http://host{number}.example/png" for number in range(16)])
        with pytest.raises(InvalidRequestError, match=r"it did not come within 0\.05 s"):
            await here(fetcher, many, held)
        quick = Fetcher(("localhost",))
        found = await here(quick, at(url.replace("127.0.0.1", "localhost") + "/png"))
    assert found[0].data == PNG
    assert len(held) == 16
    assert not any(each.done() for each in held)
    may_answer.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait(held)


async def test_a_closed_fetcher_begins_nothing() -> None:
    async with site() as (served, url):
        fetcher = Fetcher(HERE)
        fetcher.close()
        with pytest.raises(InternalError, match="the coordinator is closing"):
            await here(fetcher, at(f"{url}/png"))
    assert not served.asked


@pytest.mark.parametrize(
    ("address", "hosts", "where"),
    [
        ("https://example.org/a.png", (), "elsewhere"),
        ("https://example.org/a.png", ("other.example",), "example.org"),
        ("https://192.168.0.1/a.png", ("*",), "192.168.0.1"),
        ("http://2130706433/a.png", ("*",), "2130706433"),
        ("http://⑩.0.0.1/a.png", ("*",), "10.0.0.1"),
        ("file:///etc/passwd", ("*",), "elsewhere"),
        (f"https://example.org/{'a' * MEDIA_ADDRESS_CHARS_MAX}", (), "elsewhere"),
    ],
)
def test_addresses_of_other_hosts_are_refused_before_anything_is_asked(
    address: str, hosts: tuple[str, ...], where: str
) -> None:
    for kind in ("image_url", "audio_url"):
        parts = [{"type": kind, kind: {"url": address}}]
        with pytest.raises(InvalidRequestError, match=rf"this server fetches none from {where}, see --media-hosts$"):
            take_media([{"role": "user", "content": parts}], BOTH, hosts)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (
            f"https://example.org/{'a' * MEDIA_ADDRESS_CHARS_MAX}",
            f"an address has at most {MEDIA_ADDRESS_CHARS_MAX} characters",
        ),
        ("https://user:secret@example.org/a.png", NO_ADDRESS),
        ("http://example.org:99999/a.png", NO_ADDRESS),
        ("https:///a.png", NO_ADDRESS),
    ],
)
def test_an_address_that_is_none_blames_no_list(address: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        at(address)
    assert caught.value.message == f"messages[0].content[0].image_url: {problem}"
