"""Plain Kubernetes YAML: a Deployment for the coordinator, one StatefulSet per stage, and the objects they need.

One StatefulSet per stage, of one pod each, because stages are unequal: each has its own resources, device, nodes and
certificate, and keeps its artifact in its own volume over restarts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from relayline.deploy.manifest.model import JOIN_PORT, METRICS_PORT, STAGE_PORT, Manifest
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.render import cluster, inside, pods
from relayline.deploy.render.document import Mapping, without_none, yaml_file
from relayline.deploy.render.inside import Inside, check_names
from relayline.wire.common.errors import UsageError
from relayline.wire.common.versions import version_of
from relayline.wire.links.roles import MONITOR_DIR, Role

TARGET = "kubernetes"
# A StatefulSet's name plus a hash of 11 characters is a label value of its pods.
NAME_CHARS_MAX = 63 - 11
TAKEN = frozenset({"coordinator", "join", "stages", "manifest", "models", "state", cluster.MONITOR})


def render(manifest: Manifest, own: str = "") -> dict[str, str]:
    """Return the files by name, in the order in which they should be applied. `own`: its name behind a gateway.

    Raises UsageError for several replicas and for names that Kubernetes would refuse.
    """
    if manifest.spec.deployment.replicas > 1:
        raise UsageError("deployment.replicas needs --target leaderworkerset; plain Kubernetes runs one pipeline")
    check_names(manifest, TAKEN)
    check_lengths(manifest, [stage.name for stage in manifest.stages])
    pipeline = Inside(manifest, join_service(manifest), lambda stage: _pod_host(manifest, stage), own=own)
    stages = [("", _headless(pipeline)), *(("", _stage_set(pipeline, stage)) for stage in manifest.stages)]
    around = surroundings(pipeline)
    if uses_cert_manager(pipeline):
        around += certificates(pipeline, join_service(manifest), pipeline.stage_host)
    ready = api_service(pipeline, manifest.name, pods.selector(manifest.name, pods.COORDINATOR))
    coordinator = [("", _coordinator_deployment(pipeline)), ("", ready), (_JOIN_NOTE, _join_service(pipeline))]
    files = {
        "config.yaml": yaml_file(
            TARGET, manifest.name, explanation(pipeline, _secret_lines(pipeline)), config(pipeline)
        ),
        "coordinator.yaml": yaml_file(TARGET, manifest.name, "", coordinator),
        "stages.yaml": yaml_file(TARGET, manifest.name, "", stages),
    }
    return files | ({"cluster.yaml": yaml_file(TARGET, manifest.name, "", around)} if around else {})


_JOIN_NOTE = "Stages join before the coordinator is ready: it is ready when they have joined."


def version() -> str:
    """Return relayline's version as a label value."""
    return version_of().replace("+", "-")


def check_lengths(manifest: Manifest, parts: list[str]) -> None:
    """Raise UsageError for names that are too long together, or begin with a digit, which Services refuse."""
    if not re.match("[a-z]", manifest.name):
        raise UsageError(f"metadata.name {manifest.name!r} begins with a digit; Kubernetes wants a letter for Services")
    for part in (*parts, "coordinator"):
        name = f"{manifest.name}-{part}"
        if len(name) > NAME_CHARS_MAX:
            raise UsageError(
                f"{name!r} is longer than {NAME_CHARS_MAX} characters; shorten metadata.name or the stage's"
            )


def join_service(manifest: Manifest) -> str:
    """Return the name of the Service at which stages join."""
    return f"{manifest.name}-join"


def _pod_host(manifest: Manifest, stage: Stage) -> str:
    return f"{manifest.name}-{stage.name}-0.{manifest.name}-stages"


def metadata(pipeline: Inside, name: str, component: str, extra: Mapping | None = None) -> Mapping:
    """Return the metadata of one of the pipeline's objects."""
    own = {**pipeline.manifest.metadata.labels, **(extra or {})}
    return without_none(
        {
            "name": name,
            "namespace": pipeline.manifest.spec.deployment.namespace,
            "labels": pods.labels(pipeline.manifest.name, component, version(), own),
        }
    )


def pod_metadata(pipeline: Inside, component: str, extra: Mapping | None = None) -> Mapping:
    """Return a pod template's metadata. The coordinator's pods are replaced when its manifest changes."""
    own = {**pipeline.manifest.metadata.labels, **(extra or {})}
    port = inside.HTTP_PORT if component == pods.COORDINATOR else METRICS_PORT
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}
    if component != pods.COORDINATOR and pipeline.uses_tls:
        annotations["prometheus.io/scheme"] = "https"
    if component == pods.COORDINATOR:
        digest = hashlib.sha256(pipeline.manifest_text().encode()).hexdigest()
        annotations["relayline.dev/manifest-sha256"] = digest
    return {"labels": pods.labels(pipeline.manifest.name, component, version(), own), "annotations": annotations}


