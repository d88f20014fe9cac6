"""`relayline up` of a gateway's manifest: the gateway, and those of its pipelines that run here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.gateway import gateway_with_flags
from relayline.deploy.cli.sections import OF_CLIENTS
from relayline.wire.common.errors import UsageError

# Flags of `up` that fit a gateway's manifest; a pipeline's settings are in its own manifest.
UP_FLAGS = frozenset(
    {"target", "http", "detach", "dry_run", "state_dir", "report_fd", "as_json", "log_json", "verbose", "api_keys",
     "http_cert", "http_key", "allow_hosts", "name", *OF_CLIENTS}
)  # fmt: skip


def up_gateway(path: Path, given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch the pipelines of a gateway's manifest. Raises UsageError, StartError."""
    from relayline.deploy.cli.apply_gateway import applied_gateway
    from relayline.deploy.launch.detach import reporting, start_detached
    from relayline.deploy.launch.gateway.pipelines import check_ports
    from relayline.deploy.launch.gateway.plan import plan_gateway
    from relayline.deploy.launch.gateway.run import launch_gateway
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
    plan = dataclasses.replace(plan, config=gateway_with_flags(plan.config, given, has_address="http" in changed))

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"], is_here=not given["detach"]))

    if given["report_fd"] is None and applied_gateway(
        plan, directory, is_dry=given["dry_run"], as_json=given["as_json"]
    ):
        return
    if given["report_fd"] is not None:
        with reporting(given["report_fd"]) as tell:
            launch_gateway(plan, directory, tell)
    elif given["detach"]:
        from relayline.deploy.cli.setting_flags import NOT_AGAIN, again

        arguments = [str(path.absolute()), "--state-dir", str(directory.path.absolute()), "--name", plan.name]
        start_detached([*arguments, *again(click.get_current_context(), but=NOT_AGAIN)], directory, show)
        if not given["as_json"]:
            click.echo(f"it runs in the background: relayline status {plan.name}, relayline down {plan.name}")
    else:
        launch_gateway(plan, directory, show, echo=print_prefixed if given["verbose"] else None)
