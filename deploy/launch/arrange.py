"""From a prepared manifest to the processes of a launch. Pure: values in, command lines out."""

from __future__ import annotations

from pathlib import Path

from relayline.deploy.launch.own_tls import directory_name
from relayline.deploy.launch.plan import LaunchPlan, LocalStage, RemoteStage
from relayline.deploy.launch.ports import LOCALHOST, join_host, stage_host
from relayline.deploy.manifest import Manifest, Stage


def arrange(manifest: Manifest, source: Path, settled: Path, log_flags: tuple[str, ...] = ()) -> LaunchPlan:
    """Return what to start for a settled manifest that lies at `settled`; `source` is what the user named."""
    http = manifest.spec.coordinator.http
    return LaunchPlan(
        name=manifest.name,
        manifest=source,
        serve_arguments=("--manifest", str(settled), *log_flags),
        http=(http.host, http.port),
        join=(join_host(manifest), manifest.join_port),
        advertised_host="127.0.0.1" if manifest.all_local else manifest.spec.coordinator.host,
        stages=tuple(_stage(manifest, stage, log_flags) for stage in manifest.stages),
    )


def _stage(manifest: Manifest, stage: Stage, log_flags: tuple[str, ...]) -> LocalStage | RemoteStage:
    listen: tuple[str, ...] = ("--listen", f"{stage_host(manifest)}:{manifest.listen_port(stage)}")
    if stage.kept_cores:
        listen += ("--cores", stage.kept_cores)
    if not stage.is_local:
        metrics = ("--metrics", f"0.0.0.0:{manifest.metrics_port(stage)}")
        arguments = (*listen, "--advertise", stage.host, *metrics, *remote_security_flags(manifest, stage))
        return RemoteStage(stage.name, stage.host, arguments, _material_of(manifest, stage))
    # Its upstream may be on another host, so it says where this machine is found rather than 127.0.0.1.
    advertise = () if manifest.all_local else ("--advertise", manifest.spec.coordinator.host)
    metrics = ("--metrics", f"{LOCALHOST}:{manifest.metrics_port(stage)}")
    return LocalStage(stage.name, (*listen, *advertise, *metrics, *local_security_flags(manifest), *log_flags))


def _material_of(manifest: Manifest, stage: Stage) -> tuple[Path, ...]:
    """Return what another host needs of this machine's files: its TLS material, which `relayline certs issue` put
    beside this machine's, and the token file where the manifest names one."""
    wire = manifest.spec.wire
    material = []
    if manifest.uses_tls and wire.tls.directory is not None:
        material.append(manifest.resolve(wire.tls.directory).parent / directory_name(stage.host))
    if wire.token_file is not None:
        material.append(manifest.resolve(wire.token_file))
    return tuple(material)


def local_security_flags(manifest: Manifest) -> tuple[str, ...]:
    """Return the flags that give a process of this machine its TLS material and join token."""
    flags: list[str] = []
    directory = manifest.spec.wire.tls.directory
    if manifest.uses_tls and directory is not None:
        flags += ["--tls", str(manifest.resolve(directory))]
    elif not manifest.all_local:
        flags.append("--insecure")
    if manifest.spec.wire.token_file is not None:
        flags += ["--token-file", str(manifest.resolve(manifest.spec.wire.token_file))]
    return tuple(flags)


def remote_security_flags(manifest: Manifest, stage: Stage) -> tuple[str, ...]:
    """Return the same for another host, with the names of files as `relayline certs issue` gives them."""
    if not manifest.uses_tls:
        flags: tuple[str, ...] = ("--insecure",)
    else:
        flags = ("--tls", directory_name(stage.host))
    if manifest.spec.wire.token_file is not None:
        flags += ("--token-file", Path(manifest.spec.wire.token_file).name)
    return flags
