"""`relayline serve` of a manifest with open layers: hosts are surveyed first, then it continues as with fixed ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from relayline.coordinator.engine.membership import Place
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.speed import Sample
from relayline.deploy.cli.join_flags import coordinator_join, member_event
from relayline.deploy.cli.options import given_settings, security_from
from relayline.deploy.launch.context import ALONE
from relayline.deploy.launch.gateway.beside import read_beside
from relayline.deploy.launch.plan_file import read_plan, write_plan
from relayline.deploy.launch.run import write_settled
from relayline.deploy.launch.serving import for_each_stage
from relayline.deploy.launch.survey import Neighbours, Planned, is_about, moved_plan_record, survey_and_plan
from relayline.deploy.manifest.settings import open_context, value_at
from relayline.deploy.planning.known_hosts import refine_hosts
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import run
from relayline.wire.links.roles import Role
from relayline.wire.links.security import port_of

if TYPE_CHECKING:
    from pathlib import Path

    from relayline.coordinator.engine.stage_curves import StageCurves
    from relayline.coordinator.joining.config import PoolState
    from relayline.deploy.manifest import Manifest

Announce = Callable[[dict[str, Any]], None]


def announce_survey(*, as_json: bool) -> Announce:
    """Return the callback that reports a survey's progress to a supervisor, or a person."""

    def announce(event: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(event), flush=True)
        elif event["event"] == "surveying":
            print(
                f"hosts may join at {event['join']} to be measured; waiting for {', '.join(event['stages'])}",
                flush=True,
            )
        elif "message" in event:
            print(event["message"], flush=True)

    return announce


def planned_from_hosts(given: dict[str, Any], announce: Announce) -> None:
    """Survey the hosts and plan, where the manifest leaves layers open and a plan is wanted; else do nothing.

    Changes manifest, context, split and ports in `given` to what came of it. Ends the command if it is stopped in the
    meantime. Raises what `survey_and_plan` raises, and UsageError for a model that is still on the hub.
    """
    manifest, plan_file = given["manifest"], given["plan_file"]
    if manifest is None or plan_file is None or given["join_listen"] is None or None not in manifest.fixed_cuts():
        return
    if manifest.model_path is None:
        text = "--plan-file plans for a model that is here; `relayline pull` it, and name its file in spec.model.path"
        raise UsageError(text)
    architecture = inspect_model(manifest.model_path).architecture
    join = coordinator_join(given, len(manifest.stages))
    config = for_each_stage(join, manifest, architecture, given_settings(given))
    assert config is not None
    security = security_from(given, Role.COORDINATOR)
    neighbours = Neighbours(
        (read_beside(given["beside"]) if given["beside"] else None) or ALONE,
        given["settle"].absolute().parent if given["settle"] is not None else None,
    )

    def on_member(place: Place) -> None:
        announce(member_event(place))

    async def main(stopping: asyncio.Event) -> tuple[Planned, dict[str, Any]] | None:
        return await survey_and_plan(
            manifest, config, security, given["directory"], on_member, announce, stopping, neighbours
        )

    found = run(main)
    if found is None:
        raise click.exceptions.Exit(0)
    planned, record = found
    write_plan(plan_file, record)
    if given["settle"] is not None:  # a restarted one then finds fixed layers, and continues with them
        write_settled(planned.manifest, given["settle"])
    by_flag = given_settings(given)
    for entry in open_context(manifest.spec):
        if entry.name not in by_flag:
            given[entry.parameter] = value_at(planned.manifest.spec, entry)
    given["manifest"], given["directory"] = planned.manifest, planned.directory
    given["join_listen"] = (given["join_listen"][0], port_of(planned.join))
    if given["enrol_listen"] is not None:
        given["enrol_listen"] = (given["enrol_listen"][0], port_of(planned.enrol))


def plan_facts(given: dict[str, Any]) -> dict[str, Any]:
    """Return the plan for the coordinator's configuration: what to show, and what refines the next plan."""
    return {
        "planned": read_plan(given["plan_file"]),
        "explain_move": explainer(given["manifest"], given["plan_file"]),
        "on_curves": refiner(given["manifest"]),
    }


def explainer(manifest: Manifest | None, plan_file: Path | None) -> Callable[[PoolState], dict[str, Any] | None]:
    """Return the function that explains moved layers, and keeps its result in place of the plan."""
    model = manifest.model_path if manifest is not None else None

    def tell(state: PoolState) -> dict[str, Any] | None:
        if manifest is None or model is None or plan_file is None:
            return None
        before = read_plan(plan_file)
        record = before if before is not None and is_about(before, state) else moved_plan_record(manifest, model, state)
        if record is not None:
            write_plan(plan_file, record)
        else:
            plan_file.unlink(missing_ok=True)
        return record

    return tell


def refiner(manifest: Manifest | None) -> Callable[[Sequence[StageCurves]], None] | None:
    """Return what keeps the stages' own measurements for the next plan; None without a manifest and its model."""
    model = manifest.model_path if manifest is not None else None
    if manifest is None or model is None:
        return None

    def keep(curves: Sequence[StageCurves]) -> None:
        facts = inspect_model(model)
        served = {
            each.name: Sample(
                layer_bytes=sum(facts.layer_bytes[slice(*each.layers)]),
                head_bytes=facts.head_bytes if each.layers[1] == facts.n_layers else 0,
                decode=each.decode,
                prefill=each.prefill,
            )
            for each in curves
        }
        refine_hosts(manifest, model, served)

    return keep
