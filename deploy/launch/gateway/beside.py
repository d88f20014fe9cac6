"""The pipelines beside one behind a gateway, which may share its machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from relayline.deploy.launch.context import Beside, with_usual_context
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import override, shown_model
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.deploy.manifest.settings import open_context
from relayline.wire.common.errors import RelaylineError


def read_beside(text: str) -> Beside | None:
    """Return the others of a pipeline whose `up` was told of them by `plan.beside_text`.

    None where a manifest is no longer one that can be used: that is not this pipeline's fault.
    """
    said = json.loads(text)
    others = []
    for path, stages in said["others"] if said["most"] != 0 else ():
        try:
            manifest = override(load_manifest(Path(path)), {} if stages is None else {"stages": stages})
        except (RelaylineError, OSError):
            return None
        others.append(at_home(with_usual_lanes(manifest)))
    return Beside(tuple(others), said["most"])


def with_contexts(gateway: GatewayManifest, pipelines: Sequence[Behind]) -> list[Behind]:
    """Return the pipelines with the contexts that `up` would choose. `pipelines`: with manifests as they are started.

    A pipeline that runs keeps its own. Models on the hub are looked at by their headers.
    """
    return [_with_context(gateway, pipelines, each) for each in pipelines]


def _with_context(gateway: GatewayManifest, pipelines: Sequence[Behind], one: Behind) -> Behind:
    manifest = one.manifest
    if manifest is None or not (opened := open_context(manifest.spec)):
        return one
    beside = beside_in(gateway, pipelines, one.name)
    try:
        with shown_model(manifest) as shown:
            manifest = with_usual_context(manifest, opened, beside=beside, model=shown.path)
    except RelaylineError:
        return one  # who plans it says why
    return dataclasses.replace(one, manifest=manifest)


def beside_in(gateway: GatewayManifest, pipelines: Sequence[Behind], name: str) -> Beside:
    """Return the others of the pipeline of this name. `pipelines`: with their manifests as they are started."""
    others = (each.manifest for each in pipelines if each.manifest is not None and each.name != name)
    return Beside(tuple(others), gateway.n_awake_beside)
