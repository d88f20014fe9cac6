"""Goal: what is remembered in small files has a bound, and what is used stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayline.wire.common import remembered
from relayline.wire.common.remembered import recall, remember


def test_those_used_longest_ago_go_beyond_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "REMEMBERED_MAX", 3)
    place = tmp_path / "curves"
    for number in range(3):
        remember(place / f"{number}.json", b"%d" % number)
        os.utime(place / f"{number}.json", (number, number))
    (place / "measure-abcdefgh").mkdir()
    assert recall(place / "0.json") == b"0", "which uses it"
    remember(place / "3.json", b"3")
    assert sorted(path.name for path in place.iterdir()) == ["0.json", "2.json", "3.json", "measure-abcdefgh"]
    remember(place / "3.json", b"again")
    assert sorted(path.name for path in place.glob("*.json")) == ["0.json", "2.json", "3.json"]
    assert recall(place / "3.json") == b"again"
    with pytest.raises(FileNotFoundError):
        recall(place / "1.json")
