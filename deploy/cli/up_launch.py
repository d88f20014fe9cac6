"""The launch that the flags of `relayline up` describe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from relayline.deploy.cli.options import check_draft
from relayline.deploy.cli.stage_flags import stage_flags_of, with_stage_flags
from relayline.deploy.cli.up_changes import changes_of, http_of
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.companions import with_companions
from relayline.deploy.launch.context import with_usual_context
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import named, override
from relayline.deploy.launch.run import Launch
from relayline.deploy.launch.target import manifest_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.manifest.smallest import smallest_manifest, with_stages
from relayline.deploy.models.model_source import is_on_hub, resolve_model


def launch_of(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> Launch:
    """Return the launch: the named manifest, or a model's smallest one, with the flags applied."""
    is_flag = given["target"] is None and given["model"] is not None
    target = given["model"] if is_flag else given["target"]
    path = None if is_flag else manifest_of(target, Path.cwd())
    changes = changes_of(changed)
    if path is not None:
        # Of a pipeline behind a gateway: its hosts are looked at like a manifest's own.
        change = json.loads(given["change"]) if given["change"] else {}
        manifest, source = at_home(with_usual_lanes(override(load_manifest(path), change))), path.absolute()
    else:
        if is_on_hub(str(target)):
            # Everything is looked at before a model is loaded from the hub, which may take an hour.
            expected = override(_placeholder(given["name"]), changes | http_of(given))
            without_cuts = dataclasses.replace(stage_flags_of(given, changed), cuts=None)  # they need the model
            expected = with_stages(expected, without_cuts, 0)
            check_before_work(expected, may_run=True)
            check_draft(expected.serving, expected.engine.policy)
        model = resolve_model(str(target))
        manifest, source = with_usual_lanes(smallest_manifest(model)), model.absolute()
        changes |= http_of(given)
    manifest = override(manifest, changes)
    if given["name"]:
        manifest = named(manifest, given["name"], "--name")
    manifest = with_companions(manifest, "" if path is not None else str(target))
    check_draft(manifest.serving, manifest.engine.policy)
    opened = () if given["change"] else open_context(manifest.spec)  # pipelines behind one gateway share their hosts
    manifest = with_usual_context(with_stage_flags(manifest, given, changed), opened, given["state_dir"])
    is_again = given["report_fd"] is not None
    return Launch(manifest, source, log_flags, given["split_dir"], given["measure"], is_again)


def _placeholder(name: str) -> Manifest:
    """Return a manifest of a model that is not here yet. Raises UsageError for an invalid name."""
    manifest = smallest_manifest(Path("model.gguf"))
    return named(manifest, name, "--name") if name else manifest
