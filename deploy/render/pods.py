"""Pod templates of coordinator and stages, the same in plain Kubernetes and in a LeaderWorkerSet.

Probes of a stage: without TLS the standard gRPC health service. With mutual TLS the kubelet, which has no certificate,
could not ask it, nor for metrics; it connects to the stage's port instead, which is open only while the stage serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from relayline.deploy.manifest.deployment import Toleration
from relayline.deploy.manifest.model import JOIN_PORT, METRICS_PORT, STAGE_PORT, Manifest
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.render import inside
from relayline.deploy.render.document import Mapping, without_none
from relayline.deploy.render.inside import Inside

COORDINATOR = "coordinator"
STAGE = "stage"
PRE_STOP_S = 5  # until every node has heard that the pod takes no new requests
SECRET_MODE = 0o440
CERT_MANAGER_KEYS = ("ca.crt", "tls.crt", "tls.key")  # of a secret made by cert-manager; it has no join token
STAGE_FAILURES_MAX = 60  # probes, ten minutes; then it restarts, with the bytes fetched so far


TMP_BYTES_MAX = "1Gi"  # of a pod's /tmp, which holds nothing but what libraries leave for a moment
GPU_HOST_MEMORY = "4Gi"  # requested on the host for a stage on a GPU, and no limit: its weights pass through


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The resources that a stage's pod requests from its node."""

    threads: int = 0
    """Cores; 0 asks for one."""
    memory_gib: float | None = None
    """Memory, requested and limited; None for no limit, and with a GPU GPU_HOST_MEMORY."""
    n_gpus: int = 0
    """GPUs."""

    @property
    def on_gpu(self) -> bool:
        """Whether it needs a GPU."""
        return self.n_gpus > 0


def resources(need: Need, gpu_resource: str) -> Mapping:
    """Return a container's resources. CPU is requested and never limited: throttled threads stall every step."""
    memory = None if need.memory_gib is None else f"{round(need.memory_gib * 1024)}Mi"
    gpu = {gpu_resource: str(need.n_gpus)} if need.on_gpu else {}
    requested = GPU_HOST_MEMORY if memory is None and need.on_gpu else memory
    requests = without_none({"cpu": str(need.threads or 1), "memory": requested, **gpu})
    return without_none({"requests": requests, "limits": without_none({"memory": memory, **gpu})})


def labels(name: str, component: str, version: str, extra: Mapping | None = None) -> Mapping:
    """Return the recommended labels of Kubernetes; the user's own come first and cannot replace them."""
    return {**(extra or {}), **selector(name, component), "app.kubernetes.io/version": version,
            "app.kubernetes.io/part-of": "relayline", "app.kubernetes.io/managed-by": "relayline"}  # fmt: skip


def selector(name: str, component: str | None = None) -> Mapping:
    """Return the labels that find a pipeline's pods, or one component's."""
    found = {"app.kubernetes.io/name": "relayline", "app.kubernetes.io/instance": name}
    return found if component is None else {**found, "app.kubernetes.io/component": component}


def coordinator_spec(pipeline: Inside, *, state: Mapping, kept: Mapping | None, before: Sequence[Mapping]) -> Mapping:
    """Return the coordinator's pod spec; `state` is the source of its state volume, `kept` of that with what it keeps
    for clients, if it does.

    `before`: containers that run first, with the models volume writable.
    """
    spec = pipeline.manifest.spec
    secrets = spec.deployment.secrets
    env: list[Mapping] = []
    if secrets.hf_token is not None:
        env.append(hub_token(secrets.hf_token))
    volumes = [_config_volume(pipeline), *_link_volumes(pipeline, COORDINATOR, ())]
    if pipeline.uses_api_keys:
        volumes.append(secret_volume("api-keys", keys_secret(pipeline.manifest), {"keys": "keys"}))
    mounts = [
        {"name": "manifest", "mountPath": str(inside.MANIFEST_FILE), "subPath": "pipeline.yaml", "readOnly": True}
    ]
    mounts += [_mount(volume["name"]) for volume in volumes[1:]]
    if pipeline.mounts_models:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": models_claim(pipeline)}})
        mounts.append({"name": "models", "mountPath": inside.MODELS_DIR, "readOnly": True})
    if kept is not None:
        volumes.append({"name": "kept", **kept})
        mounts.append({"name": "kept", "mountPath": inside.KEPT_DIR})
    container = {
        "name": COORDINATOR,
        "image": pipeline.image(),
        "args": pipeline.coordinator_command(),
        "env": env,
        "ports": [
            {"name": "http", "containerPort": inside.HTTP_PORT},
            {"name": "join", "containerPort": JOIN_PORT},
        ],
        "startupProbe": startup_probe(http_check("/live")),
        "readinessProbe": probe(http_check("/health"), failures=2),
        "livenessProbe": probe(http_check("/live"), failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "resources": resources(Need(1, spec.coordinator.memory_gib), spec.deployment.gpu_resource),
    }
    pod = _pod(pipeline, container, volumes, mounts, state, inside.COORDINATOR_GRACE_S + PRE_STOP_S)
    models = {"name": "models", "mountPath": inside.MODELS_DIR}
    tmp = {"name": "tmp", "mountPath": "/tmp"}
    first = [hardened(container | {"volumeMounts": [models, tmp]}) for container in before]
    return without_none({**pod, "initContainers": first})


def hub_token(secret: str) -> Mapping:
    """Return the variable with a Hugging Face token from a secret."""
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}


