"""`relayline up`: a whole pipeline on this machine with one command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from relayline.deploy.cli.control import state_dir_option
from relayline.deploy.cli.model import parse_cuts
from relayline.deploy.cli.options import (
    Address,
    chat_template_option,
    check_draft,
    content_option,
    engine_options,
    http_security_options,
    http_tls_from,
    is_given,
    log_options,
    pipeline_options,
    telemetry_config,
    telemetry_options,
    threads_option,
)
from relayline.deploy.cli.processes import announce
from relayline.wire.common import logs
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.settings.setting import Reader, arguments, from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings

if TYPE_CHECKING:
    from relayline.deploy.launch.local import LocalConfig


# Flags of the form with --model alone: a manifest says these things of every single stage.
MODEL_ONLY = (
    "n_stages", "cuts", "threads", "no_pin", "split_dir", "gpu_layers", "api_keys", "protect_metrics", "http_cert",
    "http_key", "chat_template", "allow_hosts", "connections_per_address",
    "jaeger_url",
)  # fmt: skip
MANIFEST_ONLY = ("state_dir", "detach")


@click.command("up", short_help="Run a whole pipeline.", context_settings={"auto_envvar_prefix": "RELAYLINE"})
@click.argument("manifest", type=click.Path(path_type=Path), required=False)
@click.option("--model", type=click.Path(path_type=Path), default=None, help="GGUF file, or first of its shards.")
@click.option("--stages", "n_stages", type=click.IntRange(1, 64), default=None, help="Number of stages [default: 2].")
@click.option("--cuts", callback=parse_cuts, help="First layer of each later stage, e.g. 8,16, not --stages.")
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@threads_option
@click.option("--no-pin", is_flag=True, help="Let stages run on any core [default: each keeps to its share].")
@click.option(
    "--split-dir", type=click.Path(path_type=Path), default=None, help="Where to keep the split [default: cache]."
)
@click.option("--detach", is_flag=True, help="Return once the manifest's pipeline is ready; it goes on running.")
@state_dir_option
@click.option("--report-fd", type=int, default=None, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@engine_options
@pipeline_options
@http_security_options
@chat_template_option
@telemetry_options
@content_option
@log_options
@click.pass_context
def up_command(ctx: click.Context, /, **given: Any) -> None:
    """Start a pipeline and serve until SIGINT or SIGTERM.

    With MANIFEST: its coordinator, its stages on localhost, and for each other host the command to run there; see
    `relayline status`, `logs` and `down`. Flags win over RELAYLINE_* variables, and these over the manifest.

    With --model: split the model if needed, and run all of it here.
    """
    if (given["manifest"] is None) == (given["model"] is None):
        raise UsageError("give either a MANIFEST or --model, and not both")
    other_form = MANIFEST_ONLY if given["manifest"] is None else MODEL_ONLY
    for parameter in ctx.command.params:
        if parameter.name in other_form and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            form = "a MANIFEST" if given["manifest"] is None else "--model"
            raise UsageError(f"{parameter.opts[0]} belongs to the form with {form}")
    logs.setup("up", as_json=given["log_json"], verbose=given["verbose"])
    if given["manifest"] is None:
        _up_model(given)
        return
    from relayline.deploy.cli.up_manifest import up_manifest

    up_manifest(given, {name: value for name, value in given.items() if is_given(name)}, _log_flags(given))


def _up_model(given: dict[str, Any]) -> None:
    from relayline.coordinator.text.chat import read_template
    from relayline.deploy.launch.local import LocalConfig, forwarded
    from relayline.deploy.launch.ports import port_problem
    from relayline.deploy.launch.splits import split_for

    engine, serving = from_parameters(EngineSettings, given), from_parameters(ServingSettings, given)
    check_draft(serving, engine.policy)
    telemetry_config(given)
    telemetry = from_parameters(TelemetrySettings, given)

    def telemetry_flags(reader: Reader) -> tuple[str, ...]:
        """Return what children are told of telemetry; what was not asked for is left to their own defaults."""
        return arguments(telemetry, lambda entry: reader in entry.reader and is_given(entry.parameter))

    if (https := http_tls_from(given)) is not None:
        from relayline.wire.links.tls_material import check_pair

        check_pair(*https)  # the coordinator would find out after the split
    if given["chat_template"]:
        read_template(given["chat_template"])  # the coordinator would find out after the split
    if given["http"][1] and (problem := port_problem(*given["http"])):
        raise StartError(f"--http {problem}")
    config = LocalConfig(
        pipeline_dir=split_for(given["model"], given["n_stages"], given["cuts"], given["split_dir"]),
        http=given["http"],
        n_threads=engine.n_threads,
        pin=not given["no_pin"],
        stage_arguments=(
            *arguments(engine, lambda entry: entry.name != "n_threads"),
            *telemetry_flags(Reader.STAGE),
            *_log_flags(given),
        ),
        serve_arguments=(
            *arguments(engine, lambda entry: Reader.COORDINATOR in entry.reader),
            *arguments(serving),
            *(("--api-keys", str(given["api_keys"])) if given["api_keys"] else ()),
            *(("--chat-template", str(given["chat_template"])) if given["chat_template"] else ()),
            *(("--protect-metrics",) if given["protect_metrics"] else ()),
            *(forwarded([("--http-cert", https[0]), ("--http-key", https[1])]) if https is not None else ()),
            *(flag for name in given["allow_hosts"] for flag in ("--allow-host", name)),
            *(("--jaeger-url", given["jaeger_url"]) if given["jaeger_url"] else ()),
            *telemetry_flags(Reader.COORDINATOR),
            *_log_flags(given),
        ),
    )  # fmt: skip
    from relayline.wire.common.process import run

    async def main(stopping: asyncio.Event) -> None:
        await _up(config, stopping, as_json=given["as_json"])

    run(main)


def _log_flags(given: dict[str, Any]) -> tuple[str, ...]:
    return (*(("--log-json",) if given["log_json"] else ()), *(("--verbose",) if given["verbose"] else ()))


async def _up(config: LocalConfig, stopping: asyncio.Event, *, as_json: bool) -> None:
    from relayline.deploy.launch.local import LocalPipeline, print_prefixed
    from relayline.wire.common.process import first_of

    stop = asyncio.ensure_future(stopping.wait())
    pipeline = LocalPipeline(config, print_prefixed)
    starting = asyncio.ensure_future(pipeline.start())
    try:
        await first_of(starting, stop)
        if not starting.done():
            return
        ready = starting.result()
        announce(ready | {"stages": len(pipeline.stages)}, f"ready: {ready['url']}/v1", as_json=as_json)
        await first_of(stop, pipeline.failed)
        if pipeline.failed.done():
            pipeline.failed.result()
    finally:
        starting.cancel()
        stop.cancel()
        await pipeline.stop()
