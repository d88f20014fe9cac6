"""Compose for several machines: one file for each host of the manifest, and links over the hosts' own addresses.

Stages on the coordinator's host have certificates in a directory there. Those on other hosts get theirs by a token, as
with `relayline join`: nothing but a file has to be copied. Ports inside a container are the published ones, because a
stage tells its neighbours the port on which it listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.scalars import is_local
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.render import inside, observability
from relayline.deploy.render.compose import (
    API_KEYS_SOURCE,
    COORDINATOR,
    MONITOR_SOURCE,
    TAKEN,
    TLS_SOURCE,
    coordinator_service,
    escape_configs,
    gpu_ids,
    stage_service,
    threads_lines,
)
from relayline.deploy.render.document import Mapping, yaml_file
from relayline.deploy.render.inside import Inside, Ports, check_names
from relayline.wire.common.errors import UsageError
from relayline.wire.links.security import address_of

TARGET = "compose-hosts"


def render(manifest: Manifest, models_dir: str) -> dict[str, str]:
    """Return compose.HOST.yaml by file name: the coordinator's host first, the others in stage order.

    `models_dir` is the model's directory as seen from the coordinator's file. Raises UsageError for what these files
    cannot do: several replicas, a coordinator that other hosts cannot reach, ports or names that are taken.
    """
    if manifest.spec.deployment.replicas > 1:
        raise UsageError("deployment.replicas needs --target leaderworkerset; Compose runs one pipeline")
    check_names(manifest, TAKEN)
    manifest = _by_address(manifest)
    head = manifest.spec.coordinator.host
    pipeline = Inside(
        manifest,
        head,
        lambda stage: stage.host,
        lambda stage: Ports(manifest.listen_port(stage), manifest.metrics_port(stage)),
        manifest.join_port,
        manifest.enrol_port if manifest.spec.wire.tls.mode != "off" else 0,
    )
    _check_ports(pipeline)
    hosts = dict.fromkeys((head, *(stage.host for stage in manifest.stages)))
    files: dict[str, str] = {}
    for host in hosts:
        stages = [stage for stage in manifest.stages if stage.host == host]
        name = file_name(host)
        if name.lower() in map(str.lower, files):
            raise UsageError(f"two hosts would both have the file {name}; write a host the same way everywhere")
        files[name] = _head_file(pipeline, stages, models_dir) if host == head else _host_file(pipeline, host, stages)
    return files


def file_name(host: str) -> str:
    """Return the name of a host's file."""
    return f"compose.{host.replace(':', '-').replace('%', '-')}.yaml"


def has_several(manifest: Manifest) -> bool:
    """Return whether a stage is on another host than the coordinator."""
    return not all(stage.is_local or stage.host == manifest.spec.coordinator.host for stage in manifest.stages)


def _by_address(manifest: Manifest) -> Manifest:
    """Return the manifest with the coordinator's address in the place of localhost. Raises UsageError.

    As for `relayline up`, localhost is where the coordinator runs.
    """
    head = manifest.spec.coordinator.host
    if not has_several(manifest):
        raise UsageError("all stages are on one host; --target compose renders them")
    if is_local(head):
        raise UsageError(f"other hosts cannot reach {head}; write this machine's address as coordinator.host")
    stages = tuple(stage.model_copy(update={"host": head}) if stage.is_local else stage for stage in manifest.stages)
    return manifest.model_copy(update={"spec": manifest.spec.model_copy(update={"stages": stages})})


def _check_ports(pipeline: Inside) -> None:
    """Raise UsageError if two processes of one host would publish the same port."""
    taken: dict[tuple[str, int], str] = {}
    for host, port, owner in _published(pipeline):
        other = taken.setdefault((host, port), owner)
        if other != owner:
            raise UsageError(f"port {port} on {host} is taken by {other}; give {owner} another port in the manifest")


def _published(pipeline: Inside) -> Iterator[tuple[str, int, str]]:
    """Yield host, port and owner of every port that is published."""
    head, http_port = pipeline.coordinator_host, pipeline.manifest.spec.coordinator.http.port
    if http_port:
        yield head, http_port, "the coordinator's http"
    yield head, pipeline.join_port, "the coordinator's joinPort"
    if pipeline.enrol_port:
        yield head, pipeline.enrol_port, "the coordinator's enrolPort"
    for stage in pipeline.manifest.stages:
        ports = pipeline.ports_of(stage)
        yield stage.host, ports.frames, f"stage {stage.name!r}"
        yield stage.host, ports.metrics, f"metrics of stage {stage.name!r}"


