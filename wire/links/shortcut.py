"""A socket of this machine beside a gRPC stream, for the messages between two of its processes.

gRPC hands each message to a thread of its own, which wakes the event loop, at both ends and for sending as well. From
idle, a message and its answer take 270 us that way. They take 50 us by a socket that the event loop reads itself, and a
fifth of the processor time (two processes on two cores of an AMD EPYC, 2 ms between the messages, 2026-11-28). A token
makes as many such ways as there are processes.

So a stage offers a socket in its first message on a stream. The other end takes the offer if the address that it
dialled is a loopback one with the stage's own port: then no proxy and no other machine stands between. From then on the
messages of that stream's busy direction go by the socket. Everything else stays with the stream: the handshake,
credits, signs of life, the end and its reason. Without an offer, or where taking it fails, all goes by the stream.

The socket has an abstract name, so there is no file, and it is of this network namespace. Its bytes never leave the
kernel, so there is no TLS on it. Who connects shows a secret that was said on the stream, to a caller who had shown
there who it is; the socket ends with the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
import struct
import sys
from collections.abc import Callable

from relayline.wire.common import bounds
from relayline.wire.common.errors import ProtocolError, RelaylineError
from relayline.wire.links.refusals import peer_of
from relayline.wire.links.security import is_loopback
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

NAME_BYTES = SECRET_BYTES = 16
ANSWER_S = 1.0  # for the other end to take a connection; without an answer all goes by the stream
SHOW_S = 5.0  # for a connection to show its secret
STRANGERS_MAX = 64  # connections that have not shown it; one more is closed
READ_BYTES = 256 * 1024
TAKEN = b"\1"  # the answer to a secret that is known
SWITCH = b""  # the sender's last message on its stream: the next one comes by the socket

_SIZE = struct.Struct("<I")  # before each message

Message = Callable[[bytes], None]
Ended = Callable[[RelaylineError | None], None]


class Pipe:
    """One end of a socket that carries whole messages. Event loop only; one end sends, the other receives."""

    def __init__(self, connected: socket.socket, bytes_max: int = bounds.MESSAGE_BYTES_MAX) -> None:
        """`bytes_max` bounds a message that comes."""
        self._socket, self._bytes_max = connected, bytes_max
        self._loop = asyncio.get_running_loop()
        self._unsent = b""  # rest of the latest message
        self._free = asyncio.Event()
        self._free.set()
        self._come = bytearray()  # the beginning of a message
        self._on_message: Message | None = None
        self._on_end: Ended = lambda error: None
        self._is_reading = self._is_closed = False

    # --- sending ------------------------------------------------------------------------------------------------------

    @property
    def is_free(self) -> bool:
        """Whether a message may be sent at once: the kernel has taken all before it."""
        return not self._unsent and not self._is_closed

    def send(self, message: bytes) -> None:
        """Send a message while `is_free`; what the kernel does not take now follows by itself.

        Raises OSError once the other end is gone, or this one closed.
        """
        if self._is_closed:
            raise BrokenPipeError
        try:
            n_sent = self._socket.sendmsg((_SIZE.pack(len(message)), message))
        except (BlockingIOError, InterruptedError):
            n_sent = 0
        if n_sent < _SIZE.size + len(message):
            self._unsent = b"".join((_SIZE.pack(len(message)), message))[n_sent:]
            self._free.clear()
            self._loop.add_writer(self._socket, self._send_rest)

    async def write(self, message: bytes) -> None:
        """Send a message, after those before it. Raises as `send`."""
        while self._unsent and not self._is_closed:
            await self._free.wait()
        self.send(message)

    def _send_rest(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)
            self._free.set()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, on_message: Message, on_end: Ended = lambda error: None) -> None:
        """Call `on_message` with each message that comes, and once `on_end`: with what is wrong with one, or None when
        the other end is gone. `on_message` may raise a RelaylineError, which ends the pipe too, or close it.
        """
        self._on_message, self._on_end = on_message, on_end
        self.resume()

    def pause(self) -> None:
        """Let what comes wait."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)

    def resume(self) -> None:
        """Read again."""
        if not self._is_reading and not self._is_closed:
            self._is_reading = True
            self._loop.add_reader(self._socket, self._readable)

    def drain(self) -> None:
        """Take all that has come by now."""
        while not self._is_closed and self._readable():
            pass

    def _readable(self) -> bool:
        """Take what has come; returns whether it was anything."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._end(None)
            return False
        try:
            self._take(data)
        except RelaylineError as error:
            self._end(error)
        return True

    def _take(self, data: bytes) -> None:
        assert self._on_message is not None
        if not self._come and self._end_of(data) == len(data):
            self._on_message(data[_SIZE.size :])  # nearly always: one message, whole
            return
        self._come += data
        while not self._is_closed and 0 < (end := self._end_of(self._come)) <= len(self._come):
            with memoryview(self._come) as come:
                message = bytes(come[_SIZE.size : end])
            del self._come[:end]
            self._on_message(message)

    def _end_of(self, data: bytes | bytearray) -> int:
        """Return where the first message ends, 0 while its size has not come. Raises ProtocolError for a long one."""
        if len(data) < _SIZE.size:
            return 0
        size: int = _SIZE.unpack_from(data)[0]
        if size > self._bytes_max:
            raise ProtocolError(f"a message of {size} bytes is over the limit of {self._bytes_max}")
        return _SIZE.size + size

    def _end(self, error: RelaylineError | None) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(error)

    def close(self) -> None:
        """Close this end; nothing is called any more."""
        if self._is_closed:
            return
        self._is_closed, self._is_reading = True, False
        self._free.set()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()


class Offer:
    """One stream's offer, until it is withdrawn."""

    def __init__(self, shortcut: pb.Shortcut, withdraw: Callable[[], None]) -> None:
        self.shortcut = shortcut
        """What the stream says of it."""
        self.taken: asyncio.Future[Pipe] = asyncio.get_running_loop().create_future()
        """The pipe, once the other end has connected."""
        self._withdraw = withdraw

    def close(self) -> None:
        """Withdraw the offer, and close its pipe."""
        self._withdraw()
        if self.taken.done() and not self.taken.cancelled():
            self.taken.result().close()
        self.taken.cancel()


