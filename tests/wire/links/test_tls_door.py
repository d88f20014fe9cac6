"""A port with TLS: whoever never finishes a handshake is known, counted once, and can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from relayline.wire.links import tls_door
from relayline.wire.links.tls_door import Door, Shaking
from tests.support.polling import pause

LOCAL, WAIT_S = "127.0.0.1", 60


class Heard:
    """What a door tells of its connections."""

    def __init__(self) -> None:
        self.takes = True
        self.came: list[Shaking] = []
        self.left: list[Shaking] = []

    def take(self, shaking: Shaking) -> bool:
        self.came.append(shaking)
        return self.takes


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[Door, Heard, int]]:
    """A door whose handshakes all fail: it has no certificate."""
    heard = Heard()
    door = Door(lambda _: asyncio.Protocol(), heard.take, heard.left.append, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    await door.listen([LOCAL], 0)
    try:
        async with asyncio.timeout(WAIT_S):
            yield door, heard, door.sockets[0].getsockname()[1]
    finally:
        door.close()
        await door.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1_024):
            pass
    return True


async def test_one_that_may_not_stay_is_closed_and_counted_nowhere() -> None:
    async with opened() as (door, heard, port):
        heard.takes = False
        for _ in range(2):
            reader, writer = await asyncio.open_connection(LOCAL, port)
            assert await is_closed(reader)
            writer.close()
        assert [shaking.host for shaking in heard.came] == [LOCAL] * 2
        assert (heard.left, door._shaking) == ([], set())


async def test_a_handshake_that_fails_leaves_once() -> None:
    async with opened() as (door, heard, port):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await is_closed(reader)
        writer.close()
        while door._shaking:
            await pause()
        assert heard.left == heard.came
        assert len(heard.left) == 1


@pytest.mark.parametrize("how", ["one alone", "all with the door"])
async def test_a_silent_one_is_ended(how: str) -> None:
    async with opened() as (door, heard, port):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        while not door._shaking:
            await pause()
        assert heard.left == []
        if how == "one alone":
            heard.came[0].end()
        else:
            door.close()
            await door.wait_closed()
        assert await is_closed(reader)
        writer.close()
        while not heard.left:
            await pause()
        assert heard.left == heard.came


async def test_a_machine_without_files_takes_connections_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    accept, errors = loop.sock_accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ConnectionAbortedError()]

    async def failing(listening: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop(0)
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr(tls_door, "_FULL_PAUSE_S", 0.0)
    async with opened() as (_, heard, port):
        heard.takes = False
        reader, writer = await asyncio.open_connection(LOCAL, port)
        assert await is_closed(reader)
        writer.close()
        assert len(heard.came) == 1
    assert caplog.messages.count("no connection can be taken: Too many open files") == 1
