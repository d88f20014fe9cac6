"""`relayline plan`: the layers of each stage, their needs and the predicted speed, before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.console_http import KEY_VARIABLE
from relayline.deploy.cli.options import FloatRange, IntRange, Line, is_given
from relayline.deploy.cli.paths import FileToRead, Target
from relayline.deploy.cli.setting_flags import manifest_changes, setting_options
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import EVERY_INTERFACE, address_of
from relayline.wire.settings.table import ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.model.inspection import ModelFacts
    from relayline.deploy.manifest import Manifest
    from relayline.deploy.planning.report import Plan

DRAFT_MODEL = ("draft_model", "draft_ctx_tokens", "draft_gpu_layers")  # settings that cost memory beside the stages
COMPARED = ("running", "generated_tokens", "stages")  # of GET /v1/pipeline


@click.command("plan", short_help="Show which stage gets which layers, and the predicted speed.")
@click.argument("target", metavar="MANIFEST|MODEL", type=Target())
@click.option(
    "--hosts",
    type=Line("host,..."),
    default="",
    help="For a MODEL: hosts of its stages in layer order, separated by commas [default: here].",
)
@setting_options(ServingSettings, only=DRAFT_MODEL)
@click.option("--streams", type=IntRange(0), default=0, help="Streams to optimise for [default: all lanes].")
@click.option("--measure", is_flag=True, help="First measure this machine on slices of the model (cached).")
@click.option("--compare", "is_compare", is_flag=True, help="Compare the plan with the running pipeline.")
@click.option(
    "--url",
    type=Line("url"),
    default="",
    help="The running coordinator [default: of the pipeline that runs here, else the manifest's].",
)
@click.option(
    "--seconds",
    type=FloatRange(0, 600),
    default=2.0,
    show_default=True,
    help="With --compare: how long to count tokens; the same streams have to run all the time.",
)
@click.option(
    "--bench",
    type=FileToRead(),
    default=None,
    help="With --compare: file with the output of `relayline bench URL --json`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(target: str, hosts: str, streams: int, measure: bool, is_compare: bool, url: str, seconds: float,
                 bench: Path | None, as_json: bool, **settings: Any) -> None:  # fmt: skip
    """Plan MANIFEST or MODEL: show the split with the most predicted tokens per second that fits every host's memory.

    MODEL is as for `up`. Without --hosts the plan is for two stages on this machine. Of a model on the hub only the
    header is downloaded, some MB, unless --measure needs its weights; with `download: layers` it needs none.

    Speeds are measured (--measure, or a calibration file of the host), declared in the manifest, or estimated; the
    table says which. The plan keeps the manifest's order of stages and its layer ranges. Exit code 2 if nothing fits.

    For a gateway's MANIFEST this plans every pipeline that `up` starts, and adds up their needs on shared machines.
    """
    from relayline.deploy.cli.plan_gateway import plan_gateway_manifest
    from relayline.deploy.cli.planned import planned_manifest, shown_target
    from relayline.deploy.launch.draft_model import shown_draft_model
    from relayline.deploy.launch.target import gateway_of
    from relayline.deploy.planning import report as plan_report

    changes = manifest_changes({name: value for name, value in settings.items() if is_given(name)})
    if (url or bench) and not is_compare:
        raise UsageError("--url and --bench belong to --compare")
    if (gateway := gateway_of(target, Path.cwd())) is not None:
        if hosts or is_compare or changes:
            raise UsageError(
                "--hosts belongs to a MODEL"
                if hosts
                else "a gateway's pipelines name their draft models themselves"
                if changes
                else "--compare is for one pipeline: give its manifest, and --url http://GATEWAY/pipelines/NAME"
            )
        plan_one = functools.partial(make_plan, n_streams=streams, measure=measure, quiet=as_json)
        plan_gateway_manifest(gateway, plan_one, as_json=as_json)
        return
    with contextlib.ExitStack() as stack:
        notes: list[str] = []

        def with_draft(manifest: Manifest) -> Manifest:
            return stack.enter_context(shown_draft_model(manifest, notes.append))

        here, note = stack.enter_context(shown_target(target, needs_weights=measure))
        named_hosts = [host.strip() for host in hosts.split(",")] if hosts else []
        loaded = planned_manifest(here, named_hosts, changes, with_draft)
        plan = make_plan(loaded, n_streams=streams, measure=measure, is_running=is_compare, quiet=as_json)
        plan = _noted(plan, note, *notes)
    if not is_compare:
        if as_json:
            click.echo(json.dumps(plan_report.as_json(plan)))
        else:
            plan_report.show(plan)
        return
    url, key = (url, os.environ.get(KEY_VARIABLE, "")) if url else _running(loaded, Path(target))
    _compare(plan, url, key, seconds, bench, as_json=as_json)


def _running(manifest: Manifest, source: Path) -> tuple[str, str]:
    """Return the URL of a manifest's coordinator and a key for it, empty for none: of the pipeline that runs here, else
    what the manifest and the environment say. Raises UsageError where neither has a URL.
    """
    from relayline.deploy.launch.control import by_name, key_of

    found = by_name(source).get(manifest.name)
    key = os.environ.get(KEY_VARIABLE, "") if found is None else key_of(found)
    is_known = found is not None and found.is_running and found.state.shown_url
    return (found.state.shown_url if found is not None and is_known else _url_of(manifest)), key


def _compare(plan: Plan, url: str, key: str, seconds: float, bench: Path | None, *, as_json: bool) -> None:
    """Show a plan beside what its running pipeline measures in so many seconds, and a bench's output beside both."""
    from relayline.deploy.planning import compare as plan_compare
    from relayline.deploy.planning import report as plan_report

    lines = [] if bench is None else plan_compare.read_bench(bench)
    before, after, wall_s = asyncio.run(_looks(url, key, seconds))
    figures = plan_compare.compare(plan, before, after, wall_s, lines)
    if as_json:
        click.echo(json.dumps({"plan": plan_report.as_json(plan), "compare": plan_compare.as_json(figures)}))
    else:
        plan_compare.show(figures)
    why = plan_compare.why_no_rate(plan, before, after, wall_s)
    has_rate = any(figure.unit == "tok/s" for figure in figures)
    if why and (seconds or not has_rate):
        advice = "; repeat it while the same streams run, or give --bench the output of `relayline bench URL --json`"
        click.echo(f"no tok/s from these readings: {why}{'' if has_rate else advice}", err=as_json)