def _head_file(pipeline: Inside, stages: list[Stage], models_dir: str) -> str:
    manifest = pipeline.manifest
    open_ports = [pipeline.join_port, *([pipeline.enrol_port] if pipeline.enrol_port else [])]
    coordinator = coordinator_service(pipeline, models_dir, stages, open_ports=open_ports)
    if pipeline.enrol_port:
        # To be written: an invitation is bound to the first host that uses it.
        authority: Mapping = {"type": "bind", "source": TLS_SOURCE, "target": inside.AUTHORITY_DIR}
        authority |= {"bind": {"create_host_path": False}}
        coordinator["volumes"] = [*coordinator["volumes"], authority]
    metrics = [address_of(stage.host, pipeline.ports_of(stage).metrics) for stage in manifest.stages]
    scraped = observability.Scraped(
        "", f"{COORDINATOR}:{inside.HTTP_PORT}", metrics, MONITOR_SOURCE if pipeline.uses_tls else None
    )
    monitoring = observability.services([scraped])
    jaeger = monitoring["jaeger"]
    jaeger["ports"] = [
        *jaeger["ports"],
        f"{observability.OTLP_PORT}:{observability.OTLP_PORT}",
    ]  # of other hosts' spans
    gpus = gpu_ids(stages)
    document: Mapping = {
        "name": manifest.name,
        "services": {
            COORDINATOR: coordinator,
            **{stage.name: _credentialed(pipeline, stage, gpus[stage.name]) for stage in stages},
            **monitoring,
        },
        "configs": {
            "pipeline": {"content": pipeline.manifest_text()},
            **observability.configs([scraped]),
        },
        **({"secrets": {"api-keys": {"file": API_KEYS_SOURCE}}} if pipeline.uses_api_keys else {}),
        "volumes": {
            f"{COORDINATOR}-state": {},
            **({f"{COORDINATOR}-kept": {}} if pipeline.kept_gib else {}),
            **{f"{stage.name}-state": {} for stage in stages},
            **observability.volumes(),
        },
    }
    escape_configs(document)
    return yaml_file(TARGET, manifest.name, _head_explanation(pipeline, stages), [("", document)])


def _host_file(pipeline: Inside, host: str, stages: list[Stage]) -> str:
    services, gpus = {}, gpu_ids(stages)
    for stage in stages:
        if pipeline.enrol_port:
            command = pipeline.enrolling_command(stage, f"${{{token_variable(stage)}:-}}")
            services[stage.name] = stage_service(
                pipeline, stage, command, gpus[stage.name], is_open=True, is_enrolling=True
            )
        else:
            services[stage.name] = _credentialed(pipeline, stage, gpus[stage.name])
    document: Mapping = {
        "name": pipeline.manifest.name,
        "services": services,
        "volumes": {f"{stage.name}-state": {} for stage in stages},
    }
    return yaml_file(TARGET, pipeline.manifest.name, _host_explanation(pipeline, host, stages), [("", document)])


def _credentialed(pipeline: Inside, stage: Stage, gpus: Sequence[str]) -> Mapping:
    """Return the service of a stage whose credential is in a directory next to the file."""
    command = pipeline.stage_command(
        join=pipeline.coordinator_host, name=stage.name, advertise=stage.host, ports=pipeline.ports_of(stage)
    )
    return stage_service(pipeline, stage, command, gpus, is_open=True)


def token_variable(stage: Stage) -> str:
    """Return the name under which a host's .env has the token of a stage."""
    return f"RELAYLINE_TOKEN_{stage.name.upper().replace('-', '_')}"


def _head_explanation(pipeline: Inside, stages: list[Stage]) -> str:
    manifest, head = pipeline.manifest, pipeline.coordinator_host
    others = [stage for stage in manifest.stages if stage.host != head]
    lines = ["", f"For host {head}: {', '.join((COORDINATOR, *(stage.name for stage in stages)))}.", ""]
    lines += ["Once, beside this file:", f"  relayline certs init {TLS_SOURCE} --name {manifest.name}"]
    lines.append(f"  relayline certs issue {TLS_SOURCE} {head} --coordinator")
    issued = stages if pipeline.enrol_port else manifest.stages
    lines += [f"  relayline certs issue {TLS_SOURCE} {stage.host} --stage {stage.name}" for stage in issued]
    if pipeline.uses_tls:
        lines.append(f"  relayline certs issue {TLS_SOURCE} prometheus --monitor && chmod -R a+rX {MONITOR_SOURCE}")
    if pipeline.uses_api_keys:
        lines.append(f"  put one API key per line into {API_KEYS_SOURCE}")
    lines += [*threads_lines(stages), _READER_LINE, f"Then:  docker compose -f {file_name(head)} up -d", ""]
    if pipeline.enrol_port:
        lines.append("A token for each stage elsewhere, good for one host and one day; its host's file says what for:")
        lines += [f"  relayline certs invite {TLS_SOURCE} {stage.host} --stage {stage.name}" for stage in others]
    else:
        lines.append("Links are in the clear. Each stage elsewhere needs its directory beside its host's file:")
        lines += [f"  {TLS_SOURCE}/{stage.name} to {stage.host}" for stage in others]
    endpoint = f"http://{address_of(head, observability.OTLP_PORT)}"
    lines += [
        f"With traces and boards:  OTEL_EXPORTER_OTLP_ENDPOINT={endpoint} \\",
        f"                         docker compose -f {file_name(head)} --profile {observability.PROFILE} up -d",
        "and the same variable on the other hosts.",
    ]
    return "\n".join(lines)


_READER_LINE = "  export RELAYLINE_UID=$(id -u) RELAYLINE_GID=$(id -g)   # so that containers may read these files"


def _host_explanation(pipeline: Inside, host: str, stages: list[Stage]) -> str:
    head = file_name(pipeline.coordinator_host)
    lines = ["", f"For host {host}: {', '.join(stage.name for stage in stages)}. No other file is needed there.", ""]
    if pipeline.enrol_port:
        lines.append(f"Once, beside this file, with each stage's token (the head of {head} makes them):")
        lines += [f"  echo {token_variable(stage)}=TOKEN >> .env" for stage in stages]
    else:
        lines[1] = f"For host {host}: {', '.join(stage.name for stage in stages)}."
        lines.append(f"Once, beside this file: the directories that the head of {head} makes.")
        lines += [f"  {TLS_SOURCE}/{stage.name}" for stage in stages]
        lines.append(_READER_LINE)
    return "\n".join([*lines, *threads_lines(stages), f"Then:  docker compose -f {file_name(host)} up -d"])
