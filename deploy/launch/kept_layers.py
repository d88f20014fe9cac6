"""The file in which a coordinator keeps moved layers, so that they survive its restart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.deploy.launch.splits import split_for
from relayline.wire.common.errors import RelaylineError

log = logging.getLogger("relayline.coordinator")

Cuts = tuple[int, ...]


class KeptLayers(msgspec.Struct, frozen=True):
    """The whole of the file."""

    base: str
    """The split (pipeline id) that the coordinator was started with; with another one the file does not apply."""
    cuts: Cuts
    """The first layer of each stage but the first, as the stages have them since."""


def keeper(path: Path | None, base: Path) -> Callable[[Cuts], None] | None:
    """Return the file's record of moved layers, None without one. `base`: the split that the coordinator was started
    with.
    """
    if path is None:
        return None
    base_id = load_pipeline(base, stages_here=False).pipeline_id

    def keep(cuts: Cuts) -> None:
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(KeptLayers(base_id, cuts)))
            partial.replace(path)
        except OSError as error:
            log.warning("the moved layers are not kept: %s: %s; a restart goes back to those of before", path, error)

    return keep


def kept_cuts(path: Path | None, base: Path) -> Cuts:
    """Return the cuts that the file keeps for this split; () for none. A file that makes no sense is none."""
    if path is None:
        return ()
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptLayers)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s holds no moved layers: %s", path, error)
        return ()
    return kept.cuts if kept.base == load_pipeline(base, stages_here=False).pipeline_id else ()


def kept_split(path: Path | None, base: Path, model: Path | None) -> Path:
    """Return the split to serve: that of the kept layers, made again if it is gone, else `base`."""
    cuts = kept_cuts(path, base)
    if not cuts or model is None:
        return base
    try:
        directory = split_for(model, None, cuts, None)
    except RelaylineError as error:
        log.warning("the moved layers %s cannot be served again: %s", ",".join(map(str, cuts)), error.message)
        return base
    log.info("going on with moved layers", extra={"fields": {"cuts": ",".join(map(str, cuts))}})
    return directory
