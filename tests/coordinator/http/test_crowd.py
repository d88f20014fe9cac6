"""Which connection makes room for a new one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.http.edge.crowd import Crowd, Full
from relayline.wire.links.security import address_group


def crowd_of(*keys: str) -> Crowd[str]:
    """Connections such as "a1", of address "a"."""
    crowd: Crowd[str] = Crowd()
    for key in keys:
        assert crowd.enter(key, key[0], 100, 0) is None
    return crowd


def test_whoever_has_waited_longest_at_the_largest_address_goes() -> None:
    crowd = crowd_of("a1", "b1", "b2", "b3")
    crowd.wait("b1")  # again: it had a request in between
    assert crowd.enter("a2", "a", 4, 0) == "b2"
    assert crowd.enter("a3", "a", 4, 0) == "a1"
    assert len(crowd) == 4


def test_busy_connections_stay_and_count() -> None:
    crowd = crowd_of("a1", "a2")
    crowd.work("a1")
    assert crowd.enter("b1", "b", 2, 0) == "a2"
    crowd.work("b1")
    assert crowd.enter("c1", "c", 2, 0) == Full(2, of_address=False)
    crowd.wait("a1")
    assert crowd.enter("c1", "c", 2, 0) == "a1"


def test_an_address_has_its_own_bound() -> None:
    crowd = crowd_of("a1", "a2", "b1")
    assert crowd.enter("a3", "a", 100, 2) == "a1"
    crowd.work("a2")
    crowd.work("a3")
    assert crowd.enter("a4", "a", 100, 2) == Full(2, of_address=True)
    assert crowd.enter("b2", "b", 100, 2) is None
    assert crowd.enter("a4", "a", 100, 0) is None, "0 is no bound"


def test_one_that_has_left_is_forgotten() -> None:
    crowd = crowd_of("a1")
    crowd.leave("a1")
    crowd.leave("a1")
    crowd.wait("a1")
    crowd.work("a1")
    assert len(crowd) == 0
    assert crowd.enter("a2", "a", 1, 1) is None


@given(st.lists(st.tuples(st.sampled_from("ewbl"), st.integers(0, 9), st.sampled_from("xyz")), max_size=60))
def test_bounds_hold_whatever_happens(steps: list[tuple[str, int, str]]) -> None:
    crowd: Crowd[int] = Crowd()
    address_of: dict[int, str] = {}
    busy: set[int] = set()
    for what, key, address in steps:
        if what == "e" and key not in address_of:
            found = crowd.enter(key, address, 5, 3)
            if isinstance(found, Full):
                mates = {k for k, where in address_of.items() if where == address or not found.of_address}
                assert mates <= busy
                continue
            if found is not None:
                assert found not in busy
                del address_of[found]
            address_of[key] = address
            busy.discard(key)
        elif what == "w":
            crowd.wait(key)
            busy.discard(key)
        elif what == "b" and key in address_of:
            crowd.work(key)
            busy.add(key)
        elif what == "l":
            crowd.leave(key)
            address_of.pop(key, None)
        assert len(crowd) == len(address_of) <= 5
        assert all(list(address_of.values()).count(each) <= 3 for each in "xyz")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2:3::4", "2001:db8:1:2:ffff::", True),
        ("2001:db8:1:2::", "2001:db8:1:3::", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::1", "::2", False),
        ("", "", True),
    ],
)
def test_addresses_of_one_client_are_grouped(one: str, other: str, same: bool) -> None:
    assert (address_group(one) == address_group(other)) == same
