"""A gateway in Kubernetes: the objects of every pipeline behind it, and one Deployment with a Service in front."""

from __future__ import annotations

import hashlib
import re

from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.deploy.render import cluster, inside, kubernetes, pods
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
from relayline.wire.common.errors import UsageError

TARGET = kubernetes.TARGET


def render(gateway: GatewayManifest, pipelines: tuple[Behind, ...]) -> dict[str, str]:
    """Return the files by name: the gateway's, and those of each pipeline in a directory of its name.

    Raises UsageError for pipelines that cannot be rendered, that are in several namespaces or share credentials, and
    for names that Kubernetes would refuse.
    """
    urls = {each.name: f"http://{each.manifest.name}" for each in pipelines if each.manifest is not None}
    front = Front(gateway, pipelines, urls)
    check_pipelines(front.rendered)
    _check_together(front)
    documents = [
        ("The gateway's manifest: every pipeline by the address of its Service.", _config(front)),
        ("", _deployment(front)),
        ("", _service(front)),
    ]
    if front.deployment.network_policy:
        documents.append(("The API is open.", _policy(front)))
    documents += [("Prometheus reads the gateway.", monitor) for monitor in _monitors(front)]
    files = {"gateway.yaml": yaml_file(TARGET, gateway.name, _explanation(front), documents, "Gateway")}
    for name, manifest in front.rendered:
        try:
            made = kubernetes.render(manifest, own=name)
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}") from error
        files |= {f"{name}/{file}": text for file, text in made.items()}
    return files


def _check_together(front: Front) -> None:
    """Raise UsageError for combinations that the pipelines of one deployment cannot have."""
    name = front.gateway.name
    if not re.match("[a-z]", name):
        raise UsageError(f"metadata.name {name!r} begins with a digit; Kubernetes wants a letter for Services")
    namespaces = {manifest.spec.deployment.namespace: member for member, manifest in front.rendered}
    if len(namespaces) > 1:
        (first, one), (second, other) = [*namespaces.items()][:2]
        differs = f"{one} has deployment.namespace {first or 'unset'}, {other} {second or 'unset'}"
        raise UsageError(f"{differs}; pipelines behind one gateway are rendered into one namespace")
    prefixes: dict[str, str] = {}
    for member, manifest in front.rendered:
        secrets = manifest.spec.deployment.secrets
        for prefix in filter(None, (secrets.tls, secrets.token)):
            if (other := prefixes.setdefault(prefix, member)) != member:
                raise UsageError(
                    f"{other} and {member} would share the credentials {prefix!r}; leave deployment.secrets out, then "
                    "each has its own"
                )


def _metadata(front: Front, name: str) -> Mapping:
    labels = pods.labels(front.gateway.name, GATEWAY, kubernetes.version(), front.gateway.metadata.labels)
    return without_none({"name": name, "namespace": front.deployment.namespace, "labels": labels})


def _config(front: Front) -> Mapping:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(front, f"{front.gateway.name}-manifest"),
        "data": {"gateway.yaml": front.manifest_text()},
    }


def _service(front: Front) -> Mapping:
    name = front.gateway.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(front, name),
        "spec": {
            "selector": pods.selector(name, GATEWAY),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _policy(front: Front) -> Mapping:
    name = front.gateway.name
    return cluster.policy(_metadata(front, name), pods.selector(name, GATEWAY), [cluster.allow(inside.HTTP_PORT)])


def _monitors(front: Front) -> list[Mapping]:
    monitoring, name = front.deployment.monitoring, front.gateway.name
    if not monitoring.pod_monitor:
        return []
    metadata = _metadata(front, name)
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": metadata | {"labels": {**monitoring.labels, **metadata["labels"]}},
            "spec": {
                "selector": {"matchLabels": pods.selector(name, GATEWAY)},
                "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
            },
        }
    ]


def _deployment(front: Front) -> Mapping:
    name = front.gateway.name
    metadata = _metadata(front, name)
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(inside.HTTP_PORT),
        # Its pod is replaced when its manifest changes.
        "relayline.dev/manifest-sha256": hashlib.sha256(front.manifest_text().encode()).hexdigest(),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": pods.selector(name, GATEWAY)},
            "template": {
                "metadata": {"labels": metadata["labels"], "annotations": annotations},
                "spec": _pod(front),
            },
        },
    }


