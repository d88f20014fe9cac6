"""`relayline up MANIFEST`, from the flags to the launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.setting_flags import manifest_changes, parameter_arguments
from relayline.deploy.launch.detach import Report, start_detached
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.local import print_prefixed
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.run import launch, ready_to_start
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.wire.common.errors import RelaylineError
from relayline.wire.links.security import address_of


def changes_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Return what flags change in the manifest: values by dotted place below `spec`."""
    changes = manifest_changes(changed)
    if "http" in changed:
        changes["coordinator.http.host"], changes["coordinator.http.port"] = changed["http"]
    return changes


def up_manifest(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch a manifest. `given` holds every flag by name, `changed` those that somebody gave.

    Raises UsageError, StartError and what preparing the model raises.
    """
    path: Path = given["manifest"]
    manifest = override(at_home(load_manifest(path)), changes_of(changed))
    directory = StateDir(given["state_dir"] or state_root() / manifest.name)
    as_json = given["as_json"]

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=as_json))

    if given["detach"] and given["report_fd"] is None:  # RELAYLINE_DETACH reaches the one in the background too
        _detach(path, manifest, directory, given, changed, log_flags)
        return
    if given["report_fd"] is None:
        echo = print_prefixed if given["verbose"] else None
        launch(manifest, path.absolute(), directory, show, log_flags=log_flags, echo=echo)
        return
    report = Report(given["report_fd"])
    os.set_inheritable(given["report_fd"], False)  # no child of this supervisor holds the report open
    try:
        launch(manifest, path.absolute(), directory, report.send, log_flags=log_flags)
    except RelaylineError as error:
        report.fail(error)
        raise


def _detach(
    path: Path,
    manifest: Manifest,
    directory: StateDir,
    given: dict[str, Any],
    changed: dict[str, Any],
    log_flags: tuple[str, ...],
) -> None:
    with directory.locked(manifest.name):
        # The same is done again in the background, quickly then; here its progress is seen, and its mistakes.
        end_leftovers(directory.load())  # they may hold the ports and the memory that are looked at next
        ready_to_start(manifest, directory)
    arguments = [str(path.absolute()), "--state-dir", str(directory.path.absolute()), *log_flags]
    arguments += parameter_arguments(changed)
    if "http" in changed:
        arguments += ["--http", address_of(*changed["http"])]

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"]))

    start_detached(arguments, directory, show)
    if not given["as_json"]:
        click.echo(f"it runs in the background: relayline status {manifest.name}, relayline down {manifest.name}")
