"""`relayline stage`: one stage process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.join_flags import (
    stage_join,
    stage_join_options,
    stage_telemetry,
)
from relayline.deploy.cli.options import (
    Address,
    CoreList,
    Sectioned,
    engine_options,
    log_options,
    security_from,
    security_options,
    supervised_option,
    telemetry_config,
    telemetry_options,
    threads_option,
)
from relayline.deploy.cli.setting_flags import setting_option
from relayline.deploy.machine.cores import keep_to
from relayline.wire.common import logs
from relayline.wire.common.process import announce, end_with_stdin
from relayline.wire.common.texts import named_layers
from relayline.wire.links.roles import Role
from relayline.wire.links.security import check_listen
from relayline.wire.model_files.adapters import load_adapters
from relayline.wire.model_files.eagle3 import load_inner
from relayline.wire.settings.setting import entry_of, from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings

if TYPE_CHECKING:
    from relayline.stage.facts import StageFacts


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
@setting_option(entry_of(ServingSettings, "lora"))
@setting_option(entry_of(ServingSettings, "draft_model"))
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
    check_before_load(given)
    if joining is None:
        check_listen(given["listen"][0], security, "the stage")
    if given["exit_with_stdin"]:
        end_with_stdin()
    if joining is not None:
        run_joined(joining, on_stage_ready(given), stage_telemetry(given), on_stage_idle(given))
        return
    host, port = given["listen"]
    config = StageConfig(
        artifact=given["artifact"],
        host=host,
        port=port,
        engine=from_parameters(EngineSettings, given),
        adapters=load_adapters(given["lora"]),
        inner=load_inner(given["draft_model"]),
        verify=not given["no_verify"],
        telemetry=telemetry_config(given),
        metrics=given["metrics"],
        security=security,
    )
    run_stage(config, on_stage_ready(given))


def check_before_load(given: dict[str, Any]) -> None:
    """Check what a stage needs besides its layers, before it fetches, loads and measures them, which takes minutes.

    Raises UsageError, StartError.
    """
    from relayline.wire.links.ports import check_free
    from relayline.wire.telemetry.choice import chosen

    chosen(telemetry_config(given).otlp_endpoint, os.environ)
    check_free(("--listen", given["listen"]), ("--metrics", given["metrics"]))


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
            f"({named_layers(artifact.layer_start, artifact.layer_end)}) ready on {address}"
            + (f", metrics on {metrics_url(facts)}" if facts.metrics_address else ""),
            as_json=given["as_json"],
        )

    return on_ready


def on_stage_idle(given: dict[str, Any]) -> Callable[[str], None]:
    """Return what prints the line of a stage that has nothing loaded, with what it does meanwhile."""

    def on_idle(what: str) -> None:
        text = f"{given['name']} {what}"
        announce({"event": "idle", "role": "stage", "name": given["name"]}, text, as_json=given["as_json"])

    return on_idle


def metrics_url(facts: StageFacts) -> str:
    """Return where a stage's metrics are read."""
    from relayline.stage.observe.metrics import is_private

    host = facts.config.metrics[0] if facts.config.metrics is not None else ""
    return f"{'https' if is_private(host, facts.config.security) else 'http'}://{facts.metrics_address}/metrics"
