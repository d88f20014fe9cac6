"""`relayline serve`: the coordinator's process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.join_flags import (
    check_join_flags,
    coordinator_join,
    given_names,
    given_spares,
    joinable_event,
    member_event,
    serve_join_options,
)
from relayline.deploy.cli.options import (
    Address,
    Sectioned,
    chat_template_option,
    check_draft,
    content_option,
    engine_options,
    given_settings,
    http_security_options,
    is_given,
    log_options,
    pipeline_options,
    security_from,
    security_options,
    supervised_option,
    telemetry_config,
    telemetry_options,
    with_http_flags,
)
from relayline.deploy.cli.supervised import announce, watch_stdin
from relayline.deploy.launch.serving import check_named, for_each_stage, manifest_option, served_split
from relayline.wire.common import logs
from relayline.wire.envelopes.dtypes import DTYPE_BY_NAME
from relayline.wire.links.roles import Role
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.config import Callbacks, Joinable, Ready
    from relayline.coordinator.engine.membership import Place
    from relayline.coordinator.schedule.config import ScheduleConfig


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
    from relayline.coordinator.config import ServeConfig
    from relayline.coordinator.engine.pipeline import PipelineConfig
    from relayline.coordinator.http.edge.listener import HttpListener
    from relayline.coordinator.serve import run_coordinator
    from relayline.deploy.cli.survey import announce_survey, plan_facts, planned_from_hosts
    from relayline.deploy.launch.checks import check_files
    from relayline.deploy.launch.companions import served_adapters
    from relayline.deploy.launch.ports import check_free
    from relayline.deploy.launch.projector import served_projector

    logs.setup("coordinator", as_json=given["log_json"], verbose=given["verbose"])
    serving, telemetry = from_parameters(ServingSettings, given), telemetry_config(given)
    from_parameters(EngineSettings, given)  # settings that no stage would take are refused before anything starts
    listener = with_http_flags(HttpListener(), given, has_address=True)
    check_named(given["directory"], given["manifest"])
    security, schedule = security_from(given, Role.COORDINATOR), schedule_config(given)
    check_join_flags(given)
    check_files(
        tls=listener.tls,
        api_keys=listener.api_keys_file,
        chat_template=given["chat_template"],
        serving=serving,
        otlp_endpoint=telemetry.otlp_endpoint,
    )
    check_free(
        ("the HTTP API", given["http"]),
        ("--join-listen", given["join_listen"]),
        ("--enrol-listen", given["enrol_listen"]),
    )
    if given["exit_with_stdin"]:
        watch_stdin()
    planned_from_hosts(given, announce_survey(as_json=given["as_json"]))
    names = given_names(given)
    split = served_split(given, (*names, *given_spares(given)) if names else ())
    adapters = served_adapters(serving, split.directory)
    serving = served_projector(serving, given)
    config = ServeConfig(
        pipeline_dir=split.directory,
        pipeline=PipelineConfig(
            addresses=given["stages"] or (),
            names=names,
            wire_dtype=DTYPE_BY_NAME[serving.wire],
            schedule=schedule,
            serving=serving,
            adapters=adapters,
            security=security,
            name=given["manifest"].name if given["manifest"] is not None else "",
        ),
        http=listener,
        join=for_each_stage(
            coordinator_join(given, split.n_stages, adapters, split.known), given["manifest"], given_settings(given)
        ),
        cut_model=split.cut_model,
        read_shape=split.read_shape,
        on_moved=split.on_moved,
        chat_template_file=given["chat_template"],
        telemetry=telemetry,
        push_level=is_given("trace_level"),
        **plan_facts(given),
    )
    run_coordinator(config, _announcing(as_json=given["as_json"]))


def _announcing(*, as_json: bool) -> Callbacks:
    """Return what reports to a supervisor, or a person: that clients are served, that stages may join, who joined."""
    from relayline.coordinator.config import Callbacks

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

    return Callbacks(on_ready, on_joinable, on_member)