def _pod(front: Front) -> Mapping:
    deployment, manifest = front.deployment, f"{front.gateway.name}-manifest"
    volumes: list[Mapping] = [
        {"name": "manifest", "configMap": {"name": manifest}},
        {"name": "tmp", "emptyDir": {"sizeLimit": pods.TMP_BYTES_MAX}},
    ]
    mounts: list[Mapping] = [
        {"name": "manifest", "mountPath": MANIFEST_FILE, "subPath": "gateway.yaml", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if front.uses_api_keys:
        volumes.append(pods.secret_volume("api-keys", _keys_secret(front), {"keys": "keys"}))
        mounts.append({"name": "api-keys", "mountPath": inside.API_KEYS_DIR, "readOnly": True})
    for pipeline in front.pipelines:
        if files := front.needs(pipeline):
            volume = f"backend-{pipeline.name}"
            volumes.append(pods.secret_volume(volume, _backend_secret(front, pipeline), {key: key for key in files}))
            mounts.append({"name": volume, "mountPath": f"{BACKENDS_DIR}/{pipeline.name}", "readOnly": True})
    container = pods.hardened(
        {
            "name": GATEWAY,
            "image": front.image,
            "imagePullPolicy": deployment.image_pull_policy,
            "args": front.command(),
            "ports": [{"name": "http", "containerPort": inside.HTTP_PORT}],
            "startupProbe": pods.probe(pods.http_check("/live"), failures=6),
            "readinessProbe": pods.probe(pods.http_check("/health"), failures=2),
            "livenessProbe": pods.probe(pods.http_check("/live"), failures=6),
            "lifecycle": {"preStop": {"sleep": {"seconds": pods.PRE_STOP_S}}},
            "resources": pods.resources(pods.Need(1), deployment.gpu_resource),
            "volumeMounts": mounts,
        }
    )
    return without_none(
        {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": inside.COORDINATOR_GRACE_S + pods.PRE_STOP_S,
            "securityContext": pods.pod_security(),
            "imagePullSecrets": [{"name": secret} for secret in deployment.image_pull_secrets],
            "tolerations": pods.tolerations(deployment.tolerations),
            "containers": [container],
            "volumes": volumes,
        }
    )


def _keys_secret(front: Front) -> str:
    return f"{front.gateway.name}-api-keys"


def _backend_secret(front: Front, pipeline: Behind) -> str:
    """Return the secret with which a pipeline is asked; one of this deployment has its clients' keys there."""
    if pipeline.manifest is None:
        return f"{front.gateway.name}-{pipeline.name}-backend"
    return pods.keys_secret(pipeline.manifest)


def _explanation(front: Front) -> str:
    namespace = front.deployment.namespace
    kubectl = f"kubectl -n {namespace}" if namespace else "kubectl"
    make = f"{kubectl} create secret generic"
    lines = []
    if front.uses_api_keys:
        lines.append(f"  {make} {_keys_secret(front)} --from-file=keys=api-keys   # a file with one API key per line")
    for pipeline in front.pipelines:
        files = front.needs(pipeline)
        if pipeline.manifest is None and files:
            sources = {KEYS_FILE: f"{KEYS_FILE}=key-{pipeline.name}", CA_FILE: f"{CA_FILE}=ca-{pipeline.name}.pem"}
            what = " ".join(f"--from-file={sources[file]}" for file in files)
            lines.append(f"  {make} {_backend_secret(front, pipeline)} {what}   # of {pipeline.member.place.url}")
    begin = ["", "No secret is in these files. Once, before they are applied:", *lines] if lines else [""]
    if namespace and lines:
        begin.insert(2, f"  kubectl create namespace {namespace}   # unless it is there")
    heads = [f"{name}/config.yaml" for name, _ in front.rendered]
    if heads:
        begin.append(
            "Each pipeline has credentials of its own. The heads of these files say how to make them, all in the"
        )
        begin.append(f"directory of this file: {', '.join(heads)}")
    return "\n".join(begin)
