"""Which stages hold layers as stages come, go, are drained and stay away, decision by decision."""

from __future__ import annotations

import pytest

from relayline.coordinator.engine.pool import RETRY_FIRST_S, STEADY_S, Pool

S = 1_000_000_000
STEADY = round(STEADY_S * S)
N_LAYERS = 8
ABC = (0, 1, 2)


def pool(*, n_spares: int = 0, takeover_s: int = 60) -> Pool:
    """Stages a, b and c, then spares, all of them here since 0."""
    made = Pool(["a", "b", "c", "s", "t"][: 3 + n_spares], range(3, 3 + n_spares), takeover_s * S)
    for index in range(3 + n_spares):
        made.came(index, 0)
    return made


def test_nothing_changes_while_all_stages_are_here() -> None:
    assert pool().wanted(ABC, N_LAYERS, 999 * S) == ()
    assert pool(n_spares=2).wanted(ABC, N_LAYERS, 999 * S) == (), "spares stand by"


def test_a_spare_takes_the_place_of_a_drained_one() -> None:
    one = pool(n_spares=1)
    one.drain(1)
    assert one.wanted(ABC, N_LAYERS, S) == (0, 3, 2)
    one.drain(1, is_drained=False)
    assert one.wanted((0, 3, 2), N_LAYERS, 999 * S) == (), (
        "it is a spare now: the intended number of stages holds layers"
    )


def test_without_a_spare_the_others_share_and_it_gets_its_part_again() -> None:
    one = pool()
    one.drain(1)
    assert one.wanted(ABC, N_LAYERS, S) == (0, 2)
    assert one.wanted((0, 2), N_LAYERS, 999 * S) == ()
    one.drain(1, is_drained=False)
    assert one.wanted((0, 2), N_LAYERS, 999 * S) == ABC, "in its old place in the line of layers"


def test_an_absent_stage_keeps_its_layers_until_the_bound() -> None:
    one = pool(n_spares=1)
    one.left(1, 10 * S)
    assert one.takeover_in_ns(1, 30 * S) == 40 * S
    assert one.wanted(ABC, N_LAYERS, 70 * S - 1) == ()
    assert one.freed(ABC, 70 * S) == [1]
    assert one.wanted(ABC, N_LAYERS, 70 * S) == (0, 3, 2)
    one.came(1, 80 * S)
    assert one.takeover_in_ns(1, 90 * S) is None


def test_without_a_bound_nobody_takes_over() -> None:
    one = pool(n_spares=1, takeover_s=0)
    one.left(1, 0)
    assert one.wanted(ABC, N_LAYERS, 10_000 * S) == ()


def test_a_stage_that_never_joined_is_waited_for() -> None:
    one = Pool(["a", "b", "s"], [2], 60 * S)
    one.came(0, 0)
    one.came(2, 0)
    assert one.wanted((0, 1), N_LAYERS, 999 * S) == ()


def test_while_another_is_away_nothing_can_be_done() -> None:
    one = pool(n_spares=1)
    one.left(1, 0)
    one.left(2, 50 * S)
    assert one.wanted(ABC, N_LAYERS, 60 * S) == (), "c is still waited for"
    assert one.wanted(ABC, N_LAYERS, 110 * S) == (0, 3), "the spare for one of them, and the rest is shared"


def test_one_more_is_offered_layers_once_it_is_steady() -> None:
    one = pool()
    one.add("d")
    assert one.wanted(ABC, N_LAYERS, S) == ()
    one.came(3, 10 * S)
    assert one.wanted(ABC, N_LAYERS, 10 * S + STEADY - 1) == ()
    assert one.wanted(ABC, N_LAYERS, 10 * S + STEADY) == (0, 1, 2, 3)
    assert one.wanted(ABC, 3, 999 * S) == (), "a model of three layers has no fourth part"


def test_one_more_spare_stands_by_until_a_place_is_free() -> None:
    one = pool()
    one.add("d", is_spare=True)
    one.came(3, 10 * S)
    assert one.wanted(ABC, N_LAYERS, 99 * S) == (), "it was never meant to have a share"
    one.drain(1)
    assert one.wanted(ABC, N_LAYERS, 99 * S) == (0, 3, 2)


def test_the_last_one_cannot_be_freed() -> None:
    one = pool()
    for index in ABC:
        one.drain(index)
    assert one.wanted(ABC, N_LAYERS, S) == ()


@pytest.mark.parametrize("event", ["came", "drain"])
def test_a_failed_change_is_retried_later_or_when_something_changes(event: str) -> None:
    one = pool(n_spares=2)
    one.drain(1)
    one.failed(0)
    assert one.wanted(ABC, N_LAYERS, round(RETRY_FIRST_S * S) - 1) == ()
    assert one.wanted(ABC, N_LAYERS, round(RETRY_FIRST_S * S)) == (0, 3, 2)
    one.failed(100 * S)
    assert one.wanted(ABC, N_LAYERS, (100 + round(RETRY_FIRST_S)) * S) == (), "twice as long"
    assert one.wanted(ABC, N_LAYERS, (100 + 2 * round(RETRY_FIRST_S)) * S) == (0, 3, 2)
    if event == "came":
        one.came(4, 101 * S)
    else:
        one.drain(3)
    assert one.wanted(ABC, N_LAYERS, 101 * S) != ()


def test_no_spare_takes_the_part_of_one_more_stage_that_is_still_to_come() -> None:
    one = pool(n_spares=1)
    one.add("new")
    assert one.wanted(ABC, N_LAYERS, 999 * S) == (), "it has never been here, and the spare is still free"
    one.came(4, 999 * S)
    assert one.wanted(ABC, N_LAYERS, 999 * S + STEADY - 1) == ()
    assert one.wanted(ABC, N_LAYERS, 999 * S + STEADY) == (0, 1, 2, 4)
    one.left(4, 1_000 * S)
    assert one.wanted(ABC, N_LAYERS, 1_000 * S) == (0, 1, 2, 3), "it was here and is away: the spare has its part"
