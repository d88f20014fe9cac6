"""Checks at the start of the files and directories that a coordinator writes to later: each is written to for a try.

A full disk ends the start of a pipeline. It does not end one that serves: a coordinator that its supervisor starts
again only warns of it (`may_be_full`), and of a disk that the system has made read-only, as after an error.
"""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path

from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.files import try_writing
from relayline.wire.common.own_directory import OWN_DIRECTORY_MODE
from relayline.wire.common.places import expanded
from relayline.wire.common.units import bytes_text
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import KEPT_DIRECTORIES, ServingSettings

log = logging.getLogger("relayline.coordinator")


def check_kept_files(*files: tuple[str, Path | None], may_be_full: bool = False) -> None:
    """Raise UsageError for a file that a coordinator is to write later, and cannot: pairs of a flag and its value.
    StartError where the disk is full.
    """
    for flag, path in files:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no directory {path.parent}")
        if path.is_dir():
            raise UsageError(f"{flag} {path}: it is a directory; name a file")
        _try(path.parent, f"{flag} {path}", may_be_full)  # the writers put a new file in the place of the old one


def check_kept_directories(serving: ServingSettings, *, may_be_full: bool = False) -> None:
    """Make the directories that things are to be kept in. Raises UsageError for one that is none, that cannot be
    written, or that two kinds of things are to be kept in; StartError where the disk is full.
    """
    flag_of: dict[Path, str] = {}
    for name in KEPT_DIRECTORIES:
        if directory := getattr(serving, name):
            flag, path = entry_of(ServingSettings, name).flag, expanded(directory).resolve()
            if path.exists() and not path.is_dir():
                raise UsageError(f"{flag} {directory}: is not a directory")
            if path in flag_of:
                raise UsageError(f"{flag_of[path]} and {flag} are the same directory, {path}; give each its own")
            flag_of[path] = flag
    for path, flag in flag_of.items():
        _try(path, f"{flag} {path}", may_be_full)
    if serving.batch_dir and not may_be_full:
        _warn_of_little_room(serving)


def _try(directory: Path, what: str, may_be_full: bool) -> None:
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True, mode=OWN_DIRECTORY_MODE)
        try_writing(directory)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if may_be_full and (is_full or error.errno in (errno.EROFS, errno.EIO)):
            until = "some is free" if is_full else "it can be written again"
            log.warning("%s: %s; what is new there is lost until %s", what, error.strerror, until)
            return
        if is_full:
            raise StartError(f"{what}: {error.strerror}; free some there, or name another place") from None
        raise UsageError(f"{what}: cannot be written: {error.strerror}") from None


def _warn_of_little_room(serving: ServingSettings) -> None:
    """Warn where not even one file of requests has room."""
    free_bytes = shutil.disk_usage(expanded(serving.batch_dir)).free
    if free_bytes < min(serving.batch_file_bytes, serving.batch_disk_bytes):
        file_flag = entry_of(ServingSettings, "batch_file_bytes").flag
        log.warning(
            "%s %s has %s free, less than one file of requests may have (%s, %s)",
            entry_of(ServingSettings, "batch_dir").flag, serving.batch_dir, bytes_text(free_bytes),
            bytes_text(serving.batch_file_bytes), file_flag)  # fmt: skip
