"""The order in which a stage filters tokens and applies the temperature, as one number. 0 is the usual order. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

TEMPERATURE = "temperature"
USUAL = ("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", TEMPERATURE)  # llama.cpp's names and default
N_ORDERS = math.factorial(len(USUAL))


def number_of(order: Sequence[str]) -> int:
    """Return the number of an order, from 0 to N_ORDERS - 1. What it leaves out comes last, in the usual order.

    Raises ValueError for another name, or for one that comes twice.
    """
    left, number = list(USUAL), 0
    for name in (*order, *(each for each in USUAL if each not in order)):
        at = left.index(name)
        number = number * len(left) + at
        del left[at]
    return number


def order_of(number: int) -> tuple[str, ...]:
    """Return the order that has this number."""
    places: list[int] = []
    for size in range(1, len(USUAL) + 1):
        number, place = divmod(number, size)
        places.append(place)
    left = list(USUAL)
    return tuple(left.pop(place) for place in reversed(places))