class Shortcuts:
    """The listening side of one process. Offers nothing until `listen` has been called. Event loop only."""

    def __init__(self) -> None:
        self._port, self._name = 0, ""
        self._listening: socket.socket | None = None
        self._offers: dict[bytes, Offer] = {}  # by secret; one for each open stream at most
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}

    def listen(self, port: int) -> None:
        """Make offers from now on, on streams to this port. Only Linux has abstract names; elsewhere none is made."""
        if sys.platform != "linux" or not port:
            return
        self._name = f"relayline-{secrets.token_hex(NAME_BYTES)}"
        with contextlib.ExitStack() as stack:
            try:
                listening = stack.enter_context(_new_socket())
                listening.bind(f"\0{self._name}")
                listening.listen(STRANGERS_MAX)
            except OSError:  # where a sandbox forbids it
                return
            stack.pop_all()
        self._listening, self._port = listening, port
        asyncio.get_running_loop().add_reader(listening, self._accept)

    def offer(self, peer: str) -> Offer | None:
        """Return an offer for a stream from `peer`, by gRPC's name of it; None where none is made."""
        if self._listening is None or not is_loopback(peer_of(peer)[0]):
            return None
        secret = secrets.token_bytes(SECRET_BYTES)
        shortcut = pb.Shortcut(name=self._name, secret=secret, port=self._port)
        offer = self._offers[secret] = Offer(shortcut, functools.partial(self._withdraw, secret))
        return offer

    def _withdraw(self, secret: bytes) -> None:
        self._offers.pop(secret, None)

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            stranger, _ = self._listening.accept()
        except OSError:
            return
        stranger.setblocking(False)
        if len(self._strangers) >= STRANGERS_MAX:
            stranger.close()
            return
        loop = asyncio.get_running_loop()
        self._strangers[stranger] = loop.call_later(SHOW_S, self._dismiss, stranger)
        loop.add_reader(stranger, self._look_at, stranger)

    def _let_go(self, stranger: socket.socket) -> None:
        self._strangers.pop(stranger).cancel()
        asyncio.get_running_loop().remove_reader(stranger)

    def _dismiss(self, stranger: socket.socket) -> None:
        self._let_go(stranger)
        stranger.close()

    def _look_at(self, stranger: socket.socket) -> None:
        try:
            shown = stranger.recv(SECRET_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            shown = b""
        offer = self._offers.pop(shown, None)
        if offer is None or offer.taken.done():
            self._dismiss(stranger)
            return
        self._let_go(stranger)
        try:
            stranger.send(TAKEN)
        except OSError:
            stranger.close()
            return
        offer.taken.set_result(Pipe(stranger))

    def close(self) -> None:
        """Take no more connections."""
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None


async def take(shortcut: pb.Shortcut, address: str, bytes_max: int = bounds.MESSAGE_BYTES_MAX) -> Pipe | None:
    """Take what the stream to `address` offers; None if nothing is offered, or it cannot be had.

    `bytes_max` bounds a message that comes.
    """
    host, _, port = address.rpartition(":")
    if sys.platform != "linux" or not shortcut.name or port != str(shortcut.port) or not is_loopback(host):
        return None
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        try:
            connecting = stack.enter_context(_new_socket())
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_connect(connecting, f"\0{shortcut.name}")
                await loop.sock_sendall(connecting, shortcut.secret)
                if await loop.sock_recv(connecting, len(TAKEN)) != TAKEN:
                    return None
        except (OSError, ValueError):  # of times that are over, too
            return None
        stack.pop_all()
    return Pipe(connecting, bytes_max)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