def surroundings(pipeline: Inside) -> list[tuple[str, Mapping]]:
    """Return the cluster's objects besides the pods and certificates."""
    name, found = pipeline.manifest.name, []
    if pipeline.manifest.spec.deployment.network_policy:
        coordinator = metadata(pipeline, f"{name}-{pods.COORDINATOR}", pods.COORDINATOR)
        found += cluster.network_policies(pipeline, coordinator, metadata(pipeline, f"{name}-stages", pods.STAGE))
    return [*found, *cluster.monitoring(pipeline, metadata(pipeline, name, "pipeline"))]


def uses_cert_manager(pipeline: Inside) -> bool:
    """Whether cert-manager makes the certificates."""
    return pipeline.uses_tls and pipeline.manifest.spec.deployment.cert_manager is not None


def certificates(
    pipeline: Inside, coordinator_host: str, stage_host: Callable[[Stage], str]
) -> list[tuple[str, Mapping]]:
    """Return cert-manager's Certificates of every process, and of the monitor where one is wanted."""

    def one(process: str, role: Role, host: str, stage: str = "") -> tuple[str, Mapping]:
        described = metadata(pipeline, pods.credential_secret(pipeline, process), process if not stage else pods.STAGE)
        return "", cluster.certificate(pipeline, described, process, role, host, stage)

    found = [one(pods.COORDINATOR, Role.COORDINATOR, coordinator_host)]
    found += [one(stage.name, Role.STAGE, stage_host(stage), stage.name) for stage in pipeline.manifest.stages]
    if pipeline.manifest.spec.deployment.monitoring.pod_monitor:
        found.append(one(cluster.MONITOR, Role.MONITOR, cluster.MONITOR))
    return found


def explanation(pipeline: Inside, secret_lines: list[str]) -> str:
    """Return how to make the secrets that the rendered objects refer to, and what else has to be there first."""
    deployment = pipeline.manifest.spec.deployment
    namespace = deployment.namespace
    kubectl = f"kubectl -n {namespace}" if namespace else "kubectl"
    make = f"{kubectl} create secret generic"
    lines, tls = ["", "No secret is in these files. Once, before they are applied:"], pipeline.authority
    if namespace:
        lines.append(f"  kubectl create namespace {namespace}   # unless it is there")
    if not uses_cert_manager(pipeline):
        lines.append(f"  relayline certs init {tls} --name {pipeline.manifest.name}")
        lines += [f"  {line.replace('KUBECTL', make)}" for line in secret_lines]
        if pipeline.uses_tls and deployment.monitoring.pod_monitor:
            secret = pods.credential_secret(pipeline, cluster.MONITOR)
            lines.append(f"  relayline certs issue {tls} {cluster.MONITOR} --monitor")
            lines.append(f"  {make} {secret} --from-file={tls}/{MONITOR_DIR}")
    if pipeline.uses_api_keys:
        name = pods.keys_secret(pipeline.manifest)
        lines.append(f"  {make} {name} --from-file=keys={pipeline.keys_file}   # a file with one API key per line")
    if pipeline.mounts_models and deployment.storage.fill is None:
        lines += [f"Put the model's file(s) into the volume of the claim {pods.models_claim(pipeline)}, at its top."]
    if uses_cert_manager(pipeline):
        return "\n".join([*lines, "cert-manager makes the certificates; its issuer must be there."])
    advice = "make the coordinator's secret again: the coordinator tells the stages."
    lines.append(f"After `relayline certs revoke {tls} ...` {advice}")
    if pipeline.uses_tls and not deployment.monitoring.pod_monitor:
        monitor = f"relayline certs issue {tls} prometheus --monitor"
        lines.append(f"A Prometheus reads stages' metrics over TLS: {monitor}")
    return "\n".join(lines)


def _secret_lines(pipeline: Inside) -> list[str]:
    coordinator, tls = pipeline.coordinator_host, pipeline.authority
    lines = [f"relayline certs issue {tls} {coordinator} --coordinator", from_files(pipeline, pods.COORDINATOR)]
    for stage in pipeline.manifest.stages:
        lines.append(f"relayline certs issue {tls} {pipeline.stage_host(stage)} --stage {stage.name}")
        lines.append(from_files(pipeline, stage.name))
    return lines


def from_files(pipeline: Inside, process: str) -> str:
    """Return how to make the secret of one process from its directory."""
    source = f"{pipeline.authority}/{process}" + ("" if pipeline.uses_tls else "/token")
    return f"KUBECTL {pods.credential_secret(pipeline, process)} --from-file={source}"


