"""The manifest that `relayline plan` plans: of a model alone, of a model on some hosts, or a file's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relayline.deploy.launch.context import with_usual_context
from relayline.deploy.launch.draft_model import shown_draft_model, with_draft_model
from relayline.deploy.launch.gpus import with_usual_gpu
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import override, shown_model
from relayline.deploy.launch.target import manifest_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.manifest.smallest import StageFlags, smallest_manifest, with_hosts, with_stages
from relayline.deploy.models.hub_headers import model_or_headers
from relayline.deploy.models.model_source import is_on_hub, resolve_model
from relayline.wire.common.errors import UsageError

NOTHING: Mapping[str, Any] = MappingProxyType({})


@contextlib.contextmanager
def shown_target(target: str, *, needs_weights: bool) -> Iterator[tuple[str, str]]:
    """Give what to plan, and a note on it or an empty text.

    A MODEL of the hub that is not here is planned by its headers, unless something needs its weights. They are there
    until the end of the with block. Raises as `resolve_model`.
    """
    if needs_weights or manifest_of(target, Path.cwd()) is not None or not is_on_hub(target):
        yield target, ""
        return
    with model_or_headers(target) as shown:
        yield str(shown.path), shown.note


def planned_manifest(
    target: str,
    hosts: Sequence[str],
    changes: Mapping[str, Any] = NOTHING,
    with_draft: Callable[[Manifest], Manifest] = with_draft_model,
) -> Manifest:
    """Return the manifest to plan, with this machine's stages as `localhost`: what `up` would launch.

    `changes`: values by their places in the manifest. `with_draft` finds its draft model. Raises UsageError,
    and for files of the hub what loading them raises.
    """
    path = manifest_of(target, Path.cwd())
    if path is None:
        manifest = with_draft(override(with_usual_lanes(smallest_manifest(resolve_model(target))), dict(changes)))
        opened = open_context(manifest.spec)
        if hosts:
            return with_usual_context(at_home(with_hosts(manifest, hosts)), opened)
        flags = with_usual_gpu(manifest, StageFlags())
        return with_usual_context(with_stages(manifest, flags, 0) if flags.is_set else manifest, opened)
    if hosts:
        raise UsageError("--hosts belongs to a MODEL; a manifest lists its hosts itself")
    manifest = with_draft(override(at_home(with_usual_lanes(load_manifest(path))), dict(changes)))
    return with_usual_context(manifest, open_context(manifest.spec))


@contextlib.contextmanager
def shown_manifest(manifest: Manifest, *, needs_weights: bool) -> Iterator[tuple[Manifest, Path, list[str]]]:
    """Give a manifest with the paths of its model and draft model, or of their headers; the model's path, and notes.

    Headers are there until the end of the with block. Raises as `shown_model` and `shown_draft_model`.
    """
    notes: list[str] = []
    with (
        shown_model(manifest, needs_weights=needs_weights) as shown,
        shown_draft_model(manifest, notes.append) as drafted,
    ):
        yield _with_header(drafted, shown.path), shown.path, [shown.note, *notes]


def _with_header(manifest: Manifest, model: Path) -> Manifest:
    """Return a manifest of a model on the hub with the path of its header, and the lanes and context that `up` would
    choose for it. One with a path stays as it is.
    """
    if manifest.model_path is not None:
        return manifest
    opened = open_context(manifest.spec)
    return with_usual_context(with_usual_lanes(override(manifest, {"model": {"path": str(model)}})), opened)
