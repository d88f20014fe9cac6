"""Files and directories on a command line. One that is missing, or of another kind, is refused before any work.

Every path of every command has a type of this file, so that the same mistake has the same line and exit code 2.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import click

from relayline.wire.common.errors import StartError
from relayline.wire.common.files import write_again
from relayline.wire.common.texts import not_text, printable


class NamedPath(click.Path):
    """A path, there or not, of any kind but a pipe, a socket or a device: to wait for one would take for ever.

    click's own checks have other words.
    """

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True, as_text: bool = False) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=None if as_text else Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check one path."""
        text = os.fspath(value)
        if not text:
            self.fail("it is empty", param, ctx)
        if any(ord(char) < ord(" ") or char == "\x7f" for char in text):
            self.fail(f"{printable(text)}: the name has a control character; rename it", param, ctx)
        try:
            problem = self.problem(Path(text))
        except OSError as error:  # the name is too long, or a directory on the way to it cannot be read
            problem = error.strerror or str(error)
        if problem:
            self.fail(f"{text}: {problem}", param, ctx)
        return super().convert(value, param, ctx)

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        mode = _mode_of(path)
        if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return ""
        return "it is neither a file nor a directory"


class Target(NamedPath):
    """A model or a manifest, as text: it may be a name of the hub. A manifest, which is UTF-8, can hold it."""

    def __init__(self) -> None:
        super().__init__(as_text=True)

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        return not_text(path) or super().problem(path)


class PathToRead(NamedPath):
    """A file or a directory to read."""

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        return "no such file" if _mode_of(path) is None else super().problem(path)


class FileToRead(NamedPath):
    """A file to read. One that is read once may be a pipe, as in <(COMMAND) of a shell."""

    def __init__(self, *, may_be_pipe: bool = False) -> None:
        super().__init__(dir_okay=False)
        self.may_be_pipe = may_be_pipe

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        mode = _mode_of(path)
        if mode is None:
            return "no such file"
        if self.may_be_pipe and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            return ""
        return _no_file(mode)


class FileToWrite(NamedPath):
    """A file to write, in a directory that is there. `may_be_stdout`: - stands for it."""

    def __init__(self, *, may_be_stdout: bool = False) -> None:
        super().__init__(dir_okay=False)
        self._may_be_stdout = may_be_stdout

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        if self._may_be_stdout and str(path) == "-":
            return ""
        if (mode := _mode_of(path)) is not None:
            return _no_file(mode)
        return "" if path.parent.is_dir() else f"there is no directory {path.parent}"


class Directory(NamedPath):
    """A directory that is there, or can be made."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        there = next(each for each in (path, *path.absolute().parents) if _mode_of(each) is not None)
        if there.is_dir():
            return ""
        return "it is a file; name a directory" if there == path else f"{there} is a file; name another directory"


class DirectoryToRead(Directory):
    """A directory to read."""

    def problem(self, path: Path) -> str:
        """Return what is wrong with a path; empty for nothing. Raises OSError."""
        return super().problem(path) or ("" if path.is_dir() else "no such directory")


def write_text(path: Path, text: str) -> None:
    """Write a file that a user named: whole or not at all, and through a link where it points. Raises StartError."""
    try:
        write_again(path.resolve(), text.encode(errors="surrogateescape"))  # names of files, as they are on the disk
    except OSError as error:
        raise StartError(f"{path}: {error.strerror or error}") from error


def _no_file(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return "it is a directory; name a file" if stat.S_ISDIR(mode) else "it is not a regular file"


def _mode_of(path: Path) -> int | None:
    """Return the kind of what is at a path, None for nothing. Raises OSError."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
