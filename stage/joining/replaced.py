"""Removes slices from which layers have moved away, so that moves do not fill a host's disk.

A host fetches a slice for each move. The one that it serves stays, and so does the one before, which an opposite move
needs again; earlier ones go. A slice that was fetched when this stage joined stays until the user removes it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from relayline.stage.engine.artifact import PIPELINE_FILE
from relayline.stage.joining.artifact_store import FOR_MOVE, Slot, cached, remove
from relayline.wire.common.use import ASKED_FOR_S, is_free

log = logging.getLogger("relayline.stage")


class _Source(msgspec.Struct):
    sha256: str


class _Description(msgspec.Struct):
    """The part of pipeline.json that says which model was split."""

    source: _Source


def remove_replaced(slot: Slot) -> None:
    """Remove slices that nobody uses, of the model of `slot`, that earlier moves needed. Blocks. Errors are logged.

    The slot itself stays, and so does a slice that another process asked for a moment before the slot.
    """
    asked_s = _asked_s(slot)
    model = _model(slot.directory)
    for entry in cached(slot.directory.parent):
        directory = entry.directory
        is_old = (directory / FOR_MOVE).exists() and asked_s - entry.used_s >= ASKED_FOR_S
        if directory == slot.directory or not is_old or _model(directory) != model or not is_free(directory):
            continue
        try:
            is_removed = remove(entry)
        except OSError as error:
            log.warning("%s: a slice that is no longer used cannot be removed: %s", directory, error.strerror or error)
            continue
        if is_removed:
            log.info("removed a slice from which layers have moved away", extra={"fields": {"path": directory}})


def _asked_s(slot: Slot) -> float:
    """Return when a slot was last asked for, by the file system's clock; long ago where that is not told."""
    try:
        return (slot.directory / PIPELINE_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _model(directory: Path) -> str | None:
    """Return which model the slice in a directory is of; None where that is not told."""
    try:
        return msgspec.json.decode((directory / PIPELINE_FILE).read_bytes(), type=_Description).source.sha256
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
