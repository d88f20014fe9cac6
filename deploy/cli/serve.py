"""`relayline serve`: the coordinator's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.interrupts import ignore_hangups
from relayline.deploy.cli.join_flags import (
    check_join_flags,
    given_names,
    given_spares,
    joinable_event,
    member_event,
    serve_join_options,
    serve_split_options,
    served_join,
)
from relayline.deploy.cli.options import (
    Address,
    Sectioned,
    chat_template_option,
    check_draft,
    content_option,
    engine_options,
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
from relayline.deploy.launch.serving import check_named, served_split
from relayline.wire.common import logs
from relayline.wire.common.process import announce, end_with_stdin
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
        draft_model_tokens=serving.draft_ctx_tokens if serving.draft_model else 0,
    )


@click.command(
    "serve",
    cls=Sectioned,
    short_help="Run the coordinator and its HTTP API.",
    context_settings={"auto_envvar_prefix": "RELAYLINE"},
)
@serve_split_options
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
    from relayline.deploy.launch.served_companions import served_companions
    from relayline.wire.links.ports import check_free

    logs.setup("coordinator", as_json=given["log_json"], verbose=given["verbose"])
    serving, telemetry = from_parameters(ServingSettings, given), telemetry_config(given)
    from_parameters(EngineSettings, given)  # settings that no stage would take are refused before anything starts
    listener = with_http_flags(HttpListener(), given, has_address=True)
    if listener.api_keys_file is not None:
        ignore_hangups()
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
        end_with_stdin()
    planned_from_hosts(given, announce_survey(as_json=given["as_json"]))
    names = given_names(given)
    split = served_split(given, (*names, *given_spares(given)) if names else ())
    made = served_companions(serving, given, split.directory, split.open_unread)
    config = ServeConfig(
        pipeline_dir=split.directory,
        pipeline=PipelineConfig(
            addresses=given["stages"] or (),
            names=names,
            wire_dtype=DTYPE_BY_NAME[serving.wire],
            schedule=made.scheduled(schedule),
            serving=made.serving,
            adapters=made.adapters,
            inner_layers=made.inner_layers,
            security=security,
            name=given["manifest"].name if given["manifest"] is not None else "",
        ),
        http=listener,
        join=served_join(given, split, made.adapters, made.drafter),
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
                "ranks": ready.ranks,
            },
            f"{ready.model_id} on {ready.n_stages} stage{'s' * (ready.n_stages != 1)}: {ready.url}/v1",
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
