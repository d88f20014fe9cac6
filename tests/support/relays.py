"""A relay in this process, and servers to be reached through it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from relayline.coordinator.relay.config import RelayConfig
from relayline.coordinator.relay.service import Relay
from relayline.stage.joining.tunnel import Tunnel
from relayline.wire.links.carrying import MESSAGE_BYTES_MAX
from relayline.wire.links.listening import Listener
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from tests.support.polling import pause

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RelayUnderTest:
    """`address` is where tunnels end."""

    def __init__(self, relay: Relay, address: str) -> None:
        self.relay, self.address = relay, address

    @contextlib.asynccontextmanager
    async def stage(
        self, name: str, target: int, security: LinkSecurity = PLAINTEXT, port: int = 0
    ) -> AsyncIterator[Tunnel]:
        """Hold a stage's tunnel open for the length of a with block; entered once it is open."""
        opened = asyncio.Event()

        async def on_port(_: int) -> None:
            opened.set()

        tunnel = Tunnel(self.address, name, security, target, port)
        holding = asyncio.create_task(tunnel.keep_open(on_port))
        entered = asyncio.ensure_future(opened.wait())
        try:
            await asyncio.wait({holding, entered}, return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                holding.result()
            yield tunnel
        finally:
            for task in (holding, entered):
                task.cancel()
            await asyncio.gather(holding, entered, return_exceptions=True)

    def figure(self, name: str, which: str) -> int:
        """One of the figures of a stage."""
        return self.relay.figures()[name][which]

    async def until(self, name: str, which: str, value: int) -> None:
        """Wait until a figure has this value."""
        while self.relay.figures().get(name, {}).get(which) != value:
            await pause()


@contextlib.asynccontextmanager
async def running_relay(security: LinkSecurity = PLAINTEXT, **config: object) -> AsyncIterator[RelayUnderTest]:
    """Run a relay on loopback for the length of a with block."""
    relay = Relay(RelayConfig(**config))  # type: ignore[arg-type]
    listener = Listener(security, "the relay", MESSAGE_BYTES_MAX)
    listener.server.add_generic_rpc_handlers((relay.handlers(),))
    port = listener.add_port("127.0.0.1", 0)
    await listener.server.start()
    try:
        yield RelayUnderTest(relay, f"127.0.0.1:{port}")
    finally:
        await relay.close()
        await listener.stop(None)


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[int]:
    """Serve TCP on loopback for the length of a with block; yields the port."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, and end when the other end has ended."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
