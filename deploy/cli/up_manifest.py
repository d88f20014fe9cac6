"""`relayline up`, from the flags to the launch: the manifest that is meant, changed by flags, then run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.apply import applied
from relayline.deploy.cli.gateway import up_gateway
from relayline.deploy.cli.options import check_draft, http_tls_from
from relayline.deploy.cli.setting_flags import NOT_AGAIN, again, manifest_changes
from relayline.deploy.cli.stage_flags import with_stage_flags
from relayline.deploy.launch.checks import check_before_work
from relayline.deploy.launch.detach import Report, start_detached
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.local import print_prefixed
from relayline.deploy.launch.model_source import resolve_model
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.run import Launch, launch, ready_to_start
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.target import manifest_of
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import is_gateway
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.wire.common.errors import RelaylineError, UsageError
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings

_FILES = {"api_keys": "coordinator.apiKeysFile", "chat_template": "coordinator.chatTemplateFile"}


def changes_of(changed: dict[str, Any]) -> dict[str, Any]:
    """Return what flags change in the manifest: values by dotted place below `spec`."""
    changes = manifest_changes(changed)
    if "http" in changed:
        changes["coordinator.http.host"], changes["coordinator.http.port"] = changed["http"]
    for parameter, place in _FILES.items():
        if changed.get(parameter) is not None:
            changes[place] = str(changed[parameter].absolute())
    if changed.get("http_cert") is not None:
        pair = {"certFile": changed["http_cert"], "keyFile": changed["http_key"]}
        changes["coordinator.http.tls"] = {key: str(path.absolute()) for key, path in pair.items()}
    if changed.get("allow_hosts"):
        changes["coordinator.allowHosts"] = list(changed["allow_hosts"])
    return changes


def up_manifest(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch the pipeline that the flags describe.

    `given` holds every flag by name, `changed` those that the user gave. Raises UsageError, StartError and the errors
    of preparing the model.
    """
    for table in (EngineSettings, ServingSettings, TelemetrySettings):
        from_parameters(table, given)  # what no process would take is refused before anything is loaded
    http_tls_from(given)
    if (gateway := _gateway_of(given)) is not None:
        up_gateway(gateway, given, changed, log_flags)
        return
    what = _launch_of(given, changed, log_flags)
    directory = StateDir(given["state_dir"] or state_root() / what.manifest.name)

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"]))

    if given["report_fd"] is None and applied(what, directory, is_dry=given["dry_run"], as_json=given["as_json"]):
        return
    if given["detach"] and given["report_fd"] is None:  # RELAYLINE_DETACH reaches the one in the background too
        _detach(what, directory, given)
        return
    if given["report_fd"] is None:
        launch(what, directory, show, echo=print_prefixed if given["verbose"] else None)
        return
    report = Report(given["report_fd"])
    os.set_inheritable(given["report_fd"], False)  # no child of this supervisor holds the report open
    try:
        launch(what, directory, report.send)
    except RelaylineError as error:
        report.fail(error)
        raise


def _gateway_of(given: dict[str, Any]) -> Path | None:
    """Return the manifest, where it is a gateway's."""
    if given["target"] is None and given["model"] is not None:
        return None
    path = manifest_of(given["target"], Path.cwd())
    return path if path is not None and is_gateway(path) else None


def _launch_of(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> Launch:
    """Return the launch: the named manifest, or a model's smallest one, with the flags applied."""
    is_flag = given["target"] is None and given["model"] is not None
    target = given["model"] if is_flag else given["target"]
    path = None if is_flag else manifest_of(target, Path.cwd())
    changes = changes_of(changed)
    if path is not None:
        # Of a pipeline behind a gateway: its hosts are looked at like a manifest's own.
        told = json.loads(given["change"]) if given["change"] else {}
        manifest, source = at_home(with_usual_lanes(override(load_manifest(path), told))), path.absolute()
    else:
        # Everything is looked at before a model is loaded from the hub, which may take an hour.
        placeholder = smallest_manifest(Path("model.gguf"), given["name"])
        check_before_work(override(placeholder, changes | _http_of(given)))
        model = resolve_model(str(target))
        manifest, source = with_usual_lanes(smallest_manifest(model, given["name"])), model.absolute()
        changes |= _http_of(given)
    manifest = override(manifest, changes)
    if given["name"]:
        manifest = named(manifest, given["name"])
    check_draft(manifest.serving, manifest.engine.policy)
    manifest = with_stage_flags(manifest, given, changed)
    is_again = given["report_fd"] is not None
    return Launch(manifest, source, log_flags, given["split_dir"], given["measure"], is_again)


def named(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with another name. Raises UsageError for an invalid name."""
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["metadata"]["name"] = name
    try:
        return Manifest.model_validate(data).with_directory(manifest.directory)
    except ValueError as error:
        raise UsageError(
            f"--name {name!r} is not a name of lower-case letters, digits and inner dashes, at most 63 characters"
        ) from error


def _http_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return where the API of a model without a manifest listens: the flag's own default is one too."""
    return changes_of({"http": given["http"]})


def _detach(what: Launch, directory: StateDir, given: dict[str, Any]) -> None:
    with directory.locked(what.manifest.name):
        # The same is done again in the background, quickly then; here its progress is seen, and its mistakes.
        end_leftovers(directory.load())  # they may hold the ports and the memory that are looked at next
        ready_to_start(what, directory)
    # A model that a name led to is not looked for again; a manifest is read again.
    named_by = str(what.source)
    arguments = [named_by, "--state-dir", str(directory.path.absolute()), "--name", what.manifest.name]
    arguments += again(click.get_current_context(), but=NOT_AGAIN)

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"]))

    start_detached(arguments, directory, show)
    if not given["as_json"]:
        name = what.manifest.name
        click.echo(f"it runs in the background: relayline status {name}, relayline down {name}")
