"""`relayline up`, from the flags to the launch: the manifest that is meant, changed by flags, then run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from relayline.deploy.cli.apply import applied
from relayline.deploy.cli.options import http_tls_from
from relayline.deploy.cli.setting_flags import NOT_AGAIN, again
from relayline.deploy.cli.up_gateway import up_gateway
from relayline.deploy.cli.up_launch import launch_before, launch_of
from relayline.deploy.launch.again import become_new, placed
from relayline.deploy.launch.detach import reporting, start_detached
from relayline.deploy.launch.leftovers import end_leftovers
from relayline.deploy.launch.local import print_prefixed
from relayline.deploy.launch.run import Launch, check_while_it_runs, launch, ready_to_start
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.launch.target import gateway_of
from relayline.deploy.launch.tell import line_of
from relayline.wire.common.errors import RelaylineError, StartError
from relayline.wire.common.texts import file_error_text
from relayline.wire.settings.setting import from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings


def up_manifest(given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]) -> None:
    """Launch the pipeline that the flags describe.

    `given` holds every flag by name, `changed` those that the user gave. Raises UsageError, StartError and the errors
    of preparing the model.
    """
    for table in (EngineSettings, ServingSettings, TelemetrySettings):
        from_parameters(table, given)  # impossible settings are refused before anything is loaded
    http_tls_from(given)
    is_flag = given["target"] is None and given["model"] is not None
    if not is_flag and (gateway := gateway_of(given["target"], Path.cwd())) is not None:
        up_gateway(gateway, given, changed, log_flags)
        return
    to_start, failed = _to_start(given, changed, log_flags)
    directory = StateDir(given["state_dir"] or state_root() / to_start.manifest.name)

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"], is_here=True))

    if given["check"]:
        check_while_it_runs(to_start, directory)
        return
    if given["report_fd"] is None and applied(to_start, directory, is_dry=given["dry_run"], as_json=given["as_json"]):
        return
    if given["detach"] and given["report_fd"] is None:  # RELAYLINE_DETACH reaches the one in the background too
        _detach(to_start, directory, given)
        return
    command = placed(sys.argv[1:], to_start.manifest.name, directory.path)
    if given["report_fd"] is None:
        echo = print_prefixed if given["verbose"] else None
        is_wanted_again = launch(to_start, directory, show, echo=echo, arguments=command, failed=failed)
    else:
        with reporting(given["report_fd"]) as tell:
            is_wanted_again = launch(to_start, directory, tell, arguments=command)
    if is_wanted_again:
        become_new(command)


def _to_start(
    given: dict[str, Any], changed: dict[str, Any], log_flags: tuple[str, ...]
) -> tuple[Launch, RelaylineError | None]:
    """Return the launch that the flags describe. Raises as `launch_of`.

    With --or-before it is the launch of before, and the mistake, if the manifest has got one since it was checked.
    """
    try:
        return launch_of(given, changed, log_flags), None
    except (RelaylineError, OSError) as error:
        if not given["or_before"]:
            raise
        mistake = error if isinstance(error, RelaylineError) else StartError(file_error_text(error))
        return launch_before(given, changed, log_flags, mistake), mistake


def _detach(to_start: Launch, directory: StateDir, given: dict[str, Any]) -> None:
    with directory.locked(to_start.manifest.name):
        # The same is done again in the background, quickly then; here its progress is seen, and its mistakes.
        end_leftovers(directory.load())  # they may hold the ports and the memory that are looked at next
        ready_to_start(to_start, directory)
    # A model that a name led to is not looked for again; a manifest is read again.
    named_by = str(to_start.source)
    arguments = [named_by, "--state-dir", str(directory.path.absolute()), "--name", to_start.manifest.name]
    is_model = to_start.source == to_start.manifest.model_path  # found, so nothing of it is on the hub any more
    if is_model:
        os.environ.pop("RELAYLINE_DOWNLOAD", None)  # which the one in the background would read
    arguments += again(click.get_current_context(), but=(*NOT_AGAIN, "download") if is_model else NOT_AGAIN)

    def show(event: dict[str, Any]) -> None:
        click.echo(line_of(event, as_json=given["as_json"]))

    start_detached(arguments, directory, show)
    if not given["as_json"]:
        name = to_start.manifest.name
        click.echo(f"it runs in the background: relayline status {name}, relayline down {name}")
