"""Splits in the cache: one directory for each model, by its content, and way of cutting it.

Splits that a user asked for stay until the user removes them. Those that coordinators made to move layers go as soon as
layers of that model move again and no process uses them, so that moves do not fill a disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from relayline.coordinator.model.content_key import content_key
from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.models.progress import error_console, progress_bar, shows_bars
from relayline.deploy.models.trial import try_artifacts
from relayline.wire.common.errors import UsageError
from relayline.wire.common.logs import PRINTED
from relayline.wire.common.places import cache_dir, moving_cache
from relayline.wire.common.texts import not_text
from relayline.wire.common.use import ASKED_FOR_S, is_file_used, is_free

log = logging.getLogger("relayline.up")

FOR_MOVE = "for-move"  # a file of splits that were made to move layers
_KEY_DIGITS = 24  # of the model's content key


def splits_dir() -> Path:
    """Return where the cache keeps splits."""
    return cache_dir() / "splits"


def split_place(model: Path, n_stages: int | None, cuts: tuple[int, ...] | None) -> Path:
    """Return where the cache keeps a model's split: by its cuts, however they were chosen.

    Raises ModelFileError, and UsageError for a cache whose name no other process can be told.
    """
    if problem := not_text(cache_dir().absolute()):
        raise UsageError(f"{cache_dir()}: {problem}{moving_cache(cache_dir())}")
    if not cuts and n_stages and n_stages > 1:
        facts = inspect_model(model)
        cuts = balanced_cuts(facts, n_stages) if facts.supported else None
    shape = "cuts-" + "-".join(map(str, cuts)) if cuts else f"{n_stages}-stages"
    return splits_dir() / f"{content_key(model)[:_KEY_DIGITS]}-{shape}"


def note_for_move(place: Path) -> None:
    """Note that layers are to move to a split, and, where there is none yet, that it is made for this."""
    with contextlib.suppress(OSError):  # splitting says what is wrong there
        if not place.exists():
            place.mkdir(parents=True)
            (place / FOR_MOVE).touch()
        os.utime(place)


def remove_replaced(place: Path) -> None:
    """Remove the splits from which layers have moved away. The one at `place` is wanted next, and was just noted.

    These are splits of the same model that were made to move layers, and that no process uses. One that was asked for
    a moment before stays too: stages may be about to use it. Blocks. An error is logged.
    """
    for mark in splits_dir().glob(f"{place.name[:_KEY_DIGITS]}-*/{FOR_MOVE}"):
        split = mark.parent
        try:
            age_s = place.stat().st_mtime - split.stat().st_mtime  # by the file system's clock
            is_needed = is_file_used(split) or not is_free(split)  # another coordinator makes it, or somebody has it
            if split == place or age_s < ASKED_FOR_S or is_needed:
                continue
            shutil.rmtree(split)
        except OSError as error:
            log.warning("%s: a split that is no longer used cannot be removed: %s", split, error.strerror or error)
        else:
            log.info("removed a split from which layers have moved away", extra={"fields": {"path": split}})


def split_for(model: Path, n_stages: int | None, cuts: tuple[int, ...] | None, split_dir: Path | None) -> Path:
    """Split the model into the cache, under its content key (or into split_dir); does nothing when that is done.

    Raises UsageError, and the errors of `split_model`.
    """
    if cuts is not None and n_stages is not None:
        raise UsageError("give either --stages or --cuts, not both")
    if cuts is None:
        n_stages = n_stages or 2
    if split_dir is None:
        split_dir = split_place(model, n_stages, cuts)
    seen = PRINTED if shows_bars(error_console()) else {}  # the bar says it there, and a line would break into it
    with progress_bar(f"splitting {model.name}") as (update, was_used):

        def tell(done_bytes: int, total_bytes: int) -> None:
            if not was_used:
                log.info("splitting %s", model.name, extra=seen | {"fields": {"bytes": total_bytes, "into": split_dir}})
            update(done_bytes, total_bytes)

        split_model(model, split_dir, n_stages=n_stages, cuts=cuts, progress=tell, trial=try_artifacts)
    return split_dir
