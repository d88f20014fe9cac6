"""`relayline gateway`, and `relayline up` of a gateway's manifest: several pipelines behind one address."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relayline.deploy.cli.options import (
    Address,
    http_security_options,
    http_tls_from,
    is_given,
    log_options,
    origins_of,
    supervised_option,
)
from relayline.deploy.cli.processes import announce, watch_stdin
from relayline.wire.common import logs
from relayline.wire.common.errors import RelaylineError, UsageError
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import ServingSettings

if TYPE_CHECKING:
    from relayline.coordinator.gateway.serve import GatewayConfig

KEY_VARIABLE = "RELAYLINE_BACKEND_KEY"
# Flags of `up` that fit a gateway's manifest; a pipeline's settings are in its own manifest.
UP_FLAGS = frozenset(
    {"target", "http", "detach", "dry_run", "state_dir", "report_fd", "as_json", "log_json", "verbose", "api_keys",
     "http_cert", "http_key", "allow_hosts", "name"}
)  # fmt: skip


@click.command(
    "gateway",
    short_help="Serve several pipelines at one address.",
    context_settings={"auto_envvar_prefix": "RELAYLINE"},
)
@click.option(
    "--backend", "backends", multiple=True, metavar="[NAME=]URL",
    help="A running pipeline, such as http://10.0.0.7:8080; may be repeated. Those of one model share its requests.",
)  # fmt: skip
@click.option(
    "--manifest", type=click.Path(path_type=Path), default=None,
    help="A gateway's manifest whose pipelines all have `url`; instead of --backend.",
)  # fmt: skip
@click.option("--backend-key", default="", envvar=KEY_VARIABLE, show_envvar=True, help="API key of the pipelines.")
@click.option("--http", type=Address(), default="127.0.0.1:8080", show_default=True, help="Where clients connect.")
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
    from relayline.coordinator.http.limits import HttpLimits
    from relayline.wire.common.process import run

    logs.setup("gateway", as_json=given["log_json"], verbose=given["verbose"])
    if given["exit_with_stdin"]:
        watch_stdin()
    if bool(given["backends"]) == (given["manifest"] is not None):
        raise UsageError("give either --backend, once for each pipeline, or --manifest")
    if given["manifest"] is not None:
        from relayline.deploy.launch.gateway_plan import config_of_running
        from relayline.deploy.manifest.gateway import load_gateway

        config = config_of_running(load_gateway(given["manifest"]))
    else:
        host, port = given["http"]
        config = GatewayConfig(
            tuple(_backend(text, at, given["backend_key"]) for at, text in enumerate(given["backends"])), host, port
        )
    serving = from_parameters(ServingSettings, given)
    config = dataclasses.replace(
        with_flags(config, given, is_given("http")), cors=origins_of(serving), protect_metrics=serving.protect_metrics,
        limits=HttpLimits(connections_per_address_max=serving.connections_per_address),
    )  # fmt: skip
    names = [each.name for each in config.backends]

    async def main(stopping: Any) -> None:
        async with serving_gateway(config) as served:
            announce(
                {"event": "ready", "role": "gateway", "url": served.url, "pipelines": names},
                f"{len(names)} pipelines: {served.url}/v1",
                as_json=given["as_json"],
            )
            await stopping.wait()

    run(main)


def with_flags(config: GatewayConfig, given: dict[str, Any], has_http: bool) -> GatewayConfig:
    """Return the gateway with what flags say of it; `has_http`: --http was given. Raises UsageError."""
    if has_http:
        host, port = given["http"]
        config = dataclasses.replace(config, host=host, port=port)
    if given["api_keys"] is not None:
        config = dataclasses.replace(config, api_keys_file=given["api_keys"])
    if (tls := http_tls_from(given)) is not None:
        config = dataclasses.replace(config, http_tls=tls)
    if given["allow_hosts"]:
        config = dataclasses.replace(config, allow_hosts=tuple(given["allow_hosts"]))
    return config


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


def up_gateway(path: Path, given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch the pipelines of a gateway's manifest. Raises UsageError, StartError."""
    from relayline.deploy.cli.apply_gateway import applied_gateway
    from relayline.deploy.launch.behind import check_ports
    from relayline.deploy.launch.detach import Report, start_detached
    from relayline.deploy.launch.gateway import launch_gateway
    from relayline.deploy.launch.gateway_plan import plan_gateway
    from relayline.deploy.launch.local import print_prefixed
    from relayline.deploy.launch.state import StateDir, state_root
    from relayline.deploy.launch.tell import line_of
    from relayline.deploy.manifest.gateway import load_gateway

    if strange := sorted(changed.keys() - UP_FLAGS):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise UsageError(f"{flags}: {path} is a gateway's manifest; say it in the manifests of its pipelines")
    manifest = load_gateway(path)
    check_ports(manifest)
    name = given["name"] or manifest.name
    directory = StateDir(given["state_dir"] or state_root() / name)
    plan = plan_gateway(manifest, path.absolute(), name, directory.path, log_flags)
    plan = dataclasses.replace(plan, config=with_flags(plan.config, given, "http" in changed))

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"], is_here=not given["detach"]))

    if given["report_fd"] is None and applied_gateway(
        plan, directory, is_dry=given["dry_run"], as_json=given["as_json"]
    ):
        return
    if given["report_fd"] is not None:
        report = Report(given["report_fd"])
        os.set_inheritable(given["report_fd"], False)
        try:
            launch_gateway(plan, directory, report.send)
        except RelaylineError as error:
            report.fail(error)
            raise
    elif given["detach"]:
        from relayline.deploy.cli.setting_flags import NOT_AGAIN, again

        arguments = [str(path.absolute()), "--state-dir", str(directory.path.absolute()), "--name", plan.name]
        start_detached([*arguments, *again(click.get_current_context(), but=NOT_AGAIN)], directory, show)
        if not given["as_json"]:
            click.echo(f"it runs in the background: relayline status {plan.name}, relayline down {plan.name}")
    else:
        launch_gateway(plan, directory, show, echo=print_prefixed if given["verbose"] else None)
