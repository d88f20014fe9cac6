"""Decides whether a start plans at once or waits for its hosts' measurements, and reports the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import check_support, inspect_model
from relayline.deploy.launch.plan_file import read_plan, write_plan
from relayline.deploy.launch.prepare import check_last_layer
from relayline.deploy.launch.survey import plan_record, wants_survey
from relayline.deploy.manifest import Manifest
from relayline.deploy.planning.known_hosts import forget_hosts
from relayline.deploy.planning.plan_description import lines_of


def waits_for_hosts(manifest: Manifest, model: Path, measure: bool | None, *, is_again: bool) -> bool:
    """Return whether hosts are surveyed before the model is split; then check here that it can be.

    `measure` as in `wants_survey`. `is_again`: a command just before has forgotten the earlier measurements. Raises as
    `split_model`, and UsageError for a last range that does not end with the model.
    """
    if measure and not is_again:
        forget_hosts(manifest, model)
    if not wants_survey(manifest, model, measure=measure):
        return False
    facts = inspect_model(model)
    check_support(facts, experimental=False)
    balanced_cuts(facts, len(manifest.stages))
    check_last_layer(manifest, model)
    return True


def keep_plan(manifest: Manifest, model: Path, path: Path) -> None:
    """Keep the description of a manifest whose layers are all fixed. Raises UsageError."""
    write_plan(path, plan_record(manifest, model))


def plan_event(manifest: Manifest, path: Path) -> dict[str, Any] | None:
    """Return the event that explains the plan; None if there was nothing to choose from hosts, or it comes later."""
    planned = read_plan(path)
    if planned is None or None not in manifest.fixed_cuts() or all(stage.is_local for stage in manifest.stages):
        return None
    return {"event": "planned", "message": "\n".join(lines_of(planned)), "plan": planned}
