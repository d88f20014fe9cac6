"""An order of samplers has one number, and a number one order."""

from __future__ import annotations

import itertools

import pytest

from relayline.wire.common.sampler_order import N_ORDERS, USUAL, number_of, order_of


def test_every_order_has_its_number() -> None:
    numbers = [number_of(order) for order in itertools.permutations(USUAL)]
    assert numbers == [*range(N_ORDERS)]
    assert [order_of(number) for number in numbers] == [*itertools.permutations(USUAL)]


def test_what_is_left_out_comes_last_in_the_usual_order() -> None:
    assert number_of(USUAL) == number_of(()) == 0
    assert order_of(number_of(("xtc", "top_k"))) == (
        "xtc",
        "top_k",
        "top_n_sigma",
        "typ_p",
        "top_p",
        "min_p",
        "temperature",
    )


@pytest.mark.parametrize("order", [("top_k", "top_k"), ("tip_p",)])
def test_other_names_and_doubles_have_none(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=order[0]):
        number_of(order)
