"""The files that relayline keeps on this machine's disk: splits, artifacts that stages fetched, models of the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from relayline.coordinator.model.pipeline_file import PIPELINE_NAME, load_pipeline
from relayline.deploy.launch.control import launched
from relayline.deploy.launch.prepare import find_model
from relayline.deploy.launch.state import StateDir
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.models.hub_files import headers_dir
from relayline.deploy.models.kept_layers import kept_state
from relayline.deploy.models.splits import split_place, splits_dir
from relayline.stage.joining.artifact_store import Cached, cached, remove
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.places import home
from relayline.wire.common.scratch import LOCK
from relayline.wire.common.texts import layer_ranges
from relayline.wire.common.use import is_file_used, is_used

BLOCK_BYTES = 512  # of st_blocks, whatever the file system
IN_USE = "in use"  # why something is not removed
PARTIAL_BLOBS, PARTIAL_HEADERS = "blobs/*.relayline", f"**/.partial-*/{LOCK}"


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One thing that can be removed: it is made, fetched or loaded again when it is needed."""

    kind: str
    name: str
    path: Path
    size_bytes: int
    state: str
    """whole, partial, or why it is not removed."""
    used_s: float
    """When it was last asked for, seconds since 1970."""
    remove: Callable[[], bool]
    """Removes it; False where a process is writing it just now."""


def kept_splits() -> list[Kept]:
    """Return the splits of the cache. Those of pipelines and stages that run here are in use."""
    root = splits_dir()
    in_use = _splits_in_use()
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        description = path / PIPELINE_NAME
        if not path.is_dir():
            continue
        is_whole = description.exists()
        state = IN_USE if path in in_use or is_used(path) else "whole" if is_whole else "partial"
        used_s = (description if is_whole else path).stat().st_mtime
        found.append(Kept("splits", _split_name(path), path, _size_of(path), state, used_s, _remover(path)))
    return found


def _split_name(path: Path) -> str:
    try:
        file = load_pipeline(path)
    except RelaylineError:
        return path.name
    edges = ((stage.layer_start, stage.layer_end) for stage in file.stages)
    return f"{file.model_name}, layers {layer_ranges(edges)}"


def _splits_in_use() -> set[Path]:
    """Return the splits with which the pipelines that run here began, and those to which their layers have moved."""
    found = set()
    for directory, manifest in _running():
        with contextlib.suppress(RelaylineError, OSError):
            model = find_model(manifest)
            cuts = tuple(cut for cut in manifest.fixed_cuts() if cut is not None)
            found.add(base := _place(model, cuts))
            if (moved := kept_state(directory.layers, base)) is not None:
                found.add(_place(model, moved.cuts))
    return found


def _place(model: Path, cuts: tuple[int, ...]) -> Path:
    return split_place(model, None if cuts else 1, cuts or None)


def _running() -> Iterator[tuple[StateDir, Manifest]]:
    """Yield the state and the settled manifest of each pipeline that runs here."""
    for pipeline in launched(None):
        if pipeline.is_running:
            with contextlib.suppress(RelaylineError, OSError):
                yield pipeline.directory, load_manifest(pipeline.directory.manifest)


def kept_artifacts(cache: Path) -> list[Kept]:
    """Return the artifacts that stages of this machine fetched from coordinators into a directory."""
    return [
        Kept("artifacts", entry.file, entry.directory, entry.size_bytes, _artifact_state(entry), entry.used_s,
             functools.partial(remove, entry))
        for entry in cached(cache)
    ]  # fmt: skip


def _artifact_state(entry: Cached) -> str:
    if is_used(entry.directory):
        return IN_USE
    return "whole" if entry.is_whole else "partial"


def hub_cache() -> Path:
    """Return where huggingface_hub keeps its downloads, by its own variables."""
    base = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(base) / "hub")


def kept_downloads() -> list[Kept]:
    """Return the repositories in the hub's cache that hold GGUF files, or bytes that `relayline pull` left."""
    root = hub_cache()
    found = []
    for path in root.glob("models--*") if root.is_dir() else ():
        partial = any(path.glob(PARTIAL_BLOBS))
        if not partial and not any((path / "snapshots").glob("*/**/*.gguf")):
            continue  # of another program
        name = path.name.removeprefix("models--").replace("--", "/", 1)
        state, used_s = "partial" if partial else "whole", max(each.stat().st_mtime for each in (path, path / "blobs"))
        found.append(Kept("downloads", name, path, _size_of(path), state, used_s, _remover(path, PARTIAL_BLOBS)))
    return found + _kept_headers()


def _kept_headers() -> list[Kept]:
    """Return the models of the hub of which only headers are here. A pipeline that runs reads its layers by them."""
    root, found = headers_dir(), []
    in_use = [model for _, manifest in _running() if (model := manifest.model_path) is not None]
    for path in root.iterdir() if root.is_dir() else ():
        name = path.name.replace("--", "/", 1)
        state = IN_USE if any(model.is_relative_to(path) for model in in_use) else "headers"
        used_s, remover = path.stat().st_mtime, _remover(path, PARTIAL_HEADERS)
        found.append(Kept("downloads", name, path, _size_of(path), state, used_s, remover))
    return found


def _remover(path: Path, locked: str = "") -> Callable[[], bool]:
    """Return what removes a directory; `locked`: what in it a process that writes there holds; empty: itself."""

    def remove_it() -> bool:
        if any(map(is_file_used, path.glob(locked) if locked else [path])):
            return False
        shutil.rmtree(path)
        return True

    return remove_it


def _size_of(directory: Path) -> int:
    """Return the bytes of disk that a directory's files take; links count for nothing, and holes neither."""
    found = [path.lstat() for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(min(status.st_size, status.st_blocks * BLOCK_BYTES) for status in found)
