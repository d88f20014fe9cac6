"""Bytes for a person."""

import pytest

from relayline.wire.common.units import GIB, MIB, bytes_text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (5 * GIB // 2, "2.5 GiB"),
        (GIB << 11, "2.0 TiB"),
    ],
)
def test_bytes_have_the_largest_unit_of_which_there_is_one(n_bytes: int, text: str):
    assert bytes_text(n_bytes) == text
