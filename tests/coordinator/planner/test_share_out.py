"""Which stages take over a freed stage's layers: by speed, within their memory, and with as few moves as possible."""

from __future__ import annotations

import pytest

from relayline.coordinator.planner.share_out import Holder, NoRoomError, share_out
from relayline.wire.common.units import GIB

N = 12


def need(start: int, end: int) -> int:
    """A GiB for each layer."""
    return (end - start) * GIB


def any_cut(_start: int, _end: int) -> bool:
    return True


def test_a_spare_takes_exactly_the_layers_of_another() -> None:
    holders = [Holder("a", held=(0, 7)), Holder("s"), Holder("c", held=(8, 12))]
    assert share_out(holders, N, need, any_cut, same=(7, 8)) == (7, 8), "uneven as it is, no other stage moves anything"


def test_a_spare_with_too_little_room_gets_the_layers_that_fit() -> None:
    holders = [Holder("a", 1.0, 20 * GIB, (0, 4)), Holder("s", 1.0, 2 * GIB), Holder("c", 1.0, 20 * GIB, (8, 12))]
    first, second = share_out(holders, N, need, any_cut, same=(4, 8))
    assert second - first == 2


def test_the_faster_gets_more() -> None:
    holders = [Holder("slow", 3.0, None, (0, 4)), Holder("fast", 1.0, None, (4, 8))]
    assert share_out(holders, N, need, any_cut) == (3,)


def test_a_host_that_was_never_measured_counts_as_the_others() -> None:
    assert share_out([Holder("a", 2.0), Holder("new"), Holder("b", 2.0)], N, need, any_cut) == (4, 8)


def test_of_equal_ways_the_one_that_moves_least_is_taken() -> None:
    holders = [Holder("a", held=(0, 6)), Holder("b", held=(6, 9))]
    assert share_out(holders, 9, need, any_cut) in ((4,), (5,))
    assert share_out(holders, 9, need, any_cut) == (5,)


def test_a_slow_host_may_hold_a_single_layer() -> None:
    holders = [Holder("slow", 5.0), Holder("fast", 1.0), Holder("slow too", 5.0)]
    assert share_out(holders, 7, need, any_cut) == (1, 6)
    assert share_out(holders, 3, need, any_cut) == (1, 2)


def test_only_cuts_that_the_model_allows() -> None:
    assert share_out([Holder("a"), Holder("b")], N, need, lambda start, end: start % 4 == 0 and end % 4 == 0) in (
        (4,),
        (8,),
    )
    with pytest.raises(NoRoomError, match="the model's 12 layers cannot be cut for 2 stages"):
        share_out([Holder("a"), Holder("b")], N, need, lambda start, end: end - start == 12)


def test_layers_that_a_stage_holds_need_no_more_room() -> None:
    holders = [Holder("a", 1.0, 0, (0, 6)), Holder("b", 1.0, 6 * GIB)]
    assert share_out(holders, N, need, any_cut) == (6,)


def test_missing_room_is_named_by_stage_in_one_line() -> None:
    holders = [Holder("a", 1.0, 5 * GIB, (0, 4)), Holder("b", 1.0, 3 * GIB, (4, 8))]
    with pytest.raises(NoRoomError) as found:
        share_out(holders, N, need, any_cut)
    assert found.value.message == (
        "no room for all layers: a would need 6.0 GiB for layers 0-5 and has 5.0 GiB free; "
        "b would need 6.0 GiB for layers 6-11 and has 3.0 GiB free"
    )
    with pytest.raises(NoRoomError, match="and has 0 B free"):
        share_out([Holder("a", 1.0, -GIB)], N, need, any_cut)
    with pytest.raises(NoRoomError, match="no stage is left to hold the layers"):
        share_out([], N, need, any_cut)


def test_nobody_gets_more_than_is_known_to_fit_where_that_is_asked() -> None:
    with pytest.raises(NoRoomError, match="an unknown amount"):
        share_out([Holder("a", held=(0, 6))], N, need, any_cut, must_be_known=True)
    assert share_out([Holder("a", held=(0, 6))], N, need, any_cut) == ()
