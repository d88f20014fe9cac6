"""`relayline stage` and `relayline serve`: one process each."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.join_flags import (
    coordinator_join,
    given_names,
    given_spares,
    joinable_event,
    member_event,
    serve_join_options,
    stage_join,
    stage_join_options,
    stage_telemetry,
)
from relayline.deploy.cli.options import (
    Address,
    CoreList,
    Sectioned,
    chat_template_option,
    check_draft,
    content_option,
    engine_options,
    given_settings,
    http_security_options,
    http_tls_from,
    is_given,
    log_options,
    origins_of,
    pipeline_options,
    security_from,
    security_options,
    supervised_option,
    telemetry_config,
    telemetry_options,
    threads_option,
)
from relayline.deploy.launch.serving import for_each_stage, manifest_option, served_split
from relayline.deploy.machine.cores import keep_to
from relayline.wire.common import logs
from relayline.wire.envelopes.dtypes import DTYPE_BY_NAME
from relayline.wire.links.roles import Role
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.engine.membership import Place
    from relayline.coordinator.schedule.config import ScheduleConfig
    from relayline.coordinator.serve import Joinable, Ready
    from relayline.stage.facts import StageFacts


def announce(event: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the ready line on stdout."""
    print(json.dumps(event) if as_json else text, flush=True)


def watch_stdin() -> None:
    """End this process, gracefully, when the supervisor's end of stdin closes."""

    def wait() -> None:
        # os.read, not sys.stdin: a thread inside a buffered read would hold its lock at interpreter shutdown.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="supervisor", daemon=True).start()


@click.command("stage", cls=Sectioned, short_help="Run one stage process.")
@stage_join_options
@click.option(
    "--listen",
    type=Address(),
    default="127.0.0.1:0",
    show_default=True,
    help="Where other stages and the coordinator connect.",
)
@threads_option
@click.option("--cores", type=CoreList(), default=None, help="Cores to run on, such as 0-3,8 [default: any].")
@click.option("--no-verify", is_flag=True, help="Do not check the artifact's sha256.")
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@click.option(
    "--metrics",
    type=Address(),
    default=None,
    help="Where to serve Prometheus metrics; beyond loopback with TLS if --tls is given [default: nowhere].",
)
@telemetry_options
@engine_options
@security_options
@log_options
@supervised_option
def stage_command(**given: Any) -> None:
    """Load one stage artifact and compute for its pipeline until SIGINT or SIGTERM.

    The artifact is a file (--artifact), or the coordinator chooses and sends it (--join).
    """
    from relayline.stage.config import StageConfig
    from relayline.stage.joining.join import run_joined
    from relayline.stage.process import run_stage

    logs.setup("stage", as_json=given["log_json"], verbose=given["verbose"])
    if given["cores"]:
        keep_to(given["cores"])
    security = security_from(given, Role.STAGE)
    joining = stage_join(given, security)
    if given["exit_with_stdin"]:
        watch_stdin()
    if joining is not None:
        run_joined(joining, on_stage_ready(given), stage_telemetry(given), on_stage_idle(given))
        return
    host, port = given["listen"]
    config = StageConfig(
        artifact=given["artifact"],
        host=host,
        port=port,
        engine=from_parameters(EngineSettings, given),
        verify=not given["no_verify"],
        telemetry=telemetry_config(given),
        metrics=given["metrics"],
        security=security,
    )
    run_stage(config, on_stage_ready(given))


def on_stage_ready(given: dict[str, Any]) -> Callable[[str, StageFacts], None]:
    """Return what prints the line of a stage that has begun to serve."""

    def on_ready(address: str, facts: StageFacts) -> None:
        artifact = facts.artifact
        announce(
            {
                "event": "ready",
                "role": "stage",
                "name": given["name"],
                "address": address,
                "stage": artifact.stage_index,
                "layers": [artifact.layer_start, artifact.layer_end],
                "metrics": facts.metrics_address,
            },
            f"stage {artifact.stage_index} of {artifact.stage_count} "
            f"(layers {artifact.layers_text}) ready on {address}"
            + (f", metrics on {metrics_url(facts)}" if facts.metrics_address else ""),
            as_json=given["as_json"],
        )

    return on_ready


def on_stage_idle(given: dict[str, Any]) -> Callable[[], None]:
    """Return what prints the line of a stage that stands by without layers."""

    def on_idle() -> None:
        text = f"{given['name']} stands by without layers; the coordinator gives it some when needed"
        announce({"event": "idle", "role": "stage", "name": given["name"]}, text, as_json=given["as_json"])

    return on_idle


def metrics_url(facts: StageFacts) -> str:
    """Return where a stage's metrics are read."""
    from relayline.stage.observe.metrics import is_private

    host = facts.config.metrics[0] if facts.config.metrics is not None else ""
    return f"{'https' if is_private(host, facts.config.security) else 'http'}://{facts.metrics_address}/metrics"


