"""`relayline up MANIFEST`, from the flags to the launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.options import DraftTokens
from relayline.deploy.launch.detach import Report, start_detached
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.local import print_prefixed
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.run import launch, ready_to_start
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.wire.common.errors import RelaylineError
from relayline.wire.links.security import address_of

# Flag -> where the manifest says the same.
PLACES = {
    "ctx": "context.tokens",
    "lanes": "context.lanes",
    "kv_type": "context.kvType",
    "kv_layout": "context.kvLayout",
    "prefix_lanes": "context.prefixLanes",
    "max_rows": "batching.maxRows",
    "prefill_rows": "batching.prefillRows",
    "prefill_chunk": "batching.prefillChunk",
    "itl_stretch": "batching.itlStretch",
    "draft": "batching.draft",
    "groups": "batching.groups",
    "group_rows": "batching.groupRows",
    "policy": "batching.policy",
    "queue": "coordinator.queue",
    "lost_wait": "coordinator.lostWaitSeconds",
    "model_id": "coordinator.modelId",
    "wire": "wire.dtype",
    "trace_level": "telemetry.level",
    "otlp_endpoint": "telemetry.otlpEndpoint",
    "trace_sample": "telemetry.samplerRatio",
    "trace_content": "telemetry.content",
}


def changes_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Return what flags change in the manifest: values by dotted place below `spec`."""
    changes = {PLACES[flag]: value for flag, value in changed.items() if flag in PLACES}
    if "http" in changed:
        changes["coordinator.http.host"], changes["coordinator.http.port"] = changed["http"]
    if "draft" in changed:
        changes[PLACES["draft"]] = DraftTokens.said(changed["draft"])
    if "no_share" in changed:
        changes["batching.share"] = not changed["no_share"]
    if "no_calibrate" in changed:
        changes["batching.calibrate"] = not changed["no_calibrate"]
    return changes


def up_manifest(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch a manifest. `given` holds every flag by name, `changed` those that somebody gave.

    Raises UsageError, StartError and what preparing the model raises.
    """
    path: Path = given["manifest"]
    manifest = override(load_manifest(path), changes_of(changed))
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
    for flag, value in changed.items():
        if flag not in (*PLACES, "http", "no_share", "no_calibrate"):
            continue
        if isinstance(value, bool):
            arguments += [f"--{flag.replace('_', '-')}"] if value else []
        elif flag == "http":
            arguments += ["--http", address_of(*value)]
        elif flag == "draft":
            arguments += ["--draft", str(DraftTokens.said(value))]
        else:
            arguments += [f"--{flag.replace('_', '-')}", str(value)]

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"]))

    start_detached(arguments, directory, show)
    if not given["as_json"]:
        click.echo(f"it runs in the background: relayline status {manifest.name}, relayline down {manifest.name}")
