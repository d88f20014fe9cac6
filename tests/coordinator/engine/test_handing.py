"""Which layers' lanes are handed over from one cut to another, and for how long."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.engine.handing import Handed, handed, time_ns
from relayline.coordinator.joining.hand_over import hand_over_orders
from relayline.wire.common import bounds

NAMES = ("a", "b", "c")
BEFORE = [(0, 0, 3), (1, 3, 6), (2, 6, 8)]
AFTER = [(0, 0, 3), (1, 3, 5), (2, 5, 8)]
ADDRESSES = {0: "a:1", 1: "b:1", 2: "c:1"}


def edges(holders: list[int], cuts: list[int], n_layers: int) -> list[tuple[int, int, int]]:
    return [(at, *edge) for at, edge in zip(holders, itertools.pairwise((0, *cuts, n_layers)), strict=True)]


@given(st.data())
def test_a_stage_takes_exactly_its_layers_in_order_from_the_earlier_holders(data: st.DataObject) -> None:
    n_layers = data.draw(st.integers(2, 12))

    def split() -> list[tuple[int, int, int]]:
        cuts = data.draw(st.lists(st.integers(1, n_layers - 1), unique=True, max_size=5).map(sorted))
        return edges(data.draw(st.permutations(range(8)))[: len(cuts) + 1], cuts, n_layers)

    before, after = split(), split()
    keeps = data.draw(st.lists(st.booleans(), min_size=len(after), max_size=len(after)))
    had = {layer: place for place, start, end in before for layer in range(start, end)}
    found = handed(before, after, keeps)
    for (place, start, end), is_kept in zip(after, keeps, strict=True):
        taken = [(one.giver, layer) for one in found if one.taker == place for layer in range(*one[2:])]
        assert taken == ([] if is_kept else [(had[layer], layer) for layer in range(start, end)])


def test_each_pair_has_its_own_pass_and_a_stage_needs_none_for_itself() -> None:
    found = handed(BEFORE, AFTER, (True, False, False))
    assert found == [Handed(1, 1, 3, 5), Handed(1, 2, 5, 6), Handed(2, 2, 6, 8)]
    orders = hand_over_orders(found, NAMES, ADDRESSES)
    assert sorted(orders) == [1, 2]
    (own,), (others, rest) = orders[1].takes, orders[2].takes
    assert (own.layer_start, own.layer_end, own.address, own.shown_pass) == (3, 5, "", "")
    assert (others.layer_start, others.layer_end, others.address) == (5, 6, "b:1")
    assert (rest.layer_start, rest.layer_end, rest.address) == (6, 8, "")
    (given_,) = orders[1].gives
    assert (given_.layer_start, given_.layer_end, given_.to) == (5, 6, "c")
    assert given_.shown_pass == others.shown_pass
    assert len(others.shown_pass) >= 32
    assert not orders[2].gives
    assert hand_over_orders(found, NAMES, ADDRESSES)[2].takes[0].shown_pass != others.shown_pass


def test_nothing_is_handed_over_unless_all_layers_can_be() -> None:
    found = handed(BEFORE, AFTER, (True, False, False))
    assert hand_over_orders(found, NAMES, {2: "c:1"}) == {}, "one is of a version that gives nothing"
    assert hand_over_orders(found, NAMES, ADDRESSES | {1: ""}) == {}, "one is lost"
    assert hand_over_orders(found, NAMES, {1: "b:1", 2: ""}), "the receiver need not serve yet"
    many = [Handed(0, at, at, at + 1) for at in range(1, bounds.HAND_OVERS_MAX + 2)]
    everybody = dict.fromkeys(range(bounds.HAND_OVERS_MAX + 2), "x:1")
    assert hand_over_orders(many, [str(at) for at in everybody], everybody) == {}


def test_lanes_may_change_hands_for_as_long_as_reading_them_again_takes() -> None:
    assert time_ns([1_000] * 8, lambda n: n * 1e6) == 8_000_000_000
    assert time_ns([], lambda n: n * 1e6) == bounds.HAND_OVER_S_MIN * 1e9
    assert time_ns([30_000] * 8, lambda n: n * 1e6) == bounds.HAND_OVER_S_MAX * 1e9