def schedule_config(given: dict[str, Any]) -> ScheduleConfig:
    """Turn flags into the coordinator's side of the batching policy."""
    from relayline.coordinator.schedule.config import ScheduleConfig

    serving, policy = from_parameters(ServingSettings, given), from_parameters(EngineSettings, given).policy
    by_hand = serving.groups or serving.group_rows
    mode = "fixed" if by_hand else "auto" if policy == "auto" else "drain"
    check_draft(serving, policy)
    return ScheduleConfig(
        mode,
        n_groups=serving.groups,
        group_rows=serving.group_rows,
        chunk_rows=serving.prefill_chunk,
        draft=serving.draft_tokens,
        grant_steps=serving.grant_steps,
        itl_stretch=serving.itl_stretch,
    )


@click.command(
    "serve",
    cls=Sectioned,
    short_help="Run the coordinator and its HTTP API.",
    context_settings={"auto_envvar_prefix": "RELAYLINE"},
)
@manifest_option
@click.option(
    "--pipeline", "directory", type=click.Path(path_type=Path), default=None, help="Directory that `split` wrote."
)
@click.option(
    "--model", type=click.Path(path_type=Path), default=None, help="The model that was split. Needed to move layers."
)
@click.option(
    "--keep-layers",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="File that remembers moved layers, so that a restarted coordinator goes on with them.",
)
@click.option(
    "--plan-file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="File that remembers why each stage has its layers. With it, layers that the manifest leaves open are planned "
    "from the measurements of joining hosts.",
)
@click.option("--settle", type=click.Path(path_type=Path, dir_okay=False), default=None, hidden=True)
@serve_join_options
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@engine_options
@pipeline_options
@security_options
@http_security_options
@chat_template_option
@telemetry_options
@content_option
@log_options
@supervised_option
def serve_command(**given: Any) -> None:
    """Connect the stages of a pipeline and serve it over HTTP until SIGINT or SIGTERM.

    Either --stages has the addresses of running stages, or stages join at --join-listen. Those that join get their
    artifacts and engine settings (--ctx, --lanes, --kv-type, ...) from here.

    With --manifest, this finds and splits the model, and serves it to the stages of the manifest. Flags override
    RELAYLINE_* variables (RELAYLINE_HTTP for --http), and these override the manifest.
    """
    from relayline.coordinator.engine.pipeline import PipelineConfig
    from relayline.coordinator.serve import ServeConfig, run_coordinator
    from relayline.deploy.cli.survey import announce_survey, plan_facts, planned_from_hosts
    from relayline.deploy.launch.projector import served_projector

    logs.setup("coordinator", as_json=given["log_json"], verbose=given["verbose"])
    serving, telemetry = from_parameters(ServingSettings, given), telemetry_config(given)
    from_parameters(EngineSettings, given)  # settings that no stage would take are refused before anything starts
    (host, port), https = given["http"], http_tls_from(given)
    if given["exit_with_stdin"]:
        watch_stdin()
    planned_from_hosts(given, announce_survey(as_json=given["as_json"]))
    names = given_names(given)
    split = served_split(given, (*names, *given_spares(given)) if names else ())
    serving = served_projector(serving, given)
    config = ServeConfig(
        pipeline_dir=split.directory,
        pipeline=PipelineConfig(
            addresses=given["stages"] or (),
            names=names,
            wire_dtype=DTYPE_BY_NAME[serving.wire],
            schedule=schedule_config(given),
            serving=serving,
            security=security_from(given, Role.COORDINATOR),
            name=given["manifest"].name if given["manifest"] is not None else "",
        ),
        host=host,
        port=port,
        join=for_each_stage(
            coordinator_join(given, split.n_stages, split.known), given["manifest"], given_settings(given)
        ),
        cut_model=split.cut_model,
        read_shape=split.read_shape,
        on_moved=split.on_moved,
        api_keys_file=given["api_keys"],
        http_tls=https,
        allow_hosts=tuple(given["allow_hosts"]),
        cors=origins_of(serving),
        chat_template_file=given["chat_template"],
        telemetry=telemetry,
        push_level=is_given("trace_level"),
        **plan_facts(given),
    )
    run_coordinator(config, *_announcers(as_json=given["as_json"]))


def _announcers(
    *, as_json: bool
) -> tuple[Callable[[Ready], None], Callable[[Joinable], None], Callable[[Place], None]]:
    """Return the callback that reports to a supervisor, or a person: serving clients, joinable, joined stages."""

    def on_ready(ready: Ready) -> None:
        announce(
            {
                "event": "ready",
                "role": "coordinator",
                "url": ready.url,
                "model": ready.model_id,
                "stages": ready.n_stages,
                "lanes": ready.n_lanes,
                "ctx": ready.ctx_tokens,
                "chat": ready.has_chat,
            },
            f"{ready.model_id} on {ready.n_stages} stages: {ready.url}/v1",
            as_json=as_json,
        )

    def on_joinable(joinable: Joinable) -> None:
        event = joinable_event(joinable)
        text = f"stages may join at {joinable.join_address}; waiting for {', '.join(joinable.names)}"
        announce(event, text, as_json=as_json)

    def on_member(place: Place) -> None:
        if as_json:  # people read the same in the log
            announce(member_event(place), "", as_json=True)

    return on_ready, on_joinable, on_member
