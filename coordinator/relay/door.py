"""The port of one relayed stage: takes connections in its place, and lends each to the stage's tunnel.

The port stays open while the tunnel is away, so that nobody else gets it; connections are then closed at once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from relayline.wire.common import bounds
from relayline.wire.common.process import first_of
from relayline.wire.common.tasks import end_task, start_among
from relayline.wire.links.carrying import Call, Carried, End, carry, prepare
from relayline.wire.links.families import hosts_of_both
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import address_group, is_loopback
from relayline.wire.pb.relayline.v1 import tunnel_pb2 as pb

log = logging.getLogger("relayline.relay")

TICKET_BYTES = 16
RELAY_END = End(pb.CarryResponse, pb.CarryRequest, "to_stage_bytes", "from_stage_bytes")


class Tunnel:
    """One open call of a relayed stage. `ended` is set once it is no longer the stage's."""

    def __init__(self, owner: Identity | None, write: Callable[[pb.OpenResponse], Awaitable[None]]) -> None:
        """`write` may be called by several at once."""
        self.owner, self.write = owner, write
        self.ended = asyncio.Event()


class Arrival:
    """One connection, from its first byte on. `counts` are of it alone."""

    def __init__(
        self, tunnel: Tunnel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        """`address`: what it counts under; empty for this machine's own."""
        self.tunnel, self.reader, self.writer, self.address = tunnel, reader, writer, address
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.counts = Carried()
        self.taken, self.done, self.given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def over(self) -> None:
        """Return once the tunnel has ended, or another connection got this one's room."""
        ways = [asyncio.create_task(event.wait()) for event in (self.tunnel.ended, self.given_up)]
        try:
            await first_of(*ways)
        finally:
            for way in ways:
                way.cancel()


class Door:
    """The port of one stage. Event loop only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.left_ns = time.monotonic_ns()
        """When the last tunnel ended."""
        self.n_taken = self.n_refused = 0
        self._past = Carried()
        self._tunnel: Tunnel | None = None
        self._open: dict[bytes, Arrival] = {}  # by ticket, the oldest first
        self._server: asyncio.Server | None = None
        self._lending: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether the stage's tunnel is open."""
        return self._tunnel is not None

    @property
    def n_open(self) -> int:
        """How many connections there are."""
        return len(self._open)

    @property
    def counts(self) -> Carried:
        """The bytes of all connections so far."""
        each = (self._past, *(arrival.counts for arrival in self._open.values()))
        return Carried(sum(one.to_stage_bytes for one in each), sum(one.from_stage_bytes for one in each))

    async def listen(self, host: str, port: int) -> None:
        """Listen from now on, at 0.0.0.0 by IPv6 too. Raises OSError."""
        limit = bounds.RELAY_BUFFER_BYTES // 2  # asyncio reads up to twice as much
        self._server = await asyncio.start_server(self._came, hosts_of_both(host), port, limit=limit)
        self.port = self._server.sockets[0].getsockname()[1]

    def begin(self, tunnel: Tunnel) -> None:
        """Let this tunnel carry all further connections; the one before ends, with its connections."""
        if self._tunnel is not None:
            self._tunnel.ended.set()
        self._tunnel = tunnel

    def end(self, tunnel: Tunnel) -> None:
        """End a tunnel, with its connections."""
        tunnel.ended.set()
        if self._tunnel is tunnel:
            self._tunnel, self.left_ns = None, time.monotonic_ns()

    def take(self, ticket: bytes, caller: Identity | None) -> Arrival | None:
        """Return the connection of a ticket, once, to the stage that it came for; None for no such one."""
        arrival = self._open.get(ticket)
        if arrival is None or arrival.taken.is_set() or arrival.tunnel.owner != caller or arrival.tunnel.ended.is_set():
            return None
        arrival.taken.set()
        return arrival

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start_among(self._lending, self._lent(reader, writer))

    async def _lent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Offer a connection to the tunnel, and keep it until it was carried to its end."""
        arrival = self._entered(reader, writer)
        if arrival is None:
            self.n_refused += 1
            writer.transport.abort()
            return
        prepare(writer)
        taken, done = asyncio.create_task(arrival.taken.wait()), asyncio.create_task(arrival.done.wait())
        over = asyncio.create_task(arrival.over())
        try:
            async with asyncio.timeout(bounds.RELAY_PICK_UP_S):
                await arrival.tunnel.write(pb.OpenResponse(ticket=arrival.ticket))
                await first_of(taken, over)
            if arrival.taken.is_set():
                self.n_taken += 1
                await first_of(done, over)
        except TimeoutError:
            log.warning("stage %s did not take a connection within %.0f s", self.name, bounds.RELAY_PICK_UP_S)
        except Exception as error:  # of the tunnel's call, which has just ended
            log.debug("a connection to stage %s was not taken: %s", self.name, error)
        finally:
            for task in (taken, done, over):
                task.cancel()
            self._leave(arrival)
            writer.transport.abort()  # does nothing to one that was closed in order

    def _entered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Arrival | None:
        """Let a connection in; None for no room.

        Whoever holds connections open without a word keeps no one out: one on which the stage has sent nothing makes
        room, of the same address if that has too many.
        """
        if self._tunnel is None:
            return None
        host = str((writer.get_extra_info("peername") or ("",))[0])
        address = "" if is_loopback(host) else address_group(host)
        of_address = [arrival for arrival in self._open.values() if address and arrival.address == address]
        is_crowded = len(of_address) >= bounds.RELAYED_PER_ADDRESS_MAX
        unanswered = [each for each in self._open.values() if not each.counts.from_stage_bytes]
        if is_crowded:
            unanswered = [each for each in unanswered if each.address == address]
        is_full = len(self._open) >= bounds.RELAYED_CONNECTIONS_MAX
        if is_crowded or is_full or len(unanswered) >= bounds.RELAYED_UNANSWERED_MAX:
            if not unanswered:
                return None
            self._give_up(unanswered)
        arrival = Arrival(self._tunnel, reader, writer, address)
        self._open[arrival.ticket] = arrival
        return arrival

    def _give_up(self, unanswered: list[Arrival]) -> None:
        """End one of these connections, which are not none: the oldest of the address that has most of them."""
        n_of = collections.Counter(each.address for each in unanswered)
        victim = max(unanswered, key=lambda each: n_of[each.address])
        victim.given_up.set()
        victim.writer.transport.abort()
        self._leave(victim)

    def _leave(self, arrival: Arrival) -> None:
        """A connection counts no more. Idempotent."""
        if self._open.pop(arrival.ticket, None) is not None:
            self._past.to_stage_bytes += arrival.counts.to_stage_bytes
            self._past.from_stage_bytes += arrival.counts.from_stage_bytes

    async def close(self) -> None:
        """Listen no more, and end the tunnel."""
        if self._server is not None:
            self._server.close()
        if self._tunnel is not None:
            self.end(self._tunnel)
        for work in list(self._lending):
            await end_task(work)


async def lend(call: Call, arrival: Arrival) -> None:
    """Carry a connection over a call of its stage until either has ended. Raises as `carry`."""
    carrying = asyncio.create_task(carry(call, RELAY_END, arrival.reader, arrival.writer, arrival.counts))
    ended = asyncio.create_task(arrival.over())
    try:
        await first_of(carrying, ended)
        if carrying.done():
            carrying.result()
            arrival.writer.close()
            with contextlib.suppress(OSError):
                await arrival.writer.wait_closed()
    finally:
        ended.cancel()
        carrying.cancel()
        try:
            await asyncio.gather(carrying, ended, return_exceptions=True)
        finally:  # also where the call is cancelled once more
            arrival.done.set()