def make_plan(
    manifest: Manifest, *, n_streams: int = 0, measure: bool = False, is_running: bool = False, quiet: bool = False
) -> Plan:
    """Plan a manifest. Of a model on the hub it reads the header alone, unless `measure` needs its weights.

    Raises UsageError where nothing fits or its draft model cannot draft, ModelFileError for a model that cannot be
    read.
    """
    from relayline.deploy.cli.planned import shown_manifest

    with shown_manifest(manifest, needs_weights=measure) as (manifest, model, notes):
        facts = _checked(manifest, model)  # before measurements, which take minutes
        if measure:
            _measure(manifest, model, quiet=quiet)
        return _noted(_plan_of(manifest, facts, n_streams, is_running=is_running), *notes)


def _noted(plan: Plan, *notes: str) -> Plan:
    return dataclasses.replace(plan, notes=(*filter(None, notes), *plan.notes))


def _checked(manifest: Manifest, model: Path) -> ModelFacts:
    """Return a model's facts. Raises as `make_plan`."""
    from relayline.coordinator.model.inspection import inspect_whole
    from relayline.deploy.launch.draft_model import check_draft_model

    facts = inspect_whole(model)
    if facts.refusal is not None:
        raise UsageError(f"{model}: cannot be split: {facts.refusal}")
    check_draft_model(manifest.serving, model)
    return facts


def _plan_of(manifest: Manifest, facts: ModelFacts, n_streams: int, *, is_running: bool) -> Plan:
    from relayline.coordinator.planner.advice import advice
    from relayline.coordinator.planner.predict import predict
    from relayline.deploy.cli.plan_notes import draft_of, notes_of, order_note, variants
    from relayline.deploy.planning.inputs import best_for, instance_of
    from relayline.deploy.planning.report import Plan

    instance = instance_of(manifest, facts, n_streams=n_streams, is_running=is_running)
    best = best_for(instance)
    prediction = predict(instance, best.edges)
    return Plan(
        name=manifest.name,
        model=facts.model_name,
        instance=instance,
        best=best,
        prediction=prediction,
        variants=variants(instance, best, prediction),
        notes=(*notes_of(manifest, instance, facts), *order_note(instance, best)),
        advice=advice(instance, best),
        draft=draft_of(manifest),
    )


def _measure(manifest: Manifest, model: Path, *, quiet: bool) -> None:
    from relayline.deploy.planning.inputs import n_at_once, threads_of
    from relayline.deploy.planning.measure import measure_speed

    local = [
        (stage, n_threads)
        for stage, n_threads in zip(manifest.stages, threads_of(manifest), strict=True)
        if stage.is_local
    ]
    if not local:
        raise UsageError("--measure measures this machine, but the manifest has no stage on localhost")
    for n_threads, gpu_layers in sorted({(n_threads, stage.gpu_layers_used) for stage, n_threads in local}):
        measure_speed(
            model,
            n_threads=n_threads,
            gpu_layers=gpu_layers,
            kv_type=manifest.engine.kv_type,
            n_at_once=n_at_once(manifest, n_threads),
            tell=lambda line: None if quiet else click.echo(line, err=True),
        )


def _url_of(manifest: Manifest) -> str:
    http = manifest.spec.coordinator.http
    host = "127.0.0.1" if http.host in EVERY_INTERFACE else http.host
    if not http.port:
        raise UsageError(f"{manifest.name} does not run here; give the coordinator's address with --url")
    return f"{'http' if http.tls is None else 'https'}://{address_of(host, http.port)}"


async def _looks(url: str, key: str, seconds: float) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Look at GET /v1/pipeline twice; returns both answers and the seconds between them."""
    from relayline.deploy.cli.console_http import Coordinator

    async with Coordinator(url, key) as coordinator:
        before, began_s = await coordinator.get("/v1/pipeline", COMPARED), time.monotonic()
        if not seconds:
            return {}, before, 0.0
        await asyncio.sleep(seconds)
        return before, await coordinator.get("/v1/pipeline", COMPARED), time.monotonic() - began_s
