"""A Compose file: every process of the pipeline as a service on one machine, observability under a profile."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.render import inside, observability
from relayline.deploy.render.document import Mapping, without_none, yaml_file
from relayline.deploy.render.inside import Inside, Ports, check_names
from relayline.wire.common.errors import UsageError
from relayline.wire.links.roles import MONITOR_DIR
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings

TARGET = "compose"
COORDINATOR = "coordinator"
TLS_SOURCE = "./tls"
MONITOR_SOURCE = f"{TLS_SOURCE}/{MONITOR_DIR}"
API_KEYS_SOURCE = "./api-keys"
TAKEN = frozenset({COORDINATOR, *observability.SERVICES})
READER = f"${{RELAYLINE_UID:-{inside.USER_ID}}}:${{RELAYLINE_GID:-{inside.USER_ID}}}"

# The health check's program: the image has no curl, but always Python. A stage's port is open exactly while it serves,
# and accepts connections without a certificate.
_HEALTHY = (
    "import http.client as h; c = h.HTTPConnection('127.0.0.1', {port}, timeout=4); "
    "c.request('GET', '{path}'); exit(c.getresponse().status != 200)"
)
_OPEN = "import socket; socket.create_connection(('127.0.0.1', {port}), 4)"


def render(manifest: Manifest, models_dir: str) -> str:
    """Return compose.yaml. `models_dir` is the model's directory as seen from that file; RELAYLINE_MODELS overrides it.

    Raises UsageError for what Compose cannot do: several replicas, stage names that are other services' names.
    """
    if manifest.spec.deployment.replicas > 1:
        raise UsageError("deployment.replicas needs --target leaderworkerset; Compose runs one pipeline")
    check_names(manifest, TAKEN)
    pipeline = Inside(manifest, COORDINATOR, lambda stage: stage.name)
    document = {"name": manifest.name, **one_machine([pipeline], [models_dir])}
    escape_configs(document)
    return yaml_file(TARGET, manifest.name, explanation([pipeline]), [("", document)])


def one_machine(pipelines: Sequence[Inside], models_dirs: Sequence[str], gateway: str = "") -> Mapping:
    """Return the services of pipelines of one machine with their configs, secrets and volumes, and observability's.

    `models_dirs`: of each model, as seen from the file; `gateway`: the service before them.
    """
    gpus = gpu_ids([stage.model_copy(update={"name": name}) for name, _, stage in _stages(pipelines)])
    stages = {
        name: stage_service(pipeline, stage, _command(pipeline, stage), gpus[name])
        for name, pipeline, stage in _stages(pipelines)
    }
    coordinators = {
        pipeline.part(COORDINATOR): coordinator_service(pipeline, directory, pipeline.manifest.stages)
        for pipeline, directory in zip(pipelines, models_dirs, strict=True)
    }
    scraped = [
        observability.Scraped(
            pipeline.own,
            f"{pipeline.part(COORDINATOR)}:{inside.HTTP_PORT}",
            [f"{pipeline.part(stage.name)}:{Ports().metrics}" for stage in pipeline.manifest.stages],
            _monitor_source(pipeline) if pipeline.uses_tls else None,
        )
        for pipeline in pipelines
    ]
    keys = {
        pipeline.part("api-keys"): {"file": f"./{pipeline.keys_file}"}
        for pipeline in pipelines
        if pipeline.uses_api_keys
    }
    return {
        "services": {**coordinators, **stages, **observability.services(scraped)},
        "configs": {
            **{pipeline.part("pipeline"): {"content": pipeline.manifest_text()} for pipeline in pipelines},
            **observability.configs(scraped, f"{gateway}:{inside.HTTP_PORT}" if gateway else ""),
        },
        **({"secrets": keys} if keys else {}),
        "volumes": {
            **{f"{name}-state": {} for name in (*coordinators, *stages)},
            **{f"{pipeline.part(COORDINATOR)}-kept": {} for pipeline in pipelines if pipeline.kept_gib},
            **observability.volumes(),
        },
    }


def _stages(pipelines: Sequence[Inside]) -> Iterator[tuple[str, Inside, Stage]]:
    """Yield every stage with the name of its service."""
    for pipeline in pipelines:
        for stage in pipeline.manifest.stages:
            yield pipeline.part(stage.name), pipeline, stage


def escape_configs(document: Mapping) -> None:
    """Double the dollars in text that is copied into containers: Compose would take $NAME for a variable."""
    for config in document["configs"].values():
        config["content"] = config["content"].replace("$", "$$")


def explanation(pipelines: Sequence[Inside], more: Sequence[str] = ()) -> str:
    """Return the commands to run once, next to the file, and how to start. `more`: lines of the same kind."""
    lines = ["", "Once, beside this file:"]
    for pipeline in pipelines:
        source = f"./{pipeline.authority}"
        lines.append(f"  relayline certs init {source} --name {pipeline.manifest.name}")
        lines.append(f"  relayline certs issue {source} {pipeline.coordinator_host} --coordinator")
        lines += [
            f"  relayline certs issue {source} {pipeline.stage_host(stage)} --stage {stage.name}"
            for stage in pipeline.manifest.stages
        ]
        if pipeline.uses_tls:
            monitor = _monitor_source(pipeline)
            lines.append(f"  relayline certs issue {source} prometheus --monitor && chmod -R a+rX {monitor}")
        if pipeline.uses_api_keys:
            lines.append(f"  put one API key per line into ./{pipeline.keys_file}")
    lines += more
    lines += [
        *threads_lines([stage for _, _, stage in _stages(pipelines)]),
        "  export RELAYLINE_UID=$(id -u) RELAYLINE_GID=$(id -g)   # so that containers may read these files",
        "Then:  docker compose up -d",
        f"With traces and boards:  OTEL_EXPORTER_OTLP_ENDPOINT={observability.OTLP_ENDPOINT} \\",
        f"                         docker compose --profile {observability.PROFILE} up -d",
    ]
    return "\n".join(lines)


def threads_lines(stages: Sequence[Stage]) -> list[str]:
    """Return how the stages of one host without threads share the cores that the others leave, at least one each.
    Nothing where one stage has the host alone.
    """
    n_shared, n_given = sum(stage.threads == 0 for stage in stages), sum(stage.threads for stage in stages)
    if not n_shared or len(stages) == 1:
        return []
    left = f"($(nproc) - {n_given})" if n_given else "$(nproc)"
    each = f"{left} / {n_shared}" if n_shared > 1 else left
    return [f"  n=$(( {each} )); export RELAYLINE_THREADS=$(( n > 1 ? n : 1 ))   # of each stage without threads"]


def _monitor_source(pipeline: Inside) -> str:
    """Return the directory of the credential with which Prometheus reads stages' metrics."""
    return f"./{pipeline.authority}/{MONITOR_DIR}"


