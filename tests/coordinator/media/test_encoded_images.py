"""Encoded images: numbering of their rows, their places in a prompt, and the cache."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from relayline.coordinator.media.encoded import LAYOUTS_MAX, EncodedMedia, n_tokens_of, put_in, row_numbers
from relayline.coordinator.sessions.generation import ROW_TOKEN_MIN
from relayline.wire.common.errors import OverloadedError


def rows(n_rows: int, value: float = 1.0) -> np.ndarray:
    return np.full((n_rows, 4), value, np.float32)


def test_numbers_come_from_the_image_alone_and_no_token_is_among_them() -> None:
    first, again, other = row_numbers(b"a", 600), row_numbers(b"a", 600), row_numbers(b"b", 600)
    assert first == again
    assert not {*first} & {*other}
    assert min(first) >= ROW_TOKEN_MIN
    assert max(first) < 1 << 31, "histories are stored in 32 bits"


def test_images_stand_where_their_marks_stood() -> None:
    images = EncodedMedia()
    one = images.put(b"1", [[7, 8], 2, [9], 1], np.arange(12, dtype=np.float32).reshape(3, 4))
    two = images.put(b"2", [1], rows(1))
    filled = put_in([5, -2, 6, -1, -2], [one, two])
    n, m = one.numbers, two.numbers
    assert filled.tokens.tolist() == [5, m[0], 6, 7, 8, n[0], n[1], 9, n[2], m[0]]
    assert [(each.start, each.end) for each in filled.images] == [(1, 2), (5, 7), (8, 9), (9, 10)]
    assert filled.images[1].rows.tolist() == one.rows[:2].tolist()
    assert n_tokens_of(one.segments) == 6


def test_the_latest_are_kept_and_rows_that_requests_hold_are_counted() -> None:
    images = EncodedMedia(kept_bytes=2 * 160, bytes_max=4 * 160)
    made = [images.put(bytes([number]), [10], rows(10)) for number in range(3)]
    assert images.get(b"\x00") is None
    assert images.get(b"\x01") is not None
    held = put_in([-1], made[:1]).images  # as a request holds them: as views
    del made
    gc.collect()
    assert images.bytes_alive == 3 * 160
    images.check_room(160)
    with pytest.raises(OverloadedError):
        images.check_room(161)
    del held
    gc.collect()
    assert images.bytes_alive == 2 * 160


def test_layouts_are_bounded() -> None:
    images = EncodedMedia()
    for number in range(LAYOUTS_MAX + 1):
        images.note(number.to_bytes(2, "big"), [1])
    assert images.layout(b"\x00\x00") is None
    assert images.layout(b"\x00\x01") == [1]
