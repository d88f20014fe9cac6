"""`relayline gateway`: several pipelines, started elsewhere, behind one address."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.interrupts import ignore_hangups
from relayline.deploy.cli.options import (
    Address,
    IntRange,
    Line,
    http_security_options,
    is_given,
    log_options,
    supervised_option,
    with_http_flags,
)
from relayline.deploy.cli.paths import FileToRead
from relayline.wire.common import logs
from relayline.wire.common.errors import UsageError
from relayline.wire.common.process import announce, end_with_stdin
from relayline.wire.common.texts import counted
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.gateway.serve import GatewayConfig

KEY_VARIABLE = "RELAYLINE_BACKEND_KEY"


@click.command(
    "gateway",
    short_help="Serve several pipelines at one address.",
    context_settings={"auto_envvar_prefix": "RELAYLINE"},
)
@click.option(
    "--backend", "backends", type=Line(), multiple=True, metavar="[NAME=]URL",
    help="A running pipeline, such as http://10.0.0.7:8080; may be repeated. Those of one model share its requests.",
)  # fmt: skip
@click.option(
    "--manifest", type=FileToRead(), default=None,
    help="A gateway's manifest whose pipelines all have `url`; instead of --backend.",
)  # fmt: skip
@click.option(
    "--backend-key",
    type=Line("key"),
    default="",
    envvar=KEY_VARIABLE,
    show_envvar=True,
    help="API key of the pipelines.",
)
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
@click.option(
    "--awake-max", type=IntRange(0), default=0, show_default=True,
    help="How many pipelines may be awake at once; the gateway puts others to sleep. 0: all.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as JSON.")
@http_security_options
@log_options
@supervised_option
def gateway_command(**given: Any) -> None:
    """Pass requests on to pipelines that run elsewhere, until SIGINT or SIGTERM.

    A request's model chooses the pipeline. Replicas share a model's requests: a conversation stays with the replica
    that has its prefix in cache, other requests go to the least busy one. A replica that dies gets no requests until it
    answers again. `relayline up` with a manifest of kind Gateway also starts the pipelines.
    """
    from relayline.coordinator.gateway.serve import GatewayConfig, serving_gateway
    from relayline.wire.common.process import run

    logs.setup("gateway", as_json=given["log_json"], verbose=given["verbose"])
    if given["exit_with_stdin"]:
        end_with_stdin()
    if bool(given["backends"]) == (given["manifest"] is not None):
        raise UsageError("give either --backend, once for each pipeline, or --manifest")
    if given["manifest"] is not None:
        from relayline.deploy.launch.gateway.plan import config_of_running
        from relayline.deploy.manifest.gateway import load_gateway

        config = config_of_running(load_gateway(given["manifest"]))
    else:
        config = GatewayConfig(
            tuple(_backend(text, at, given["backend_key"]) for at, text in enumerate(given["backends"]))
        )
    config = gateway_with_flags(config, given, has_address=is_given("http"))
    if is_given("awake_max"):
        config = dataclasses.replace(config, awake_max=given["awake_max"])
    if config.http.api_keys_file is not None:
        ignore_hangups()
    names = [each.name for each in config.backends]

    async def main(stopping: Any) -> None:
        async with serving_gateway(config) as served:
            announce(
                {"event": "ready", "role": "gateway", "url": served.url, "pipelines": names},
                f"{counted(len(names), 'pipeline')}: {served.url}/v1",
                as_json=given["as_json"],
            )
            await stopping.wait()

    run(main)


def gateway_with_flags(config: GatewayConfig, given: dict[str, Any], *, has_address: bool) -> GatewayConfig:
    """Return the gateway as flags change it; `has_address`: --http counts too. Raises UsageError."""
    from relayline.coordinator.http.edge.limits import HttpLimits

    n_connections = from_parameters(ServingSettings, given).connections_per_address
    return dataclasses.replace(
        config,
        http=with_http_flags(config.http, given, has_address=has_address),
        limits=HttpLimits(connections_per_address_max=n_connections),
    )


def _backend(text: str, at: int, key: str) -> Any:
    """Return the pipeline of one --backend. Raises UsageError."""
    from yarl import URL

    from relayline.coordinator.gateway.links import BackendConfig

    name, equals, address = text.partition("=")
    if not equals or "/" in name:
        name, address = f"pipeline-{at}", text
    try:
        url = URL(address)
        is_address = url.scheme in ("http", "https") and bool(url.host) and not url.query_string
    except ValueError:
        is_address = False
    if not is_address or not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(f"--backend {text!r} is not [NAME=]URL, such as chat=http://10.0.0.7:8080")
    return BackendConfig(name, address.rstrip("/").removesuffix("/v1"), key)