def base_service(image: str) -> Mapping:
    """Return what all services of ours have in common."""
    return {
        "image": image.replace("$", "$$"),
        "user": READER,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "unless-stopped",
    }


def _base(pipeline: Inside, name: str, stage: Stage | None, *, is_enrolling: bool = False) -> Mapping:
    """Return what coordinator and stages have in common. `is_enrolling`: its credential comes into its own state."""
    image = pipeline.image(on_gpu=stage is not None and stage.device == "gpu").replace("$", "$$")
    return {
        "image": image,
        "user": None if is_enrolling else READER,
        # Compose copies a file's `content` into the container, but cannot where that is read-only
        # (docker/compose#12031). So only services without such a config are read-only.
        "read_only": True if stage is not None else None,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "unless-stopped",
        "environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "${OTEL_EXPORTER_OTLP_ENDPOINT:-}"},
        "secrets": _secret_mounts(pipeline, name),
        "volumes": [
            f"{pipeline.part(name)}-state:{inside.STATE_DIR}",
            *([] if is_enrolling else [_credential(pipeline, name)]),
        ],
    }


def coordinator_service(
    pipeline: Inside, models_dir: str, stages_here: Sequence[Stage], *, open_ports: Sequence[int] = ()
) -> Mapping:
    """Return the coordinator's service. `stages_here`: those in the same file; `open_ports`: for the others."""
    spec = pipeline.manifest.spec
    http = spec.coordinator.http
    service = _base(pipeline, COORDINATOR, None)
    published = without_none(
        {
            "target": inside.HTTP_PORT,
            "published": str(http.port) if http.port else None,
            "host_ip": "127.0.0.1" if http.host == "localhost" else http.host,
        }
    )
    # Behind a gateway that one alone is reached from outside.
    ports = [] if pipeline.own else [published, *published_ports(open_ports)]
    exposed = [str(inside.HTTP_PORT), str(pipeline.join_port)] if pipeline.own else [str(pipeline.join_port)]
    service |= {
        "command": pipeline.coordinator_command(),
        "ports": ports,
        "expose": None if open_ports else exposed,
        "configs": [{"source": pipeline.part("pipeline"), "target": inside.MANIFEST_FILE}],
        # Compose stops dependents first: so the coordinator drains while its stages still run.
        "depends_on": {pipeline.part(stage.name): {"condition": "service_started"} for stage in stages_here},
        "healthcheck": healthcheck(),
        "stop_grace_period": f"{inside.COORDINATOR_GRACE_S}s",
        "labels": dict(pipeline.manifest.metadata.labels),
        "deploy": _resources(spec.coordinator.memory_gib, threads=0, gpus=()),
    }
    if pipeline.kept_gib:
        kept = f"{pipeline.part(COORDINATOR)}-kept:{inside.KEPT_DIR}"
        service["volumes"] = [*service["volumes"], kept]
    if pipeline.mounts_models:
        if "}" in models_dir:  # it would end the variable, and Compose has no way to write it there
            source = models_dir.replace("$", "$$")
        else:
            variable = "_".join(("RELAYLINE_MODELS", *filter(None, (pipeline.own.upper().replace("-", "_"),))))
            source = f"${{{variable}:-{models_dir.replace('$', '$$')}}}"
        models = {"type": "bind", "source": source, "target": inside.MODELS_DIR, "read_only": True}
        service["volumes"] = [*service["volumes"], models]
    else:
        service["environment"] = {**service["environment"], "HF_TOKEN": "${HF_TOKEN:-}"}
    return without_none(service)


