"""Goal: messages between two processes of one machine go by a socket, whole and in order; without it by the stream.

Method: both ends in one event loop on real sockets. Ends, strangers and full buffers are placed, none is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.wire.common.errors import ProtocolError, RelaylineError, StageLostError
from relayline.wire.links import shortcut
from relayline.wire.links.shortcut import Pipe, Shortcuts, take
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract socket names")
PORT = 4_711
HERE, PEER = f"127.0.0.1:{PORT}", "ipv4:127.0.0.1:50000"


@contextlib.contextmanager
def pipes(bytes_max: int = 1 << 20) -> Iterator[tuple[Pipe, Pipe]]:
    """Both ends of one socket."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    one, other = Pipe(ends[0], bytes_max), Pipe(ends[1], bytes_max)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


class Inbox:
    """What comes by a pipe, for a test that waits for it; None is the end."""

    def __init__(self, pipe: Pipe) -> None:
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        pipe.receive(self._came.put_nowait, lambda error: self._came.put_nowait(None))

    async def read(self) -> bytes | None:
        return await self._came.get()


@contextlib.contextmanager
def listening(port: int = PORT) -> Iterator[Shortcuts]:
    shortcuts = Shortcuts()
    shortcuts.listen(port)
    try:
        yield shortcuts
    finally:
        shortcuts.close()


async def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    sizes = (0, 1, 5, 300_000, 1 << 20, 3, 0)
    with pipes() as (one, other):
        inbox, sent = Inbox(other), [bytes([at]) * size for at, size in enumerate(sizes)]

        async def send() -> None:
            for message in sent:
                await one.write(message)

        sending = asyncio.create_task(send())
        async with asyncio.timeout(20):
            assert [await inbox.read() for _ in sent] == sent
            await sending
        assert one.is_free


@given(messages=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(1, 30), max_size=40))
def test_messages_do_not_depend_on_how_the_bytes_come(messages: list[bytes], cuts: list[int]) -> None:
    async def run() -> list[bytes]:
        found: list[bytes] = []
        with pipes() as (_, other):
            other._on_message = found.append
            data = b"".join(struct.pack("<I", len(message)) + message for message in messages)
            for cut in [*cuts, len(data)]:
                piece, data = data[:cut], data[cut:]
                if piece:
                    other._take(piece)
        return found

    assert asyncio.run(run()) == messages


async def test_a_message_that_the_kernel_does_not_take_follows_by_itself() -> None:
    with pipes() as (one, other):
        one.send(large := bytes(1 << 20))
        assert not one.is_free, "the rest waits here, and the sender's buffer may be used again"
        writing = asyncio.create_task(one.write(b"next"))
        inbox = Inbox(other)
        async with asyncio.timeout(20):
            assert await inbox.read() == large
            assert await inbox.read() == b"next"
            await writing


async def test_a_write_cancelled_while_it_waits_leaves_the_pipe_whole() -> None:
    with pipes() as (one, other):
        one.send(large := bytes(1 << 20))
        writing = asyncio.create_task(one.write(b"dropped"))
        await asyncio.sleep(0)
        writing.cancel()
        inbox = Inbox(other)
        async with asyncio.timeout(20):
            assert await inbox.read() == large
            await one.write(b"next")
            assert await inbox.read() == b"next"


async def test_an_end_is_heard_after_the_messages_before_it() -> None:
    with pipes() as (one, other):
        one.send(b"last words")
        one.close()
        inbox = Inbox(other)
        async with asyncio.timeout(20):
            assert await inbox.read() == b"last words"
            assert await inbox.read() is None
        with pytest.raises(OSError):
            one.send(b"late")
        assert not one.is_free


async def test_what_has_come_is_taken_at_once_where_the_stream_ends_first() -> None:
    found: list[bytes] = []
    with pipes() as (one, other):
        other.receive(found.append)
        one.send(b"one")
        one.send(b"two")
        other.drain()
        assert found == [b"one", b"two"]


async def test_a_message_over_the_limit_ends_the_pipe_unread() -> None:
    ended: list[RelaylineError | None] = []
    with pipes(bytes_max=8) as (one, other):
        other.receive(lambda message: None, ended.append)
        one.send(bytes(9))
        other.drain()
    (error,) = ended
    assert isinstance(error, ProtocolError)


