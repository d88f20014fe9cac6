"""The objects of a cluster besides the pipeline's own pods: network policies, certificates, monitoring, model files.
Only the network policies are made by default. cert-manager and the Prometheus operator have resource types of their
own, so their objects are rendered only where the manifest asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import yaml

from relayline.deploy.manifest.model import JOIN_PORT, METRICS_PORT, STAGE_PORT
from relayline.deploy.render import inside, observability, pods
from relayline.deploy.render.document import Mapping, header, without_none
from relayline.deploy.render.inside import Inside
from relayline.wire.links.roles import Identity, Role
from relayline.wire.links.security import credential_host

KUSTOMIZATION_FILE = "kustomization.yaml"
RENEW_SHARE = 3  # cert-manager renews a certificate when a third of its time is left
MONITOR = "prometheus"
WAIT_EVERY_S = 5
# Of containers that only prepare: a name space with a quota takes no container without them.
FETCH_RESOURCES: Mapping = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
WAIT_RESOURCES: Mapping = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_LOOPBACK = ["127.0.0.1", "::1"]


def network_policies(pipeline: Inside, metadata: Mapping, stage_metadata: Mapping) -> list[tuple[str, Mapping]]:
    """Return who may connect to coordinator and stages.

    Stages get frames from pods of this pipeline alone. Metrics and the API stay open: a monitor is in another
    namespace, and clients may be anywhere. Certificates and keys protect them.
    """
    name = pipeline.manifest.name
    own = [{"podSelector": {"matchLabels": pods.selector(name)}}]
    stages = [{"podSelector": {"matchLabels": pods.selector(name, pods.STAGE)}}]
    coordinator = [allow(inside.HTTP_PORT), allow(JOIN_PORT, stages)]
    return [
        ("Stages take frames from pods of this pipeline alone; metrics are open.",
         policy(stage_metadata, pods.selector(name, pods.STAGE), [allow(STAGE_PORT, own), allow(METRICS_PORT)])),
        ("Stages may join; the API is open.",
         policy(metadata, pods.selector(name, pods.COORDINATOR), coordinator)),
    ]  # fmt: skip


def policy(metadata: Mapping, selector: Mapping, ingress: list[Mapping]) -> Mapping:
    """Return a NetworkPolicy for the pods that the selector finds."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def allow(port: int, sources: list[Mapping] | None = None) -> Mapping:
    """Return the rule that lets `sources` connect to a port; None: anybody."""
    return without_none({"from": sources, "ports": [{"protocol": "TCP", "port": port}]})


def certificate(pipeline: Inside, metadata: Mapping, process: str, role: Role, host: str, stage: str) -> Mapping:
    """Return a cert-manager Certificate for one process. It states the role as `relayline certs issue` does: in a URI.

    `host`: the name under which the process is reached; a wildcard is allowed. Raises ValueError without certManager.
    """
    issuer = pipeline.manifest.spec.deployment.cert_manager
    if issuer is None:
        raise ValueError("the manifest names no issuer")
    hours = issuer.days * 24
    return {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": metadata,
        "spec": {
            "secretName": pods.credential_secret(pipeline, process),
            "duration": f"{hours}h",
            "renewBefore": f"{hours // RENEW_SHARE}h",
            "privateKey": {"algorithm": "ECDSA", "size": 256, "encoding": "PKCS8", "rotationPolicy": "Always"},
            "usages": ["digital signature", "server auth", "client auth"],
            "dnsNames": [host, "localhost"],
            "ipAddresses": _LOOPBACK,
            "uris": [Identity(role, credential_host(host), stage).uri],
            "issuerRef": {"name": issuer.issuer, "kind": issuer.kind, "group": "cert-manager.io"},
        },
    }


def monitoring(pipeline: Inside, metadata: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Yield the objects of the Prometheus operator that the manifest asks for."""
    wanted = pipeline.manifest.spec.deployment.monitoring
    labelled = metadata | {"labels": {**wanted.labels, **metadata["labels"]}}
    if wanted.pod_monitor:
        yield "Prometheus reads the coordinator and every stage.", _pod_monitor(pipeline, labelled)
    if wanted.rules:
        yield (
            "Alerts, the same as in deploy/observability.",
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PrometheusRule",
                "metadata": labelled,
                "spec": observability.alert_rules(),
            },
        )


def _pod_monitor(pipeline: Inside, metadata: Mapping) -> Mapping:
    endpoints: list[Mapping] = [{"port": "http", "path": "/metrics"}]
    stage: Mapping = {"port": "metrics", "path": "/metrics"}
    if pipeline.uses_tls:
        secret = pods.credential_secret(pipeline, MONITOR)
        ca, cert, key = pods.credential_keys(pipeline)[:3]
        tls = {
            "ca": {"secret": {"name": secret, "key": ca}},
            "cert": {"secret": {"name": secret, "key": cert}},
            "keySecret": {"name": secret, "key": key},
            "serverName": "localhost",  # pods are scraped by address; every certificate has this name too
        }
        stage |= {"scheme": "https", "tlsConfig": tls}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": pods.selector(pipeline.manifest.name)},
            "podMetricsEndpoints": [*endpoints, stage],
        },
    }


def fill_container(pipeline: Inside, source: str) -> Mapping:
    """Return the container that loads the model into the models volume; it does nothing where the model is there."""
    secrets = pipeline.manifest.spec.deployment.secrets
    env: list[Mapping] = [{"name": "HF_HOME", "value": f"{inside.MODELS_DIR}/.huggingface"}]
    if secrets.hf_token is not None:
        env.append(pods.hub_token(secrets.hf_token))
    return {
        "name": "fetch-model",
        "image": pipeline.image(),
        "imagePullPolicy": pipeline.manifest.spec.deployment.image_pull_policy,
        "args": ["pull", source, "--to", inside.MODELS_DIR],
        "env": env,
        "resources": FETCH_RESOURCES,
    }


def wait_container(pipeline: Inside) -> Mapping:
    """Return the container that waits until the model is in the models volume: a Job puts it there."""
    path = f"{inside.MODELS_DIR}/{PurePosixPath(pipeline.manifest.spec.model.path or '').name}"
    script = f"import os, time\nwhile not os.path.exists({path!r}): time.sleep({WAIT_EVERY_S})"
    return {
        "name": "wait-for-model",
        "image": pipeline.image(),
        "imagePullPolicy": pipeline.manifest.spec.deployment.image_pull_policy,
        "command": ["python3", "-c", script],
        "resources": WAIT_RESOURCES,
    }


def kustomization(name: str, target: str, namespace: str | None, files: Iterable[str], kind: str = "Pipeline") -> str:
    """Return kustomization.yaml: the rendered files as a base, for `kubectl apply -k` and for overlays."""
    document = without_none(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "resources": list(files),
        }
    )
    text: str = yaml.safe_dump(document, sort_keys=False)
    return header(target, name, kind) + text