def stage_spec(
    pipeline: Inside,
    args: Sequence[str],
    need: Need,
    *,
    process: str,
    state: Mapping | None,
    workers: Sequence[str] = (),
) -> Mapping:
    """Return a stage's pod spec.

    `process` ends the name of its secret; without `state` a claim gives its volume. `workers`: names of the stages that
    share this template. Their secret has the files of all, and each container sees those of its worker index.
    """
    check = {"tcpSocket": {"port": "grpc"}} if pipeline.uses_tls else {"grpc": {"port": STAGE_PORT}}
    volumes = _link_volumes(pipeline, process, workers)
    container = {
        "name": STAGE,
        "image": pipeline.image(on_gpu=need.on_gpu),
        "args": list(args),
        # In a shared template the arguments say by these where the stage is reached.
        "env": [_field("POD_NAME", "metadata.name"), _field("POD_NAMESPACE", "metadata.namespace")] if workers else [],
        "ports": [{"name": "grpc", "containerPort": STAGE_PORT}, {"name": "metrics", "containerPort": METRICS_PORT}],
        "startupProbe": startup_probe(check),
        "readinessProbe": probe(check, failures=2),
        # A stage that joins again with another range closes its ports while it fetches and loads.
        "livenessProbe": probe(check, failures=STAGE_FAILURES_MAX),
        "resources": resources(need, pipeline.manifest.spec.deployment.gpu_resource),
    }
    mounts = [_mount(volume["name"]) for volume in volumes]
    if workers:
        mounts = [mount | {"subPathExpr": "stage-$(LWS_WORKER_INDEX)"} for mount in mounts]
    return _pod(pipeline, container, volumes, mounts, state, inside.STAGE_GRACE_S)


def claim_spec(pipeline: Inside, size_gib: float, mode: str = "ReadWriteOnce") -> Mapping:
    """Return the spec of a volume claim."""
    return without_none(
        {
            "accessModes": [mode],
            "storageClassName": pipeline.manifest.spec.deployment.storage.class_name,
            "resources": {"requests": {"storage": f"{round(size_gib * 1024)}Mi"}},
        }
    )


def models_claim(pipeline: Inside) -> str:
    """Return the name of the claim that holds the model's file."""
    return f"{pipeline.manifest.name}-models"


def keys_secret(manifest: Manifest) -> str:
    """Return the name of the secret with the API keys of a pipeline's clients."""
    return manifest.spec.deployment.secrets.api_keys or f"{manifest.name}-api-keys"


def credential_secret(pipeline: Inside, process: str) -> str:
    """Return the name of the secret with a process's certificate and join token, without TLS with the token alone."""
    secrets, name = pipeline.manifest.spec.deployment.secrets, pipeline.manifest.name
    prefix = (secrets.tls or f"{name}-tls") if pipeline.uses_tls else (secrets.token or f"{name}-join")
    return f"{prefix}-{process}"


def credential_keys(pipeline: Inside) -> tuple[str, ...]:
    """Return the keys of such a secret, in the order of `Inside.credential_files`; cert-manager has keys of its own."""
    if pipeline.uses_tls and pipeline.manifest.spec.deployment.cert_manager is not None:
        return CERT_MANAGER_KEYS
    return pipeline.credential_files


