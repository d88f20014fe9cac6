"""The processes that `relayline up` of a gateway's manifest starts: a separate `up` for each pipeline, and the gateway.

Nothing is started here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relayline.coordinator.gateway.links import BackendConfig
from relayline.coordinator.gateway.serve import GatewayConfig
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.deploy.launch.control import first_key
from relayline.deploy.launch.state import StateDir
from relayline.deploy.machine.ports import LOCALHOST, free_port
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.gateway import GatewayManifest, Member
from relayline.deploy.manifest.model import JOIN_PORT, RELAY_PORT
from relayline.deploy.manifest.scalars import is_local
from relayline.wire.common.errors import UsageError
from relayline.wire.links import enrolment
from relayline.wire.links.security import address_of
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import KEPT_DIRECTORIES, ServingSettings

JoinPorts = tuple[int, int]  # where stages join, and where their hosts get certificates; 0: not known before the start
PORTS_APART = 100  # join ports of two pipelines whose stages are on other hosts, where the manifests name none


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPipeline:
    """One pipeline that is started here."""

    name: str
    """Of the process, the pipeline and its state: the gateway's name, then its own."""
    member: str
    """Its own name."""
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """How one gateway is started: the same for all that it has."""

    name: str
    state_dir: Path
    """Where its state is kept."""
    log_flags: tuple[str, ...] = ()
    """Passed on to every process."""

    def state_of(self, member: str) -> StateDir:
        """Return the state of a pipeline that is started for it."""
        return StateDir((self.state_dir / "pipelines" / member).absolute())

    def flags_of(self, member: str) -> tuple[str, ...]:
        """Return the flags of that pipeline's `up` besides those of its manifest."""
        return ("--name", f"{self.name}-{member}", "--state-dir", str(self.state_of(member).path), *self.log_flags)


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The pipelines that `up` starts for a gateway."""

    source: Path
    config: GatewayConfig
    pipelines: tuple[LocalPipeline, ...]
    manifest: GatewayManifest
    started: Started

    @property
    def name(self) -> str:
        """Name under which it runs."""
        return self.started.name


@dataclasses.dataclass(frozen=True, slots=True)
class MemberPlan:
    """One pipeline behind a gateway: where it answers, and what starts it, if that is to be done here."""

    backend: BackendConfig
    local: LocalPipeline | None = None


def plan_gateway(
    manifest: GatewayManifest, source: Path, name: str, state_dir: Path, log_flags: Sequence[str] = ()
) -> GatewayPlan:
    """Return the plan of the gateway of this name.

    Raises UsageError for manifests and files that cannot be used, OSError for those that cannot be read.
    """
    started = Started(name, state_dir, tuple(log_flags))
    planned = plan_members(manifest, started, manifest.members())
    config = _config_of(manifest, tuple(each.backend for each in planned))
    pipelines = tuple(each.local for each in planned if each.local is not None)
    return GatewayPlan(source, config, pipelines, manifest, started)


def config_of_running(manifest: GatewayManifest) -> GatewayConfig:
    """Return the gateway before pipelines that all run elsewhere.

    Raises UsageError for one that would have to be started, and for files that cannot be read.
    """
    members = manifest.members()
    if (local := next((member for member in members if member.place.url is None), None)) is not None:
        raise UsageError(f"pipeline {local.name!r} has no url; `relayline up` starts pipelines that have a manifest")
    return _config_of(manifest, tuple(_elsewhere(manifest, member) for member in members))


def plan_members(
    manifest: GatewayManifest,
    started: Started,
    members: Sequence[Member],
    taken: Collection[int] = (),
    keep: Mapping[str, JoinPorts] = MappingProxyType({}),
) -> list[MemberPlan]:
    """Return the plan for these members of a gateway. `taken`: join ports of those that run already.

    `keep`: the ports of members that start again, which other hosts know. Raises as `plan_gateway`.
    """
    planned, held = [], set(taken)
    for member in members:
        if member.manifest is None:
            planned.append(MemberPlan(_elsewhere(manifest, member)))
            continue
        inner = load_manifest(member.manifest)
        port = free_port()
        changes = changes_behind(inner, member, held, keep.get(member.name))
        held.add(changes.get("coordinator.joinPort", inner.join_port))
        http = address_of(LOCALHOST, port)
        arguments = ("up", str(member.manifest.absolute()), *started.flags_of(member.name), "--http", http, "--change",
                     json.dumps(changes), "--beside", beside_text(manifest, member), "--json",
                     "--exit-with-stdin")  # fmt: skip
        backend = BackendConfig(member.name, f"http://{http}", _key_of(inner))
        planned.append(MemberPlan(backend, LocalPipeline(f"{started.name}-{member.name}", member.name, arguments)))
    return planned


def _config_of(manifest: GatewayManifest, backends: tuple[BackendConfig, ...]) -> GatewayConfig:
    spec = manifest.spec
    tls = spec.http.tls
    listener = HttpListener(
        spec.http.host,
        spec.http.port,
        tls=(manifest.resolve(tls.cert_file), manifest.resolve(tls.key_file)) if tls is not None else None,
        api_keys_file=manifest.resolve(spec.api_keys_file) if spec.api_keys_file is not None else None,
        allow_hosts=spec.allow_hosts,
    )
    return GatewayConfig(backends, listener, awake_max=spec.awake_max)


def _elsewhere(manifest: GatewayManifest, member: Member) -> BackendConfig:
    place = member.place
    assert place.url is not None
    key = _read_key(manifest.resolve(place.key_file)) if place.key_file is not None else ""
    ca_file = str(manifest.resolve(place.ca_file)) if place.ca_file is not None else ""
    return BackendConfig(member.name, place.url.rstrip("/").removesuffix("/v1"), key, ca_file)


def changes_behind(
    inner: Manifest, member: Member, taken: Collection[int], kept: JoinPorts | None = None
) -> dict[str, Any]:
    """Return the changes in a pipeline behind a gateway: its stages, and settings that only one of them can have.

    `taken`: join ports of those before it; `kept`: its own, where it has some already.
    """
    changes: dict[str, Any] = {"coordinator.http.tls": None, **own_of_replica(inner, member)}
    coordinator = inner.spec.coordinator
    stages = (*(inner.stages if member.stages is None else member.stages), *inner.spares)
    is_apart = not (is_local(coordinator.host) and all(stage.is_local for stage in stages))
    if is_apart and not (coordinator.join_port or coordinator.enrol_port):
        if kept is None or not all(kept):
            n_apart = next(n for n in itertools.count() if JOIN_PORT + n * PORTS_APART not in taken)
            kept = (JOIN_PORT + n_apart * PORTS_APART, enrolment.PORT + n_apart * PORTS_APART)
        changes["coordinator.joinPort"], changes["coordinator.enrolPort"] = kept
        if not coordinator.relay_port and any(stage.relay for stage in stages):
            changes["coordinator.relayPort"] = kept[0] + RELAY_PORT - JOIN_PORT
    return changes


def own_of_replica(inner: Manifest, member: Member) -> dict[str, Any]:
    """Return the changes that make a pipeline's manifest that of a replica; none for the pipeline itself.

    They are its stages, and where it keeps things for clients: NAME-2 in DIR-2, since a directory is one coordinator's.
    """
    if member.stages is None:
        return {}
    number, changes = member.name.rpartition("-")[2], dict[str, Any](stages=stages_of(member))
    for name in KEPT_DIRECTORIES:
        if directory := getattr(inner.serving, name):
            changes[entry_of(ServingSettings, name).place] = f"{Path(directory)}-{number}"
    return changes


def beside_text(manifest: GatewayManifest, member: Member) -> str:
    """Return the other pipelines that are started here, as JSON: their manifests, and the stages of replicas.

    With how many of them are awake at once beside this one, at most; null: all.
    """
    others = [
        (str(each.manifest.absolute()), None if each.stages is None else stages_of(each))
        for each in manifest.members()
        if each.manifest is not None and each.name != member.name
    ]
    return json.dumps({"others": others, "most": manifest.n_awake_beside})


def stages_of(member: Member) -> list[dict[str, Any]]:
    """Return a replica's own stages as its manifest would have them."""
    return [stage.model_dump(mode="json", by_alias=True, exclude_unset=True) for stage in member.stages or ()]


def _key_of(inner: Manifest) -> str:
    path = inner.spec.coordinator.api_keys_file
    return _read_key(inner.resolve(path)) if path is not None else ""


def key_of_running(started: Started, member: str) -> str:
    """Return an API key of a pipeline that runs for a gateway: it may serve as before its manifest named another file.

    Raises UsageError.
    """
    return _key_of(load_manifest(started.state_of(member).manifest))


def _read_key(path: Path) -> str:
    try:
        return first_key(path, of_gateway=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"API key file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
