"""A bounded line for few workers that is fair between clients. Pure.

Clients take turns, however many requests each has in line. One client never holds all places of a line that has more
than one. So one client's requests cannot keep the others out.
"""

from __future__ import annotations

import collections
import dataclasses

from relayline.wire.common.errors import OverloadedError

WAITING_MAX = 2_048  # requests in one line; each takes a worker a millisecond, if it is short
WAITING_BYTES_MAX = 64 * 1024 * 1024  # of bodies in one line; four of the largest
_RETRY_AFTER_S = 2


@dataclasses.dataclass(eq=False, slots=True)
class Ticket:
    """One request in line, or at work."""

    client: str
    size_bytes: int
    is_working: bool = False


class FairLine:
    """The requests that wait for a place, by client."""

    def __init__(self, n_places: int) -> None:
        """`n_places` requests are worked on at once."""
        self._n_free = n_places
        self._each_max = max(1, n_places - 1)
        self._waiting: collections.OrderedDict[str, collections.deque[Ticket]] = collections.OrderedDict()
        self._n_working: collections.Counter[str] = collections.Counter()
        self._n_waiting = 0
        self._n_bytes = 0

    def enter(self, client: str, size_bytes: int) -> Ticket:
        """Join the line with a body of `size_bytes`.

        Raises OverloadedError where the line is full for this client. A client may fill half of a line, so that there
        is room for others.
        """
        own = self._waiting.get(client, ())
        n_bytes = sum(ticket.size_bytes for ticket in own)
        is_own_full = len(own) >= WAITING_MAX // 2 or (own and n_bytes + size_bytes > WAITING_BYTES_MAX // 2)
        if is_own_full or self._n_waiting >= WAITING_MAX or self._n_bytes + size_bytes > WAITING_BYTES_MAX:
            raise OverloadedError("too many requests are waiting to be read; try again", _RETRY_AFTER_S)
        ticket = Ticket(client, size_bytes)
        self._waiting.setdefault(client, collections.deque()).append(ticket)
        self._n_waiting += 1
        self._n_bytes += size_bytes
        return ticket

    def begin(self) -> list[Ticket]:
        """Return the tickets that get a place now."""
        begun: list[Ticket] = []
        for client in [*self._waiting]:
            if not self._n_free:
                break
            if self._n_working[client] >= self._each_max:
                continue
            ticket = self._waiting[client][0]
            self._take_out(ticket)
            if client in self._waiting:
                self._waiting.move_to_end(client)
            ticket.is_working = True
            self._n_working[client] += 1
            self._n_free -= 1
            begun.append(ticket)
        return begun + self.begin() if begun else begun

    def leave(self, ticket: Ticket) -> None:
        """Go, done or not. Once only."""
        if not ticket.is_working:
            self._take_out(ticket)
            return
        self._n_free += 1
        self._n_working[ticket.client] -= 1
        if not self._n_working[ticket.client]:
            del self._n_working[ticket.client]

    def _take_out(self, ticket: Ticket) -> None:
        own = self._waiting[ticket.client]
        own.remove(ticket)
        if not own:
            del self._waiting[ticket.client]
        self._n_waiting -= 1
        self._n_bytes -= ticket.size_bytes