def _command(pipeline: Inside, stage: Stage) -> list[str]:
    return pipeline.stage_command(join=pipeline.coordinator_host, name=stage.name, advertise=pipeline.stage_host(stage))


def stage_service(
    pipeline: Inside,
    stage: Stage,
    command: list[str],
    gpus: Sequence[str],
    *,
    is_open: bool = False,
    is_enrolling: bool = False,
) -> Mapping:
    """Return a stage's service. `gpus`: its own of the host's, see `gpu_ids`; `is_open`: other hosts reach its ports;
    `is_enrolling`: it needs no credential.
    """
    service = _base(pipeline, stage.name, stage, is_enrolling=is_enrolling)
    threads, ports = entry_of(EngineSettings, "n_threads"), pipeline.ports_of(stage)
    if stage.threads == 0:  # stages may share the machine, and none can measure the others' share
        command = [*command, threads.flag, f"${{{threads.variable}:-0}}"]
    service |= {
        "command": command,
        "ports": published_ports((ports.frames, ports.metrics)) if is_open else None,
        "expose": None if is_open else [str(ports.frames), str(ports.metrics)],
        "healthcheck": _checked(_OPEN.format(port=ports.frames)),
        "stop_grace_period": f"{inside.STAGE_GRACE_S}s",
        "cpuset": stage.kept_cores or None,
        "labels": {**pipeline.manifest.metadata.labels, **stage.labels},
        "deploy": _resources(stage.container_memory_gib, threads=stage.threads, gpus=gpus),
    }
    return without_none(service)


def gpu_ids(stages: Sequence[Stage]) -> dict[str, list[str]]:
    """Return the numbers of the GPUs that each of a host's stages gets, by the stage's name.

    Devices that are named by number, such as CUDA1, are numbers of the host: a container then has all up to the
    highest, so that names mean the same inside. Other stages share out the rest, in stage order.
    """
    named = {stage.name: _numbers(stage) for stage in stages}
    taken, found = {number for numbers in named.values() for number in numbers}, dict[str, list[str]]()
    free = (number for number in itertools.count() if number not in taken)
    for stage in stages:
        numbers = named[stage.name]
        own = range(max(numbers) + 1) if numbers else itertools.islice(free, stage.n_gpus)
        found[stage.name] = [str(number) for number in own]
    return found


def _numbers(stage: Stage) -> list[int]:
    """Return the numbers at the ends of the devices that a stage on a GPU names."""
    ends = [re.search(r"\d+$", name) for name in stage.named_devices] if stage.n_gpus else []
    return [int(end[0]) for end in ends if end is not None]


def published_ports(ports: Sequence[int]) -> list[str]:
    """Return ports as published on every address of the machine, under the same numbers as inside."""
    return [f"{port}:{port}" for port in ports]


def healthcheck() -> Mapping:
    """Return the check of a process with an HTTP API."""
    return _checked(_HEALTHY.format(port=inside.HTTP_PORT, path="/health"))


def _checked(script: str) -> Mapping:
    # No `start_interval`: Podman and Docker before 25 refuse the whole file for it.
    return {
        "test": ["CMD", "python3", "-c", script],
        "interval": "10s",
        "timeout": "5s",
        "retries": 3,
        "start_period": f"{inside.START_BUDGET_S}s",
    }


def _resources(memory_gib: float | None, *, threads: int, gpus: Sequence[str]) -> Mapping | None:
    limits = without_none(
        {
            "cpus": str(threads) if threads else None,
            "memory": None if memory_gib is None else f"{round(memory_gib * 1024)}m",
        }
    )
    # By their numbers: with a count every container would get the first ones.
    gpu = {"driver": "nvidia", "device_ids": list(gpus), "capabilities": ["gpu"]}
    resources = without_none({"limits": limits, "reservations": {"devices": [gpu]} if gpus else None})
    return {"resources": resources} if resources else None


def _secret_mounts(pipeline: Inside, name: str) -> list[Mapping] | None:
    if not pipeline.uses_api_keys or name != COORDINATOR:
        return None
    return [{"source": pipeline.part("api-keys"), "target": inside.API_KEYS_FILE}]


def _credential(pipeline: Inside, name: str) -> Mapping:
    """Return the mount of a process's own directory: the whole directory, so that renewed and revoked credentials
    appear in it.
    """
    source = f"./{pipeline.authority}/{name}"
    bind = {"create_host_path": False}  # a missing one is an error, not an empty directory of root's
    return {"type": "bind", "source": source, "target": pipeline.credential_dir, "read_only": True, "bind": bind}