def config(pipeline: Inside, *, is_shared: bool = False) -> list[tuple[str, Mapping]]:
    """Return the manifest's ConfigMap, the disruption budget and the coordinator's claims.

    `is_shared`: several coordinators read one models volume and keep their own state in volumes of their pods.
    """
    name, storage = pipeline.manifest.name, pipeline.manifest.spec.deployment.storage
    documents: list[tuple[str, Mapping]] = [
        (
            "The manifest as the coordinator sees it: hosts and paths of this deployment.",
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata(pipeline, f"{name}-manifest", pods.COORDINATOR),
                "data": {"pipeline.yaml": pipeline.manifest_text()},
            },
        ),
        (
            "Nodes are drained one pod at a time: sessions survive the loss of one stage, and wait for it. "
            "Pods that are not ready never hold a node.",
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": metadata(pipeline, name, "pipeline"),
                "spec": {
                    "maxUnavailable": 1,
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",  # else a stage that does not come up holds its node
                    "selector": {"matchLabels": pods.selector(name)},
                },
            },
        ),
    ]
    if not is_shared:
        documents.append(
            ("The coordinator's files: the split, models from the hub.", _claim(pipeline, "state", storage.model_gib))
        )
        if pipeline.kept_gib:
            about = "What the coordinator keeps for clients: responses, batches. To remove the claim is to forget them."
            documents.append((about, _claim(pipeline, "kept", pipeline.kept_gib)))
    if pipeline.mounts_models:
        mode = "ReadWriteMany" if is_shared else "ReadWriteOnce"
        documents.append(("The model's file(s).", _claim(pipeline, "models", storage.model_gib, mode)))
    return documents


def _claim(pipeline: Inside, part: str, size_gib: float, mode: str = "ReadWriteOnce") -> Mapping:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(pipeline, f"{pipeline.manifest.name}-{part}", pods.COORDINATOR),
        "spec": pods.claim_spec(pipeline, size_gib, mode),
    }


def api_service(pipeline: Inside, name: str, selector: Mapping) -> Mapping:
    """Return the Service that clients use: only coordinators that are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pipeline, name, pods.COORDINATOR),
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }


def _join_service(pipeline: Inside) -> Mapping:
    name = pipeline.manifest.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pipeline, join_service(pipeline.manifest), pods.COORDINATOR),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pods.selector(name, pods.COORDINATOR),
            "ports": [{"name": "join", "port": JOIN_PORT, "targetPort": "join"}],
        },
    }


def _coordinator_deployment(pipeline: Inside) -> Mapping:
    name = pipeline.manifest.name
    state = {"persistentVolumeClaim": {"claimName": f"{name}-state"}}
    kept = {"persistentVolumeClaim": {"claimName": f"{name}-kept"}} if pipeline.kept_gib else None
    source = pipeline.manifest.spec.deployment.storage.fill
    # No Job: the volume can be mounted on one node at a time, and the coordinator's pod may be there already.
    before = [cluster.fill_container(pipeline, source)] if pipeline.mounts_models and source else []
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(pipeline, f"{name}-coordinator", pods.COORDINATOR),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two coordinators would fight for the same stages
            "selector": {"matchLabels": pods.selector(name, pods.COORDINATOR)},
            "template": {
                "metadata": pod_metadata(pipeline, pods.COORDINATOR),
                "spec": pods.coordinator_spec(pipeline, state=state, kept=kept, before=before),
            },
        },
    }


def _headless(pipeline: Inside) -> Mapping:
    name = pipeline.manifest.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pipeline, f"{name}-stages", pods.STAGE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pods.selector(name, pods.STAGE),
            "ports": [
                {"name": "grpc", "port": STAGE_PORT, "targetPort": "grpc"},
                {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
            ],
        },
    }


def _stage_set(pipeline: Inside, stage: Stage) -> Mapping:
    name = pipeline.manifest.name
    own = {"relayline.dev/stage": stage.name}
    args = pipeline.stage_command(join=pipeline.coordinator_host, name=stage.name, advertise=pipeline.stage_host(stage))
    need = pods.Need(stage.threads, stage.container_memory_gib, stage.n_gpus)
    pod = pods.stage_spec(pipeline, args, need, process=stage.name, state=None)
    pod = pods.on_nodes(pod, stage, pipeline)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pipeline, f"{name}-{stage.name}", pods.STAGE, {**stage.labels, **own}),
        "spec": {
            "replicas": 1,
            "serviceName": f"{name}-stages",
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {**pods.selector(name, pods.STAGE), **own}},
            "template": {"metadata": pod_metadata(pipeline, pods.STAGE, {**stage.labels, **own}), "spec": pod},
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "state"},
                    "spec": pods.claim_spec(pipeline, pipeline.manifest.spec.deployment.storage.stage_gib),
                }
            ],
        },
    }
