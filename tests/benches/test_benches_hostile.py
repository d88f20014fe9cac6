"""The bench of hostile requests: its own parts, without a server."""

from __future__ import annotations

import json
import os

from benches.hostile import MIB, Row, bodies, family_of, missed, percentile, resident_bytes

SMALL = [body for body in bodies() if body.name in ("honest", "regex dots", "schema deep", "grammar ambiguous")]


def test_bodies_have_unique_names_and_small_ones_are_json() -> None:
    named = [body.name for body in bodies()]
    assert len(set(named)) == len(named)
    assert len(SMALL) == 4
    for body in SMALL:
        assert json.loads(body.make())["max_tokens"] >= 1


def test_a_row_is_held_against_the_quiet_one() -> None:
    quiet = Row("(quiet)", gap_p99_s=0.05, before_bytes=100 * MIB)
    good = Row("good", silence_s=0.149, live_p99_s=0.05, peak_bytes=356 * MIB)
    bad = Row("bad", silence_s=0.151, live_p99_s=0.051, peak_bytes=357 * MIB)
    assert missed(good, quiet) == []
    assert missed(bad, quiet) == ["silence", "/live", "memory"]
    assert missed(Row("short", silence_s=0.099), Row("(quiet)", gap_p99_s=0.001)) == [], (
        "a stutter of 100 ms does not count"
    )


def test_percentiles_and_memory() -> None:
    assert percentile([], 0.99) == 0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(100))), 0.99) == 99
    own = os.getpid()
    assert own in family_of(os.getppid())
    assert resident_bytes([own]) > MIB
