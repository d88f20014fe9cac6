"""Keeps the measurements of hosts, so that the next start plans at once.

    $XDG_STATE_HOME/relayline/.hosts/KEY.json       one host with one model

The key is of the host's name in the manifest, the model's content and all that a speed depends on. That is: threads,
layers on a GPU, the type of the KV cache, and how many of the pipeline's stages share the host.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from relayline.coordinator.joining.survey import HostReport
from relayline.coordinator.planner.instance import Link
from relayline.coordinator.planner.speed import Sample, Speed, from_samples
from relayline.deploy.machine import facts as machine
from relayline.deploy.manifest import Manifest, Stage
from relayline.deploy.planning.measure import measured_key
from relayline.wire.common.places import state_dir
from relayline.wire.common.remembered import recall, remember

log = logging.getLogger("relayline.up")

HOSTS_DIR = ".hosts"  # no pipeline can have this name
VERSION = 1
# Of the time of a small call, what both ends compute: seen on loopback. Steps count it already.
CALL_NS = 400_000
SAMPLES_MAX = 16


class _Sample(msgspec.Struct, frozen=True):
    layer_bytes: int
    head_bytes: int
    decode: list[tuple[int, float]]
    prefill: list[tuple[int, float]]


class KnownHost(msgspec.Struct, frozen=True):
    """The whole of a file."""

    version: int
    stage: str
    host: str
    """As the manifest names it."""
    model: str
    at_unix_s: float
    """When it was measured."""
    hostname: str = ""
    system: str = ""
    processor: str = ""
    engine_version: str = ""
    n_cores: int = 0
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    samples: tuple[_Sample, ...] = ()
    served: tuple[_Sample, ...] = ()
    """Its later measurements with served layers; only the latest."""
    in_service: float = 0.0
    is_doubtful: bool = False
    """Whether it was too busy to tell when it was measured; then its samples are not kept."""
    round_trip_ns: int | None = None
    """Of a small call to the coordinator; None: not measured."""
    bytes_per_s: float = 0.0
    is_relayed: bool = False
    """Whether that is the way from the coordinator's relay to its stage, and no call."""

    @property
    def speed(self) -> Speed | None:
        """How fast it is; None where that was not measured."""
        kept = (*self.samples, *self.served)
        samples = [Sample(each.layer_bytes, each.head_bytes, each.decode, each.prefill) for each in kept]
        found = from_samples(samples)
        return found.seen_in_service(self.in_service) if found is not None else None

    @property
    def link(self) -> Link | None:
        """The way to the coordinator; None where it was not measured."""
        if self.round_trip_ns is None or not self.bytes_per_s:
            return None
        call_ns = 0 if self.is_relayed else CALL_NS
        return Link(max(0, self.round_trip_ns - call_ns), self.bytes_per_s)

    @property
    def usable_memory_bytes(self) -> int | None:
        """The memory that a stage there may use; None if unknown."""
        return self.memory_available_bytes or self.memory_bytes or None


def mates_of(manifest: Manifest, stage: Stage) -> int:
    """Return how many of the manifest's stages are on a stage's host, itself included."""
    return sum(place_of(other) == place_of(stage) for other in manifest.stages)


def place_of(stage: Stage) -> str:
    """Return the machine of a stage: every name of this one is the same."""
    return "localhost" if stage.is_local else stage.host


def threads_on(manifest: Manifest, stage: Stage, cores: int) -> int:
    """Return a stage's threads on a host with these cores: stages without given threads share the cores that the others
    leave."""
    mates = [other for other in manifest.stages if place_of(other) == place_of(stage)]
    n_open = sum(1 for other in mates if not other.threads)
    left = cores - sum(other.threads for other in mates)
    return stage.threads or max(1, left // max(1, n_open))


def _path(manifest: Manifest, stage: Stage, model_key: str) -> Path:
    # Here the launcher records its choice, and a host elsewhere chooses for itself.
    threads = threads_on(manifest, stage, machine.cores()) if stage.is_local else stage.threads
    settings = (threads, stage.gpu_layers_used, manifest.engine.kv_type, mates_of(manifest, stage))
    # Stages of one host may keep to other cores each, so each is known by its name.
    parts = (VERSION, place_of(stage), stage.name, model_key, settings)
    return state_dir() / HOSTS_DIR / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def known_hosts(manifest: Manifest, model: Path) -> dict[str, KnownHost]:
    """Return the known hosts of a manifest's stages and spares, by stage name. Raises ModelFileError."""
    key, found = measured_key(model), {}
    for stage in manifest.members:
        try:
            known = msgspec.json.decode(recall(_path(manifest, stage, key)), type=KnownHost)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("the measurements of %s cannot be read: %s; it is measured again", stage.host, error)
            continue
        if known.version == VERSION and known.is_relayed >= stage.relay:  # a direct way says nothing of the relay's
            found[stage.name] = known
    return found


def forget_hosts(manifest: Manifest, model: Path) -> None:
    """Forget the measurements of a manifest's hosts with this model."""
    key = measured_key(model)
    for stage in manifest.members:
        _path(manifest, stage, key).unlink(missing_ok=True)


def remember_hosts(manifest: Manifest, model: Path, reports: Iterable[HostReport]) -> dict[str, KnownHost]:
    """Save the stages' reports on their hosts; returns them by stage name. A full disk is not an error."""
    key, found = measured_key(model), {}
    stages = {stage.name: stage for stage in manifest.members}
    for report in reports:
        stage = stages[report.who.name]
        known = found[stage.name] = known_from(report, stage, model.name)
        kept = msgspec.structs.replace(known, samples=()) if known.is_doubtful else known
        try:
            _store(_path(manifest, stage, key), kept)
        except OSError as error:
            log.warning("the report of %s cannot be saved: %s; the next start measures it again", stage.name, error)
    return found


def refine_hosts(manifest: Manifest, model: Path, served: Mapping[str, Sample]) -> None:
    """Keep the measurements of known hosts' stages with their served layers. A full disk is not an error.

    Stages with the head are left out, because the cost of their layers cannot be separated.
    """
    key = measured_key(model)
    for stage in manifest.members:
        known, sample = known_hosts(manifest, model).get(stage.name), served.get(stage.name)
        if known is not None and known.samples and sample is not None and not sample.head_bytes:
            try:
                _store(_path(manifest, stage, key), msgspec.structs.replace(known, served=(_kept(sample),)))
            except OSError as error:
                log.warning("the measurements of %s cannot be saved: %s", stage.name, error)


def known_from(report: HostReport, stage: Stage, model: str) -> KnownHost:
    """Return a report in the form in which it is kept."""
    who = report.who
    return KnownHost(
        version=VERSION,
        stage=stage.name,
        host=stage.host,
        model=model,
        at_unix_s=time.time(),
        hostname=who.hostname,
        system=who.system,
        processor=who.processor,
        engine_version=who.engine_version,
        n_cores=who.n_cores,
        memory_bytes=who.memory_bytes,
        memory_available_bytes=who.memory_available_bytes,
        samples=tuple(map(_kept, report.samples[:SAMPLES_MAX])),
        in_service=report.in_service,
        is_doubtful=report.is_doubtful,
        round_trip_ns=None if report.link is None else report.link.round_trip_ns,
        bytes_per_s=0.0 if report.link is None else report.link.bytes_per_s,
        is_relayed=report.is_relayed,
    )


def _kept(sample: Sample) -> _Sample:
    return _Sample(sample.layer_bytes, sample.head_bytes, list(sample.decode), list(sample.prefill))


def _store(path: Path, known: KnownHost) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    remember(path, msgspec.json.format(msgspec.json.encode(known), indent=1))
