"""Puts a model's files into a directory of the user's choice, complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath

from relayline.coordinator.model.gguf_file import open_model
from relayline.wire.common.errors import ModelFileError, StartError, UsageError


def placed_before(reference: str, directory: Path) -> Path | None:
    """Return the model of this name in `directory` if all of its files are there and complete; else None.

    Only a reference that ends in the name of a file says which one that is; the hub is not asked.
    """
    path = directory / PurePosixPath(reference.partition("@")[0]).name
    if path.suffix != ".gguf" or not path.is_file():
        return None
    try:
        open_model(path)
    except ModelFileError:
        return None
    return path


def place(path: Path, directory: Path) -> Path:
    """Put a model's files, given by its only or first one, into `directory`; return the first one's new path.

    A file is linked where the file system allows it, else copied. The first one comes last, so that its presence means
    that all are there. Raises ModelFileError for a model that is not complete, StartError if the disk cannot take it.
    """
    files = [file.path for file in open_model(path).files]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in reversed(files):
            _put(file, directory / file.name)
    except OSError as error:
        remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another --to"
        raise StartError(f"{directory}: cannot hold the model: {error.strerror or error}; {remedy}") from error
    return directory / files[0].name


def check_directory(directory: Path) -> None:
    """Make a directory for a model, before that is downloaded. Raises UsageError where it cannot hold any."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(directory, os.W_OK | os.X_OK) else "no permission to write there"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise UsageError(f"--to {directory}: {reason}; give another directory")


def _put(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        try:
            os.link(source.resolve(), partial)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS):
                raise
            shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
