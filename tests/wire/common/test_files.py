"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.wire.common import files
from relayline.wire.common.files import write_file


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
