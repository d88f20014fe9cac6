"""A disk that the system has made read-only, as after an error: for tests of users who may not mount one."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse every change of a file system by pathlib and os."""
    opened, status_of = io.open, os.statvfs

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def may_read(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return refuse() if set(mode) & set("wax+") else opened(path, mode, *rest, **more)

    def may_only_read(handle: Callable[..., int]) -> Callable[..., int]:
        def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse()
            return handle(path, flags, *rest, **more)

        return open_

    class ReadOnly:
        """What `os.statvfs` says of it."""

        def __init__(self, path: Any) -> None:
            self.f_flag = status_of(path).f_flag | os.ST_RDONLY

    monkeypatch.setattr(io, "open", may_read)
    monkeypatch.setattr(os, "open", may_only_read(os.open))
    monkeypatch.setattr(os, "statvfs", ReadOnly)
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    for name in ("unlink", "truncate", "replace", "rename", "utime", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "touch", refuse)
