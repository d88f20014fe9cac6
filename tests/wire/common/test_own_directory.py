"""Goal: one process at a time has a directory, and can read it where the system has made its disk read-only."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from relayline.wire.common.errors import UsageError
from relayline.wire.common.own_directory import OwnDirectory
from tests.support.read_only_disk import make_read_only


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    own = OwnDirectory(tmp_path / "kept", ("files",), "files")
    with pytest.raises(UsageError, match="holds the files of another coordinator"):
        OwnDirectory(tmp_path / "kept", ("files",), "files")
    own.close()
    OwnDirectory(tmp_path / "kept", ("files",), "files").close()


def test_on_a_read_only_disk_it_can_be_had_and_locked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OwnDirectory(tmp_path, ("files",), "files").close()
    make_read_only(monkeypatch)
    own = OwnDirectory(tmp_path, ("files",), "files")
    with pytest.raises(UsageError, match="another coordinator"):
        OwnDirectory(tmp_path, ("files",), "files")
    own.close()

    def writers_only(_handle: object, _kind: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", writers_only)
    OwnDirectory(tmp_path, ("files",), "files").close()


def test_a_new_one_on_a_read_only_disk_and_one_without_permission_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda _path, _mode: False)
        with pytest.raises(UsageError, match="cannot hold files: Permission denied"):
            OwnDirectory(tmp_path, ("files",), "files")
    make_read_only(monkeypatch)
    with pytest.raises(UsageError, match="cannot hold files: Read-only file system"):
        OwnDirectory(tmp_path, ("files",), "files")
