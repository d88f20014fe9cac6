"""The probes of one `relayline doctor`: of the machine alone, or of the machine for a manifest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from relayline.deploy.doctor.files import (
    look_caches,
    look_draft_model,
    look_keys,
    look_model,
    look_projector,
    look_security,
    look_split,
    names_here,
)
from relayline.deploy.doctor.host import (
    judge_memory,
    look_clock,
    look_compiler,
    look_disk,
    look_files,
    look_python,
)
from relayline.deploy.doctor.native import PROBE_TIMEOUT_S, look_native
from relayline.deploy.doctor.network import (
    hosts_of,
    look_coordinator,
    look_coordinator_host,
    look_host,
    look_otlp,
    look_ports,
    look_stage,
)
from relayline.deploy.doctor.plan import needed_memory_bytes, split_of, writes_bytes
from relayline.deploy.doctor.report import Finding, Probe, examine, failure
from relayline.deploy.doctor.versions import look_versions
from relayline.deploy.launch.control import Launched
from relayline.deploy.launch.own_tls import host_of_stage
from relayline.deploy.launch.state import StateDir, state_root
from relayline.deploy.machine.facts import available_memory_bytes
from relayline.deploy.manifest import Manifest
from relayline.wire.common.errors import RelaylineError
from relayline.wire.common.places import artifacts_dir, cache_dir
from relayline.wire.links.roles import COORDINATOR_DIR
from relayline.wire.links.security import LinkSecurity

DEEP_TIMEOUT_S = 24 * 3600.0  # reading all that was split takes as long as the disk needs


def machine_probes(timeout_s: float) -> list[Probe]:
    """Return the probes that need no manifest."""
    return [
        Probe("python", look_python, timeout_s),
        Probe("versions", look_versions, timeout_s),
        Probe("compiler", look_compiler, timeout_s),
        Probe("clock", look_clock, timeout_s),
    ]


def _deep_probes(deep: bool) -> list[Probe]:
    def look() -> list[Finding]:
        return look_caches(cache_dir() / "splits", artifacts_dir())

    return [Probe("cache", look, DEEP_TIMEOUT_S)] if deep else []


async def examine_machine(timeout_s: float, *, deep: bool) -> list[Finding]:
    """Examine this machine without a manifest; `deep`: with all that was split or fetched here."""
    return await examine([
        *_deep_probes(deep),
        *machine_probes(timeout_s),
        Probe("llama.cpp", functools.partial(look_native, wants_gpu=False), max(timeout_s, PROBE_TIMEOUT_S)),
        Probe("memory", lambda: [judge_memory(available_memory_bytes(), None)], timeout_s),
        Probe("open files", functools.partial(look_files, 0), timeout_s),
        Probe("disk", functools.partial(look_disk, cache_dir(), 0), timeout_s),
    ])  # fmt: skip


async def examine_manifest(
    manifest: Manifest, launched: Launched | None, timeout_s: float, *, deep: bool = False
) -> list[Finding]:
    """Examine this machine and the hosts of a manifest. `launched` is the pipeline of that name, if there is one."""
    patient = Patient(manifest, launched)
    return await examine(
        [*shared_probes([patient], timeout_s, deep=deep), *pipeline_probes(patient, timeout_s, deep=deep)]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Patient:
    """A pipeline that is examined."""

    manifest: Manifest
    launched: Launched | None = None
    """The pipeline of that name, if one was launched here."""
    state_dir: Path | None = None
    """Where its state will be, if not at the usual place."""

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self.launched is not None and self.launched.is_running

    @property
    def own_tls(self) -> Path:
        """Where the launcher makes its material."""
        if self.launched is not None:
            return self.launched.directory.tls
        return StateDir(self.state_dir or state_root() / self.manifest.name).tls


def shared_probes(patients: Sequence[Patient], timeout_s: float, *, deep: bool) -> list[Probe]:
    """Return the probes of what all these pipelines share on this machine."""
    members = [stage for patient in patients for stage in patient.manifest.members]
    wants_gpu = any(stage.device == "gpu" and stage.is_local for stage in members)
    asked = {name: stage for patient in reversed(patients) for name, stage in _devices(patient.manifest).items()}
    starting = [patient.manifest for patient in patients if not patient.is_running]
    n_requests = sum(each.manifest.engine.n_lanes + each.manifest.serving.queue for each in patients)
    return [
        *machine_probes(timeout_s),
        Probe(
            "llama.cpp",
            functools.partial(look_native, wants_gpu=wants_gpu, asked=asked),
            max(timeout_s, PROBE_TIMEOUT_S),
        ),
        Probe("memory", functools.partial(_look_memory, starting), timeout_s),
        Probe("open files", functools.partial(look_files, n_requests), timeout_s),
        Probe(
            "disk", lambda: look_disk(cache_dir(), writes_bytes(patient.manifest for patient in patients)), timeout_s
        ),
        *_deep_probes(deep),
    ]


def pipeline_probes(patient: Patient, timeout_s: float, *, deep: bool) -> list[Probe]:
    """Return the probes of one pipeline: its files, ports, hosts, and what of it runs."""
    manifest, launched, running = patient.manifest, patient.launched, patient.is_running
    security_findings, security = _security(patient)
    probes = [
        Probe("model", functools.partial(look_model, manifest), timeout_s),
        Probe("draft model", functools.partial(look_draft_model, manifest), timeout_s),
        Probe("projector", functools.partial(look_projector, manifest), timeout_s),
        Probe("artifacts", lambda: look_split(split_of(manifest), deep=deep), DEEP_TIMEOUT_S if deep else timeout_s),
        Probe("ports", functools.partial(look_ports, manifest, running=running), timeout_s),
        Probe("coordinator.host", functools.partial(look_coordinator_host, manifest), timeout_s),
        Probe("tls", lambda: security_findings, timeout_s),
        Probe("api keys", functools.partial(look_keys, manifest), timeout_s),
    ]
    for host, (what, port) in hosts_of(manifest).items():
        probes.append(Probe(f"host {host}", functools.partial(look_host, host, what, port), timeout_s))
    hosts = {stage.name: host_of_stage(manifest, stage) for stage in manifest.members}
    if running and launched is not None:
        if launched.state.url:
            look = functools.partial(look_coordinator, launched.state.url, launched.state.shown_url)
            probes.append(Probe("coordinator", look, timeout_s))
        for record in launched.state.processes:
            if record.role == "stage" and record.address and record.state == "ready" and security is not None:
                host = hosts.get(record.name, "")
                probe = functools.partial(look_stage, record.name, record.address, host, security)
                probes.append(Probe(f"stage {record.name}", probe, timeout_s))
    if manifest.telemetry.otlp_endpoint:
        probes.append(Probe("otlp", functools.partial(look_otlp, manifest.telemetry.otlp_endpoint), timeout_s))
    return probes


def _devices(manifest: Manifest) -> dict[str, str]:
    """Return the devices that are named for stages here, each with the first stage that names it."""
    asked: dict[str, str] = {}
    for stage in manifest.members:
        if stage.is_local:
            for name in stage.named_devices:
                asked.setdefault(name, stage.name)
    return asked


def _security(patient: Patient) -> tuple[list[Finding], LinkSecurity | None]:
    try:
        return look_security(patient.manifest, names_here(patient.manifest), patient.own_tls / COORDINATOR_DIR)
    except RelaylineError as error:
        return [failure("tls", error.message, "see `relayline certs --help`")], None


def _look_memory(starting: Sequence[Manifest]) -> list[Finding]:
    """Hold free memory against the plans of pipelines that do not run: those that do have theirs and need none."""
    needs = [needed for needed in map(needed_memory_bytes, starting) if needed is not None]
    return [judge_memory(available_memory_bytes(), sum(needs) if needs else None)]
