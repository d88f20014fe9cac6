"""The order of work: clients take turns, none has all places, and the queue is bounded."""

from __future__ import annotations

import pytest

from relayline.coordinator.http.workers import fair_line
from relayline.coordinator.http.workers.fair_line import FairLine, Ticket
from relayline.wire.common.errors import OverloadedError


def drained(line: FairLine) -> list[str]:
    """The clients in the order in which they get a place, each leaving before the next begins."""
    order = []
    working = line.begin()
    while working:
        ticket = working.pop(0)
        order.append(ticket.client)
        line.leave(ticket)
        working += line.begin()
    return order


def test_clients_take_turns_however_many_each_has_in_line() -> None:
    line = FairLine(1)
    for client in ("a", "a", "a", "a", "b", "c", "b"):
        line.enter(client, 1)
    assert drained(line) == ["a", "b", "c", "a", "b", "a", "a"]


def test_one_client_never_has_all_places() -> None:
    line = FairLine(2)
    crowd = [line.enter("a", 1) for _ in range(8)]
    assert line.begin() == crowd[:1]
    other = line.enter("b", 1)
    assert line.begin() == [other]
    line.leave(other)
    assert line.begin() == []
    line.leave(crowd[0])
    assert line.begin() == [crowd[1]]


def test_a_client_that_goes_away_leaves_the_line_and_makes_room() -> None:
    line = FairLine(1)
    first, second, third = (line.enter("a", 1) for _ in range(3))
    assert line.begin() == [first]
    line.leave(second)
    line.leave(first)
    assert line.begin() == [third]
    line.leave(third)
    assert line.begin() == []
    assert not line._waiting
    assert not line._n_working
    assert (line._n_free, line._n_waiting, line._n_bytes) == (1, 0, 0)


def test_a_line_is_bounded_and_a_client_fills_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_line, "WAITING_MAX", 4)
    line = FairLine(1)
    line.enter("a", 1)
    line.enter("a", 1)
    with pytest.raises(OverloadedError, match="try again"):
        line.enter("a", 1)
    line.enter("b", 1)
    line.enter("c", 1)
    with pytest.raises(OverloadedError):
        line.enter("d", 1)


def test_a_burst_of_one_client_is_taken() -> None:
    """All streams of a large server may begin at once, behind one gateway."""
    line = FairLine(2)
    for _ in range(1_000):
        line.enter("gateway", 500)


def test_the_bodies_in_line_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_line, "WAITING_BYTES_MAX", 100)
    line = FairLine(1)
    line.enter("a", 80)  # alone it may be larger than half
    with pytest.raises(OverloadedError):
        line.enter("a", 5)
    with pytest.raises(OverloadedError):
        line.enter("b", 21)
    ticket: Ticket = line.enter("b", 20)
    line.leave(ticket)
    line.enter("c", 20)
