"""The ports of a launch, which have to be free before anything starts."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from relayline.deploy.machine.ports import LOCALHOST
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.texts import file_error_text, named_stage, system_reason

LOOPBACK_TIMEOUT_S = 5.0  # a connection within the machine takes microseconds; a firewall may drop it


def wanted_ports(manifest: Manifest) -> list[tuple[str, str, int]]:
    """Return (what for, host, port) of every fixed port that processes on this machine will listen on."""
    http = manifest.spec.coordinator.http
    wanted = [("the HTTP API", http.host, http.port), ("joining stages", links_host(manifest), manifest.join_port)]
    if manifest.uses_tls and not all(stage.is_local for stage in manifest.members):
        wanted.append(("hosts that enrol", links_host(manifest), manifest.enrol_port))
    if any(stage.relay for stage in manifest.members):
        wanted.append(("tunnels of relayed stages", links_host(manifest), manifest.relay_port))
    for stage in manifest.members:
        if stage.relay:
            wanted.append((f"relayed {named_stage(stage.name)}", links_host(manifest), manifest.listen_port(stage)))
        if stage.is_local:
            wanted.append((named_stage(stage.name), links_host(manifest), manifest.listen_port(stage)))
            wanted.append((f"metrics of {named_stage(stage.name)}", LOCALHOST, manifest.metrics_port(stage)))
    return [(what, host, port) for what, host, port in wanted if port]


def fixed_ports(settled: Path) -> set[int]:
    """Return the fixed ports here of a pipeline that runs, by its settled manifest; none where it is a gateway's."""
    with contextlib.suppress(RelaylineError, OSError):
        return {port for _, _, port in wanted_ports(load_manifest(settled))}
    return set()


def links_host(manifest: Manifest) -> str:
    """Return the address on which stages join, and local ones listen: every interface if one is on another host."""
    return LOCALHOST if manifest.all_local else "0.0.0.0"


def loopback_problem() -> str | None:
    """Return why this machine cannot be reached at LOCALHOST, and what to do; None if it can.

    All processes of a pipeline on one machine talk there. Where its interface is down, ports can be had all the same.
    """
    try:
        with socket.create_server((LOCALHOST, 0)) as listener:
            socket.create_connection(listener.getsockname(), LOOPBACK_TIMEOUT_S).close()
    except OSError as error:
        if error.errno == errno.EMFILE:
            return file_error_text(error)
        return (
            f"{LOCALHOST} cannot be reached: {system_reason(error) or error}; processes of a pipeline talk "
            "there: bring the loopback interface up, as with `ip link set lo up`"
        )
    return None
