"""The differences between the manifest of a gateway that serves and another one, and what they change. Pure but for
`join_ports` and `restarting`, which read small files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from typing import Any

from relayline.deploy.launch.gateway.plan import JoinPorts, Started
from relayline.deploy.launch.state import StateDir
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import GatewayManifest, Member
from relayline.wire.common.errors import RelaylineError

AS_BEFORE = "serves as before, because it could not start again: "  # begins the detail of such a pipeline
OTHERS_SERVE = "The other pipelines serve; mend it and run `up` again"


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayDifference:
    """All that differs."""

    added: tuple[Member, ...]
    removed: tuple[Member, ...]
    changed: tuple[Member, ...]
    """In their new form: the running ones of these names end, and these begin."""
    staying: tuple[Member, ...]
    others: tuple[str, ...]
    """Fields of the gateway itself; they take a restart."""
    is_reordered: bool
    """Whether the order of preference differs."""
    retried: tuple[Member, ...] = ()
    """In their new form: those that could not start, or serve as before because of that."""

    @property
    def beginning(self) -> tuple[Member, ...]:
        """The pipelines that begin, in the place of a running one or not."""
        return (*self.added, *self.changed, *self.retried)

    @property
    def changes_members(self) -> bool:
        """Whether something changes that can change while the gateway serves."""
        return bool(self.beginning or self.removed or self.is_reordered)

    @property
    def words(self) -> str:
        """One line for a log."""
        parts = (
            ("added", self.added),
            ("removed", self.removed),
            ("changed", self.changed),
            ("tried again", self.retried),
        )
        changes = [f"{word} {', '.join(member.name for member in members)}" for word, members in parts if members]
        return "; ".join(changes) or "another order"


def difference(running: GatewayManifest, wanted: GatewayManifest, failed: Collection[str] = ()) -> GatewayDifference:
    """Compare two manifests of one gateway. `failed`: names of members that are not as the first one says."""
    old = {member.name: member for member in running.members()}
    new = {member.name: member for member in wanted.members()}
    both = [name for name in new if name in old]
    retried = [name for name in both if name in failed]
    changed = [name for name in both if _facts(running, old[name]) != _facts(wanted, new[name]) and name not in failed]
    before, after = _own(running), _own(wanted)
    return GatewayDifference(
        tuple(member for name, member in new.items() if name not in old),
        tuple(member for name, member in old.items() if name not in new),
        tuple(new[name] for name in changed),
        tuple(new[name] for name in both if name not in (*changed, *retried)),
        tuple(key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)),
        both != [name for name in old if name in new],
        tuple(new[name] for name in retried),
    )


def _facts(manifest: GatewayManifest, member: Member) -> tuple[Any, ...]:
    place = member.place
    files = [manifest.resolve(path) if path is not None else None for path in (place.key_file, place.ca_file)]
    stages = None if member.stages is None else [stage.model_dump(mode="json") for stage in member.stages]
    return place.url, files, member.manifest, stages


def _own(manifest: GatewayManifest) -> dict[str, Any]:
    """Return the manifest's part on the gateway itself, with full paths."""
    spec = manifest.spec
    values = {f"http.{key}": value for key, value in spec.http.model_dump(mode="json", by_alias=True).items()}
    if spec.http.tls is not None:
        values["http.tls"] = [str(manifest.resolve(path)) for path in (spec.http.tls.cert_file, spec.http.tls.key_file)]
    values["apiKeysFile"] = None if spec.api_keys_file is None else str(manifest.resolve(spec.api_keys_file))
    return values | {"allowHosts": list(spec.allow_hosts), "awakeMax": spec.awake_max}


def restarting(directory: StateDir, differs: GatewayDifference) -> list[Member]:
    """Return the pipelines that are to be started again though the gateway's manifest says the same of them."""
    try:
        asked = json.loads(directory.restart.read_bytes())
    except (OSError, ValueError):
        return []
    return [member for member in differs.staying if member.manifest is not None and member.name in asked]


def join_ports(started: Started, members: Iterable[str]) -> dict[str, JoinPorts]:
    """Return the ports at which stages join the pipelines that run for a gateway, by the pipelines' own names."""
    ports: dict[str, JoinPorts] = {}
    for name in members:
        try:
            coordinator = load_manifest(started.state_of(name).manifest).spec.coordinator
        except (OSError, RelaylineError):
            continue  # it has not begun yet
        ports[name] = (coordinator.join_port, coordinator.enrol_port)
    return ports
