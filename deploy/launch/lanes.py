"""The default number of lanes of a pipeline: fewer than usual if each lane keeps a large state."""

from __future__ import annotations

from relayline.coordinator.model.inspection import ModelFacts, inspect_model
from relayline.coordinator.planner.memory import usual_lanes
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.units import MIB
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings


def with_usual_lanes(manifest: Manifest) -> Manifest:
    """Return a user's manifest with the lanes that its model allows, if it does not set them.

    A model that is elsewhere, or cannot be read, changes nothing: its next reader reports the problem.
    """
    path = manifest.model_path
    if "lanes" in manifest.spec.context.model_fields_set or path is None or not path.exists():
        return manifest
    try:
        facts = inspect_model(path)
    except RelaylineError:
        return manifest
    n_lanes = usual_lanes(_states(manifest, facts), EngineSettings().n_lanes)
    return (
        override(manifest, {entry_of(EngineSettings, "n_lanes").place: n_lanes})
        if n_lanes < manifest.engine.n_lanes
        else manifest
    )


def lowered_lanes(manifest: Manifest, facts: ModelFacts) -> list[str]:
    """Return a line that says why there are fewer lanes than usual; none if there are as many, or a setting gives
    them."""
    n_usual = EngineSettings().n_lanes
    n_lanes = usual_lanes(_states(manifest, facts), n_usual)
    if manifest.engine.n_lanes != n_lanes or n_lanes >= n_usual:
        return []
    state_mib = sum(_states(manifest, facts)) / MIB
    return [f"each lane keeps a state of {state_mib:,.0f} MiB, so there are {n_lanes} lanes unless a setting says more"]


def _states(manifest: Manifest, facts: ModelFacts) -> list[int]:
    """Return the bytes of each layer's states of one lane, earlier ones for drafts included."""
    n_states = 1 + (manifest.engine.rewind_rows if facts.rewinds_states else 0)
    return [n_states * n_bytes for n_bytes in facts.state_bytes_per_lane]
