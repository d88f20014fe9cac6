"""`relayline up`: a whole pipeline with one command, of a model or of a manifest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from relayline.deploy.cli.control import state_dir_option
from relayline.deploy.cli.options import (
    Address,
    IntRange,
    Line,
    chat_template_option,
    content_option,
    engine_options_of_up,
    http_security_options,
    is_given,
    log_options,
    parse_cuts,
    pipeline_options,
    supervised_option,
    telemetry_options,
    threads_option,
)
from relayline.deploy.cli.paths import Directory, Target
from relayline.deploy.cli.sections import Sectioned
from relayline.wire.common import logs
from relayline.wire.common.errors import UsageError


def _stage_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that apply to all stages of this machine."""
    for option in (
        click.option("--no-pin", is_flag=True, help="Let stages run on any core [default: each has its share]."),
        threads_option,
        click.option(
            "--cuts",
            type=Line("layers"),
            callback=parse_cuts,
            help="Instead of --stages: first layer of each later stage, e.g. 8,16.",
        ),
        click.option(
            "--stages",
            "n_stages",
            type=IntRange(1, 64),
            envvar="RELAYLINE_STAGES",
            help="Number of stages [default: 2].",
        ),
    ):
        function = option(function)
    return function


@click.command(
    "up", cls=Sectioned, short_help="Run a whole pipeline.", context_settings={"auto_envvar_prefix": "RELAYLINE"}
)
@click.argument("target", metavar="[MODEL|MANIFEST]", type=Target(), required=False)
@click.option("--model", type=Target(), default=None, help="The model, instead of MODEL.")
@click.option(
    "--name", type=Line("name"), default="", help="Name of the pipeline [default: the manifest's, or the model's]."
)
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@_stage_options
@click.option(
    "--download",
    type=click.Choice(["whole", "layers"]),
    default="whole",
    show_default=True,
    help="How a model of the hub comes: all of it to this machine, or to each stage its own layers.",
)
@click.option("--split-dir", type=Directory(), default=None, help="Where to keep the split [default: cache].")
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Whether hosts measure their speed before layers are planned [default: other hosts, once per model].",
)
@click.option("--detach", is_flag=True, help="Return once the pipeline is ready; it runs on in the background.")
@click.option("--dry-run", is_flag=True, help="Only show what would start, or what would change in a running pipeline.")
@state_dir_option
@click.option("--report-fd", type=IntRange(0, 1 << 20), default=None, hidden=True)
@click.option("--check", is_flag=True, hidden=True, allow_from_autoenv=False)  # what `relayline restart` would start
# If it does not come to serve, it starts as it was before: its manifest of then is in the state directory.
@click.option("--or-before", is_flag=True, hidden=True, allow_from_autoenv=False)
# Of the manifest of a pipeline behind a gateway, as JSON.
@click.option("--change", type=Line(), default="", hidden=True)
# And the other pipelines there.
@click.option("--beside", type=Line(), default="", hidden=True)
@supervised_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="RELAYLINE_JSON",
    help="Print one JSON object per line; the last one is `ready`.",
)
@engine_options_of_up
@pipeline_options
@http_security_options
@chat_template_option
@telemetry_options
@content_option
@log_options
def up_command(**given: Any) -> None:
    """Start a pipeline and serve until SIGINT or SIGTERM, or until its terminal closes. This starts the coordinator and
    the stages on this machine, and prints the command to run on each other host. See also `relayline status`, `logs`,
    `top` and `down`.

    MODEL is a .gguf file (or any of its shards), a directory or pattern of shards, hf://ORG/REPO/FILE.gguf, or
    ORG/REPO[:QUANT] on the Hugging Face hub. It runs as two stages on this machine, or as one on its GPU, unless flags
    say otherwise.

    MANIFEST is a .yaml file that describes a pipeline, or a gateway to several pipelines. Without MODEL and MANIFEST,
    `up` takes the only manifest of this folder.

    If the pipeline already runs, `up` shows the difference and applies it: layers move while it serves if nothing else
    changed. If a change needs a new start, `up` says so and changes nothing; `relayline restart` makes it.

    Flags override RELAYLINE_* variables, and these override the manifest.

    \b
    Examples:
      relayline up model.gguf
      relayline up ORG/REPO:Q4_K_M --http 0.0.0.0:8080 --api-keys keys.txt
      relayline up llama70b.yaml --detach
      relayline up llama70b.yaml --dry-run
    """
    by_flag = click.get_current_context().get_parameter_source("model") is ParameterSource.COMMANDLINE
    if given["target"] is not None and by_flag:
        raise UsageError("give the model either as MODEL or with --model, and no manifest")
    logs.setup("up", as_json=given["log_json"], verbose=given["verbose"])
    if given["exit_with_stdin"]:
        from relayline.wire.common.process import end_with_stdin

        end_with_stdin()
    from relayline.deploy.cli.up_manifest import up_manifest

    up_manifest(given, {name: value for name, value in given.items() if is_given(name)}, _log_flags(given))


def _log_flags(given: dict[str, Any]) -> tuple[str, ...]:
    return (*(("--log-json",) if given["log_json"] else ()), *(("--verbose",) if given["verbose"] else ()))
