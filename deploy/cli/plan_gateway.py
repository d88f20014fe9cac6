"""`relayline plan` of a gateway's manifest: the plan of each pipeline behind it, and their needs together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.wire.common.errors import UsageError

if TYPE_CHECKING:
    from relayline.deploy.manifest import Manifest
    from relayline.deploy.planning.report import Plan


def plan_gateway_manifest(path: Path, make_plan: Callable[[Manifest], Plan], *, as_json: bool) -> None:
    """Plan every pipeline that `up` of this manifest starts. `make_plan`: how one of them is planned.

    Raises UsageError, once all plans are shown, for each pipeline that cannot run and each machine that is too small
    for all of them.
    """
    from relayline.deploy.launch.gateway.beside import with_contexts
    from relayline.deploy.launch.gateway.pipelines import clashes, pipelines_behind
    from relayline.deploy.launch.here import at_home
    from relayline.deploy.launch.lanes import with_usual_lanes
    from relayline.deploy.manifest.gateway import load_gateway
    from relayline.deploy.planning.report import as_json as plan_json
    from relayline.deploy.planning.report import show
    from relayline.deploy.planning.together import awake_note, missing_memory, shared_machines

    gateway = load_gateway(path)
    prepared = [each.prepared(lambda one: at_home(with_usual_lanes(one))) for each in pipelines_behind(gateway)]
    pipelines = with_contexts(gateway, prepared)
    plans: list[tuple[str, Plan]] = []
    shown: list[dict[str, Any]] = []
    wrong: list[str] = []
    for each in pipelines:
        if each.manifest is None:
            shown.append({"name": each.name, "url": each.member.place.url})
            if not as_json:
                click.echo(f"{each.name}: runs elsewhere, at {each.member.place.url}\n")
            continue
        try:
            plan = make_plan(each.manifest)
        except UsageError as error:
            shown.append({"name": each.name, "error": error.message})
            wrong.append(f"{each.name}: {error.message}")
            continue
        plans.append((each.name, plan))
        shown.append({"name": each.name, "plan": plan_json(plan)})
        if not as_json:
            show(plan)
            click.echo()
    awake_max = gateway.spec.awake_max
    notes = shared_machines(plans) + awake_note(len(plans), awake_max)
    wrong += missing_memory(plans, awake_max) + clashes(pipelines)
    if as_json:
        click.echo(json.dumps({"name": gateway.name, "pipelines": shown, "notes": notes}))
    else:
        for note in notes:
            click.echo(f"note: {note}")
    if wrong:
        raise UsageError("\n".join(wrong))
