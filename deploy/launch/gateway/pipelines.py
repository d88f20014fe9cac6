"""The pipelines that a gateway's manifest starts, each as a separate manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from relayline.deploy.launch.gateway.plan import changes_behind
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.prepare import named, override
from relayline.deploy.machine.ports import LOCALHOST
from relayline.deploy.manifest import Manifest, is_local, load_manifest
from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import named_stage

# What `up` changes in each besides: the address at which only the gateway finds it.
ON_LOOPBACK: Mapping[str, Any] = MappingProxyType({"coordinator.http.host": LOCALHOST, "coordinator.http.port": 0})


def pipelines_behind(gateway: GatewayManifest, changes: Mapping[str, Any] = ON_LOOPBACK) -> tuple[Behind, ...]:
    """Return every pipeline, replicas after their originals. `changes` are made in each manifest.

    Raises UsageError (also ManifestError) for manifests that cannot be used, OSError for those that cannot be read.
    """
    found, taken = [], set[int]()
    for member in gateway.members():
        if member.manifest is None:
            found.append(Behind(member, None))
            continue
        manifest = load_manifest(member.manifest)
        own = changes_behind(manifest, member, taken)
        manifest = override(manifest, own | dict(changes))
        taken.add(manifest.join_port)
        found.append(Behind(member, named(manifest, f"{gateway.name}-{member.name}")))
    return tuple(found)


def check_ports(gateway: GatewayManifest) -> None:
    """Raise UsageError, with a line for each, for ports that two of the pipelines want; and as `pipelines_behind`."""
    if problems := clashes([each.prepared(at_home) for each in pipelines_behind(gateway)]):
        raise UsageError("\n".join(f"{problem}; name another one in its manifest" for problem in problems))


def clashes(pipelines: Sequence[Behind]) -> list[str]:
    """Return a line for every port of a host that two pipelines want."""
    owners: dict[tuple[str, int], tuple[str, str]] = {}
    found = []
    for each in pipelines:
        if each.manifest is None:
            continue
        for host, port, what in _ports(each.manifest):
            other = owners.setdefault((host, port), (each.name, what))
            if other[0] != each.name:
                found.append(
                    f"port {port} on {host} is wanted by {what} of {each.name} and by {other[1]} of {other[0]}"
                )
    return found


def _ports(manifest: Manifest) -> list[tuple[str, int, str]]:
    """Return host, port and use of every port that is known before the start."""
    coordinator = manifest.spec.coordinator.host
    here = "localhost" if is_local(coordinator) else coordinator
    wanted = [(here, manifest.join_port, "joining stages")]
    if manifest.uses_tls and not manifest.all_local:
        wanted.append((here, manifest.enrol_port, "hosts that enrol"))
    if any(stage.relay for stage in manifest.members):
        wanted.append((here, manifest.relay_port, "tunnels of relayed stages"))
    for stage in manifest.members:
        host = here if stage.is_local else stage.host
        wanted.append((here if stage.relay else host, manifest.listen_port(stage), named_stage(stage.name)))
        wanted.append((host, manifest.metrics_port(stage), f"metrics of {named_stage(stage.name)}"))
    return [(host, port, what) for host, port, what in wanted if port]
