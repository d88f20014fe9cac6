"""The price of restores from the times of pieces: what a token takes that is put back, not what stores take."""

from __future__ import annotations

import random

import pytest

from relayline.stage.engine.piece_price import PiecePrice

OUT_NS, BACK_NS = 900, 5_700  # of one token, as measured with small rows in lanes of 16,384 tokens


def test_stores_do_not_make_restores_look_cheap() -> None:
    price = PiecePrice()
    price.taken_out(10, 10 * OUT_NS)
    assert price.token_ns == OUT_NS, "the only thing that is known"
    for _ in range(3):
        price.put_back(10, 10 * BACK_NS)
    for _ in range(100):
        price.taken_out(10, 10 * OUT_NS)
    assert price.token_ns == BACK_NS


def test_quick_pieces_among_others_do_not_set_the_price() -> None:
    """With averages that fall faster than they rise, the quickest of many did."""
    price, noise = PiecePrice(), random.Random(1)
    for _ in range(300):
        price.put_back(1, round(BACK_NS * noise.choice((0.5, 1.0, 1.0, 1.5))))
    assert price.token_ns == pytest.approx(BACK_NS, rel=0.5)
    assert price.token_ns > 0.75 * BACK_NS


def test_a_piece_that_had_to_wait_does_not_price_restores_for_good() -> None:
    """With such a price nothing would be brought back any more, and so the price never be measured again."""
    price = PiecePrice()
    price.put_back(1, 10**12)
    assert price.token_ns == 10**12
    price.taken_out(1, OUT_NS)
    assert price.token_ns == 8 * OUT_NS, "a store shows that it is too high"
    for _ in range(2):
        price.put_back(1, BACK_NS)
    assert price.token_ns == BACK_NS
    price.put_back(1, 10**12)
    price.taken_out(1, 10**12)
    assert price.token_ns < 2 * BACK_NS, "one of a few may wait"
