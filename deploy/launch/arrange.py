"""From a prepared manifest to the processes of a launch. Pure: values in, command lines out."""

from __future__ import annotations

from pathlib import Path

from relayline.deploy.launch.inviting import authority_of
from relayline.deploy.launch.launch_plan import LaunchPlan, LocalStage, RemoteStage
from relayline.deploy.launch.own_tls import JOIN_DIR, makes_stage_tokens, stage_token
from relayline.deploy.launch.ports import links_host
from relayline.deploy.launch.state import LAYERS_FILE, PLAN_FILE
from relayline.deploy.machine.ports import LOCALHOST
from relayline.deploy.manifest import Manifest, Stage
from relayline.wire.links.security import address_of


def arrange(
    manifest: Manifest,
    source: Path,
    settled: Path,
    log_flags: tuple[str, ...] = (),
    more_flags: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the launch plan of a settled manifest at the path `settled`; `source` is the user's own name for it.

    `more_flags`: of the coordinator, as for a split elsewhere than in the cache. `fixed`: stages whose layers the user
    gave.
    """
    http = manifest.spec.coordinator.http
    tokens = settled.parent / JOIN_DIR
    return LaunchPlan(
        name=manifest.name,
        manifest=source,
        serve_arguments=(
            *("--manifest", str(settled), "--keep-layers", str(settled.parent / LAYERS_FILE)),
            *("--plan-file", str(settled.parent / PLAN_FILE), "--settle", str(settled)),
            *more_flags,
            *(("--fixed", ",".join(fixed)) if fixed else ()),
            *log_flags,
        ),
        http=(http.host, http.port),
        join=(links_host(manifest), manifest.join_port),
        advertised_host="127.0.0.1" if manifest.all_local else manifest.spec.coordinator.host,
        stages=tuple(_stage(manifest, stage, tokens, log_flags) for stage in manifest.members),
        authority=authority_of(manifest),
        enrol=(links_host(manifest), manifest.enrol_port),
        is_announced=manifest.serving.announce,
        needs_key=manifest.spec.coordinator.api_keys_file is not None,
        certificate=manifest.resolve(http.tls.cert_file) if http.tls is not None else None,
    )


def _stage(manifest: Manifest, stage: Stage, tokens: Path, log_flags: tuple[str, ...]) -> LocalStage | RemoteStage:
    listen: tuple[str, ...] = ("--listen", f"{links_host(manifest)}:{manifest.listen_port(stage)}")
    stage_cores = ("--cores", stage.kept_cores) if stage.kept_cores else ()
    listen += stage_cores
    if stage.relay:
        arguments = ("--relay", *stage_cores, *remote_security_flags(manifest, stage))
        return RemoteStage(stage.name, stage.host, arguments, _material_of(manifest, stage, tokens), is_relayed=True)
    if not stage.is_local:
        # Beyond loopback, metrics need a certificate.
        metrics_host = stage.host if manifest.uses_tls else LOCALHOST
        metrics = ("--metrics", address_of(metrics_host, manifest.metrics_port(stage)))
        arguments = (*listen, "--advertise", stage.host, *metrics, *remote_security_flags(manifest, stage))
        return RemoteStage(stage.name, stage.host, arguments, _material_of(manifest, stage, tokens))
    # Its upstream may be on another host, so it says where this machine is found rather than 127.0.0.1.
    advertise = () if manifest.all_local else ("--advertise", manifest.spec.coordinator.host)
    metrics = ("--metrics", f"{LOCALHOST}:{manifest.metrics_port(stage)}")
    return LocalStage(
        stage.name, (*listen, *advertise, *metrics, *local_security_flags(manifest, stage, tokens), *log_flags)
    )


def stage_directory(manifest: Manifest, stage: Stage) -> Path:
    """Return a stage's TLS material on this machine: next to the coordinator's, as `relayline certs issue` puts it."""
    directory = manifest.spec.wire.tls.directory
    assert directory is not None
    return manifest.resolve(directory).parent / stage.name


def _material_of(manifest: Manifest, stage: Stage, tokens: Path) -> tuple[Path, ...]:
    """Return the files of this machine that a stage on another host needs."""
    material = []
    if manifest.uses_tls and manifest.spec.wire.tls.directory is not None:
        material.append(stage_directory(manifest, stage))
    if makes_stage_tokens(manifest):
        material.append(stage_token(tokens, stage))
    return tuple(material)


def local_security_flags(manifest: Manifest, stage: Stage, tokens: Path) -> tuple[str, ...]:
    """Return the flags that give a stage of this machine its TLS material and join token."""
    flags: list[str] = []
    if manifest.uses_tls and manifest.spec.wire.tls.directory is not None:
        flags += ["--tls", str(stage_directory(manifest, stage))]
    elif not manifest.all_local:
        flags.append("--insecure")
    if makes_stage_tokens(manifest):
        flags += ["--token-file", str(stage_token(tokens, stage))]
    return tuple(flags)


def remote_security_flags(manifest: Manifest, stage: Stage) -> tuple[str, ...]:
    """Return the same for another host, with the names of files as this machine has them."""
    flags: tuple[str, ...] = ("--tls", stage.name) if manifest.uses_tls else ("--insecure",)
    if makes_stage_tokens(manifest):
        flags += ("--token-file", stage_token(Path(), stage).name)
    return flags
