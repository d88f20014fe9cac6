"""A gateway in Compose: every process of every pipeline behind it as a service of one machine, and the gateway."""

from __future__ import annotations

from collections.abc import Mapping as Names

from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.deploy.render import compose, inside, observability
from relayline.deploy.render.compose import COORDINATOR
from relayline.deploy.render.document import Mapping, without_none, yaml_file
from relayline.deploy.render.front import (
    BACKENDS_DIR,
    CA_FILE,
    GATEWAY,
    KEYS_FILE,
    MANIFEST_FILE,
    Front,
    check_pipelines,
)
from relayline.deploy.render.inside import Inside, check_names
from relayline.wire.common.errors import UsageError

TARGET = compose.TARGET


def render(gateway: GatewayManifest, pipelines: tuple[Behind, ...], models_dirs: Names[str, str]) -> str:
    """Return compose.yaml. `models_dirs`: of each pipeline's model by the pipeline's name, as seen from that file.

    Raises UsageError for pipelines that cannot be rendered, and for services that would have the same name.
    """
    urls = {
        each.name: f"http://{each.name}-{COORDINATOR}:{inside.HTTP_PORT}"
        for each in pipelines
        if each.manifest is not None
    }
    front = Front(gateway, pipelines, urls)
    check_pipelines(front.rendered)
    parts = [_inside(name, manifest) for name, manifest in front.rendered]
    for part in parts:
        check_names(part.manifest, frozenset({COORDINATOR}))
    _check_names(parts)
    document = {"name": gateway.name, **compose.one_machine(parts, [models_dirs[part.own] for part in parts], GATEWAY)}
    document["services"] = {GATEWAY: _service(front), **document["services"]}
    document["configs"] = {GATEWAY: {"content": front.manifest_text()}, **document["configs"]}
    secrets = _secrets(front) | document.get("secrets", {})
    if secrets:
        document["secrets"] = secrets
    compose.escape_configs(document)
    text = compose.explanation(parts, _secret_lines(front))
    return yaml_file(TARGET, gateway.name, text, [("", document)], "Gateway")


def _inside(name: str, manifest: Manifest) -> Inside:
    return Inside(manifest, f"{name}-{COORDINATOR}", lambda stage: f"{name}-{stage.name}", own=name)


def _check_names(parts: list[Inside]) -> None:
    """Raise UsageError if services of two pipelines would have the same name."""
    taken = dict.fromkeys((GATEWAY, *observability.SERVICES), "the deployment")
    for part in parts:
        for name in (COORDINATOR, *(stage.name for stage in part.manifest.stages)):
            service = part.part(name)
            if (other := taken.setdefault(service, part.own)) != part.own:
                raise UsageError(f"{part.own} and {other} would both have a service {service!r}; rename a stage")


def _service(front: Front) -> Mapping:
    http = front.gateway.spec.http
    published = {
        "target": inside.HTTP_PORT,
        "published": str(http.port) if http.port else None,
        "host_ip": "127.0.0.1" if http.host == "localhost" else http.host,
    }
    secrets = [{"source": "api-keys", "target": inside.API_KEYS_FILE}] if front.uses_api_keys else []
    for pipeline in front.pipelines:
        for file in front.needs(pipeline):
            target = f"{BACKENDS_DIR}/{pipeline.name}/{file}"
            secrets.append({"source": _secret(pipeline, file), "target": target})
    return without_none(
        {
            **compose.base_service(front.image),
            "command": front.command(),
            "ports": [without_none(published)],
            "configs": [{"source": GATEWAY, "target": MANIFEST_FILE}],
            "secrets": secrets,
            "depends_on": {f"{name}-{COORDINATOR}": {"condition": "service_started"} for name, _ in front.rendered},
            "healthcheck": compose.healthcheck(),
            "stop_grace_period": f"{inside.COORDINATOR_GRACE_S}s",
            "labels": dict(front.gateway.metadata.labels),
        }
    )


def _secret(pipeline: Behind, file: str) -> str:
    """Return the name of a secret with which a pipeline is asked; one of this deployment has its clients' keys."""
    if pipeline.manifest is not None:
        return f"{pipeline.name}-api-keys"
    return f"{pipeline.name}-{'key' if file == KEYS_FILE else 'ca'}"


def _source(pipeline: Behind, file: str) -> str:
    return f"./key-{pipeline.name}" if file == KEYS_FILE else f"./ca-{pipeline.name}.pem"


def _secrets(front: Front) -> Mapping:
    """Return the gateway's own secrets."""
    own: Mapping = {"api-keys": {"file": "./api-keys"}} if front.uses_api_keys else {}
    for pipeline in front.pipelines:
        if pipeline.manifest is None:
            own |= {_secret(pipeline, file): {"file": _source(pipeline, file)} for file in front.needs(pipeline)}
    return own


def _secret_lines(front: Front) -> list[str]:
    lines = ["  put one API key of the gateway per line into ./api-keys"] if front.uses_api_keys else []
    what = {KEYS_FILE: "an API key", CA_FILE: "the certificates (PEM)"}
    for pipeline in front.pipelines:
        if pipeline.manifest is None:
            lines += [
                f"  put {what[file]} of {pipeline.member.place.url} into {_source(pipeline, file)}"
                for file in front.needs(pipeline)
            ]
    return lines