async def test_an_error_of_the_receiver_ends_the_pipe() -> None:
    def refuse(message: bytes) -> None:
        raise StageLostError("not this")

    ended: list[RelaylineError | None] = []
    with pipes() as (one, other):
        other.receive(refuse, ended.append)
        one.send(b"a")
        other.drain()
        assert [type(error) for error in ended] == [StageLostError]


async def test_a_paused_pipe_reads_nothing_until_it_is_resumed() -> None:
    found: list[bytes] = []
    with pipes() as (one, other):
        other.receive(found.append)
        other.pause()
        one.send(b"a")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not found
        inbox = Inbox(other)
        async with asyncio.timeout(20):
            assert await inbox.read() == b"a"


async def test_a_receiver_may_close_the_pipe_before_the_messages_behind() -> None:
    found: list[bytes] = []
    with pipes() as (one, other):

        def take(message: bytes) -> None:
            found.append(message)
            other.close()

        other.receive(take)
        one.send(b"a")
        one.send(b"b")
        other.drain()
        assert found == [b"a"]


async def test_an_offer_is_taken_by_who_knows_its_secret_alone() -> None:
    with listening() as shortcuts:
        offer, other = shortcuts.offer(PEER), shortcuts.offer("ipv6:%5B::1%5D:50000")
        assert offer is not None
        assert other is not None
        wrong = pb.Shortcut(name=offer.shortcut.name, secret=bytes(16), port=PORT)
        assert await take(wrong, HERE) is None
        pipe = await take(offer.shortcut, HERE)
        assert pipe is not None
        assert not other.taken.done()
        pipe.send(b"hello")
        assert await Inbox(await offer.taken).read() == b"hello"
        assert await take(offer.shortcut, HERE) is None, "a secret is good for one connection"
        assert not shortcuts._strangers
        pipe.close()
        offer.close()
        other.close()
        assert not shortcuts._offers


async def test_a_withdrawn_offer_cannot_be_taken() -> None:
    with listening() as shortcuts:
        offer = shortcuts.offer(PEER)
        assert offer is not None
        offer.close()
        assert await take(offer.shortcut, HERE) is None


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.5:80", "unix:", "ipv6:%5B2001:db8::1%5D:80"])
async def test_other_machines_get_no_offer(peer: str) -> None:
    with listening() as shortcuts:
        assert shortcuts.offer(peer) is None
    assert Shortcuts().offer(PEER) is None, "nor does anyone before the port is open"


@pytest.mark.parametrize("address", [f"127.0.0.1:{PORT + 1}", f"10.0.0.5:{PORT}", f"stage.example:{PORT}"])
async def test_an_offer_that_came_by_a_proxy_is_left(address: str) -> None:
    with listening() as shortcuts:
        offer = shortcuts.offer(PEER)
        assert offer is not None
        assert await take(offer.shortcut, address) is None
        offer.close()


async def test_without_an_answer_all_goes_by_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "ANSWER_S", 0.0)
    with listening() as shortcuts:
        offer = shortcuts.offer(PEER)
        assert offer is not None
        assert await take(offer.shortcut, HERE) is None
        offer.close()
    gone = pb.Shortcut(name="relayline-of-nobody", secret=bytes(16), port=PORT)
    assert await take(gone, HERE) is None
    assert await take(pb.Shortcut(), HERE) is None


async def test_where_a_sandbox_forbids_sockets_all_goes_by_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> socket.socket:
        raise PermissionError

    with listening() as shortcuts:
        offer = shortcuts.offer(PEER)
        assert offer is not None
        monkeypatch.setattr(shortcut, "_new_socket", forbidden)
        assert await take(offer.shortcut, HERE) is None
        offer.close()
    with listening() as shortcuts:
        assert shortcuts.offer(PEER) is None


async def test_connections_that_show_nothing_are_bounded_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "STRANGERS_MAX", 2)
    monkeypatch.setattr(shortcut, "SHOW_S", 0.0)
    loop = asyncio.get_running_loop()
    with listening() as shortcuts, contextlib.ExitStack() as stack:
        strangers: list[Any] = []
        for _ in range(3):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            stranger.connect(f"\0{shortcuts._name}")
            strangers.append(stranger)
        async with asyncio.timeout(20):
            assert [await loop.sock_recv(stranger, 1) for stranger in strangers] == [b""] * 3
        assert not shortcuts._strangers
