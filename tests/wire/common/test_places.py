"""Where a user's files are kept, and what an error about the cache says of moving it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.wire.common.places import moving_cache


def test_only_an_error_about_the_cache_says_how_to_move_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = "; XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere"
    assert moving_cache(tmp_path / "cache" / "relayline" / "splits" / "a") == text
    assert moving_cache(Path("cache/relayline/splits")) == text
    assert moving_cache(tmp_path / "out") == ""
