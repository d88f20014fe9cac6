"""The file in which a coordinator keeps which stages hold which layers, so that this survives its restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from relayline.coordinator.joining.config import PoolState
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.models.splits import split_for
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.files import write_again

log = logging.getLogger("relayline.coordinator")


class KeptLayers(msgspec.Struct, frozen=True):
    """The whole of the file."""

    base: str
    """The split (pipeline id) that the coordinator was started with; with another one the file does not apply."""
    cuts: tuple[int, ...]
    """The first layer of each stage but the first, as the stages have them since."""
    stages: tuple[str, ...] = ()
    """Those that hold layers, in layer order; empty: all that are no spares."""
    drained: tuple[str, ...] = ()
    """Those that are to hold none."""
    added: tuple[str, ...] = ()
    """Those that came while it served."""
    added_spares: tuple[str, ...] = ()
    """Which of `added` are spares."""


def keeper(path: Path | None, base: Path) -> Callable[[PoolState], None] | None:
    """Return the file's record of the holders and their layers, None without one.

    `base`: the split that the coordinator was started with.
    """
    if path is None:
        return None
    base_id = load_pipeline(base, stages_here=False).pipeline_id

    def keep(state: PoolState) -> None:
        kept = KeptLayers(base_id, state.cuts, state.stages, state.drained, state.added, state.added_spares)
        try:
            write_again(path, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("the moved layers cannot be saved: %s: %s; a restart goes back to the old ones", path, error)

    return keep


def kept_state(path: Path | None, base: Path) -> PoolState | None:
    """Return the state that the file keeps for this split, None for none. A file that makes no sense is none."""
    if path is None:
        return None
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptLayers)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s holds no moved layers: %s", path, error)
        return None
    if kept.base != load_pipeline(base, stages_here=False).pipeline_id:
        log.warning("%s is about another split of the model; its moved layers are not taken up", path)
        return None
    return PoolState(kept.cuts, kept.stages, kept.drained, kept.added, kept.added_spares)


def kept_split(
    path: Path | None, base: Path, model: Path | None, names: Collection[str] = ()
) -> tuple[Path, PoolState | None]:
    """Return the split to serve and its holders: that of the kept layers, made again if it is gone, else `base`.

    `names`: of the stages that there are, where they have names.
    """
    state = kept_state(path, base)
    if state is None or model is None:
        return base, None
    cuts = ",".join(map(str, state.cuts)) or "none"
    if names and (gone := set(state.stages) - {*names, *state.added}):
        log.warning(
            "the moved layers %s cannot be served again: %s is not a stage any more", cuts, ", ".join(sorted(gone))
        )
        return base, None
    if state.cuts == load_pipeline(base, stages_here=False).cuts:
        return base, state
    try:
        directory = split_for(model, None if state.cuts else 1, state.cuts or None, None)
    except RelaylineError as error:
        log.warning("the moved layers %s cannot be served again: %s", cuts, error.message)
        return base, None
    log.info("continuing with the moved layers", extra={"fields": {"cuts": cuts, "stages": ",".join(state.stages)}})
    return directory, state