def spread(name: str) -> Mapping:
    """Return the affinity that puts a pipeline's pods on different nodes where there are enough.

    Preferred, not required: a pipeline that could not be scheduled at all for want of a node would be worse.
    """
    term = {"labelSelector": {"matchLabels": selector(name)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _pod(
    pipeline: Inside,
    container: Mapping,
    volumes: list[Mapping],
    mounts: list[Mapping],
    state: Mapping | None,
    grace_s: int,
) -> Mapping:
    """Put a container into a pod that is no one's root and can write nothing but its state and /tmp."""
    volumes = [*volumes, {"name": "tmp", "emptyDir": {"sizeLimit": TMP_BYTES_MAX}}]
    if state is not None:
        volumes.append({"name": "state", **state})
    mounts = [*mounts, {"name": "state", "mountPath": inside.STATE_DIR}, {"name": "tmp", "mountPath": "/tmp"}]
    deployment = pipeline.manifest.spec.deployment
    container = hardened(container | {"imagePullPolicy": deployment.image_pull_policy, "volumeMounts": mounts})
    pod: Mapping = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": pod_security(),
        "affinity": spread(pipeline.manifest.name),
        "imagePullSecrets": [{"name": secret} for secret in deployment.image_pull_secrets],
        "tolerations": tolerations(deployment.tolerations),
        "containers": [container],
        "volumes": volumes,
    }
    return without_none(pod)


def hardened(container: Mapping) -> Mapping:
    """Return a container that can gain no rights and write nothing outside its volumes."""
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return without_none({**container, "securityContext": security})


def pod_security() -> Mapping:
    """Return the security context of every pod: the image's own user, never root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": inside.USER_ID,
        "runAsGroup": inside.USER_ID,
        "fsGroup": inside.USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def tolerations(wanted: Sequence[Toleration]) -> list[Mapping]:
    """Return the tolerations of a pod, as Kubernetes writes them."""
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in wanted]


def on_nodes(pod: Mapping, stage: Stage, pipeline: Inside) -> Mapping:
    """Return a stage's pod with the rules for the nodes that it may run on."""
    deployment = pipeline.manifest.spec.deployment
    rules = {
        "nodeSelector": dict(stage.node_selector),
        "tolerations": tolerations((*deployment.tolerations, *stage.tolerations)),
        "runtimeClassName": deployment.gpu_runtime_class if stage.device == "gpu" else None,
    }
    return pod | without_none(rules)


def http_check(path: str) -> Mapping:
    """Return a probe's question to a path of the container's port `http`."""
    return {"httpGet": {"path": path, "port": "http"}}


def probe(check: Mapping, *, failures: int) -> Mapping:
    """Return a probe that acts after so many failures in a row."""
    return {**check, "periodSeconds": inside.PROBE_PERIOD_S, "timeoutSeconds": 5, "failureThreshold": failures}


def startup_probe(check: Mapping) -> Mapping:
    """Return the probe that waits for a start, which may load a model."""
    return probe(check, failures=inside.START_BUDGET_S // inside.PROBE_PERIOD_S)


def _field(name: str, path: str) -> Mapping:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


_MOUNT_PATHS = {"tls": inside.TLS_DIR, "join": inside.TOKEN_DIR, "api-keys": inside.API_KEYS_DIR}


def _mount(volume: str) -> Mapping:
    return {"name": volume, "mountPath": _MOUNT_PATHS[volume], "readOnly": True}


def _config_volume(pipeline: Inside) -> Mapping:
    return {"name": "manifest", "configMap": {"name": f"{pipeline.manifest.name}-manifest"}}


def worker_key(worker: str, file: str) -> str:
    """Return the key under which a secret of several stages has one's file."""
    return f"{worker}-{file}"


def _link_volumes(pipeline: Inside, process: str, workers: Sequence[str]) -> list[Mapping]:
    """Return the volume with a process's credential, or with those of all `workers` that share a pod template.

    Where only one process uses a secret of ours, the volume has the whole secret: a list of revoked credentials may be
    added to it later, and is seen without a restart.
    """
    volume, keys = "tls" if pipeline.uses_tls else "join", credential_keys(pipeline)
    files = pipeline.credential_files
    if keys is not CERT_MANAGER_KEYS:
        paths = {worker_key(worker, file): f"{worker}/{file}" for worker in workers for file in files}
        return [secret_volume(volume, credential_secret(pipeline, process), paths)]
    named = dict(zip(keys, files, strict=False))
    if not workers:
        return [secret_volume(volume, credential_secret(pipeline, process), named)]
    sources = [
        {
            "secret": {
                "name": credential_secret(pipeline, worker),
                "items": [{"key": key, "path": f"{worker}/{file}"} for key, file in named.items()],
            }
        }
        for worker in workers
    ]
    return [{"name": volume, "projected": {"defaultMode": SECRET_MODE, "sources": sources}}]


def secret_volume(volume: str, secret: str, paths: Mapping) -> Mapping:
    """Return a volume with a secret's files, `paths` by their keys; all under their keys where it is empty."""
    items: list[Any] = [{"key": key, "path": path} for key, path in paths.items()]
    described = {"secretName": secret, "defaultMode": SECRET_MODE, "items": items or None}
    return {"name": volume, "secret": without_none(described)}
