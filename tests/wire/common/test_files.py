"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from relayline.wire.common import files
from relayline.wire.common.files import naming, write_again, write_file


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.pem"
    write_file(path, b"old", 0o600)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new", 0o600)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_can_be_made_again_gets_its_directory_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_again(path, b"one")
    write_again(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    with pytest.raises(OSError):
        write_again(blocked, b"one")
    assert sorted(tmp_path.iterdir()) == [blocked, path.parent], "what was written in part is gone"


def test_a_full_disk_is_named_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        write_file(tmp_path / "token", b"x", 0o600)
    assert refused.value.filename == str(tmp_path / "token")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left") as refused, naming(tmp_path / "state"):
        full(0)
    assert refused.value.filename == str(tmp_path / "state")
