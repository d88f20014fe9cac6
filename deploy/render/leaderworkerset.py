"""A LeaderWorkerSet: many replicas of one pipeline. The leader is a coordinator, its workers are the stages.

All workers share one pod template, so every stage requests as much as the largest one needs, and a stage is known by
its worker index: stage-1 is the first in layer order. A stage that dies comes back and joins again, so the group is not
recreated for it.
"""

from __future__ import annotations

from relayline.deploy.manifest.model import Manifest
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.render import cluster, inside, kubernetes, pods
from relayline.deploy.render.document import Mapping, without_none, yaml_file
from relayline.deploy.render.inside import Inside
from relayline.wire.common.errors import UsageError

TARGET = "leaderworkerset"
FILL_RETRIES = 20  # an interrupted download is resumed each time
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


def render(manifest: Manifest) -> dict[str, str]:
    """Return the files by name, in the order in which they should be applied.

    Raises UsageError where stages differ in ways that one pod template cannot express, and for unusable names.
    """
    kubernetes.check_lengths(manifest, ["000-00"])  # NAME-REPLICA-WORKER
    _check_equal(manifest.stages)
    renamed = tuple(
        stage.model_copy(update={"name": f"stage-{index}"}) for index, stage in enumerate(manifest.stages, 1)
    )
    spec = manifest.spec.model_copy(update={"stages": renamed})
    pipeline = Inside(manifest.model_copy(update={"spec": spec}), manifest.name, lambda stage: stage.name)
    names = ", ".join(f"stage-{index} is {stage.name}" for index, stage in enumerate(manifest.stages, 1))
    text = kubernetes.explanation(pipeline, _secret_lines(pipeline))
    api = kubernetes.api_service(
        pipeline, f"{manifest.name}-api", {**pods.selector(manifest.name, pods.COORDINATOR), **_LEADER}
    )
    around = kubernetes.surroundings(pipeline)
    if kubernetes.uses_cert_manager(pipeline):
        host = _any_host(pipeline)
        around += kubernetes.certificates(pipeline, host, lambda _stage: host)
    source = manifest.spec.deployment.storage.fill
    if pipeline.mounts_models and source:
        around.append(("Loads the model into the models volume, once.", _fill_job(pipeline, source)))
    files = {
        "config.yaml": yaml_file(TARGET, manifest.name, text, kubernetes.config(pipeline, is_shared=True)),
        "pipelines.yaml": yaml_file(
            TARGET,
            manifest.name,
            f"In layer order: {names}.{_kept_note(pipeline)}",
            [("", _worker_set(pipeline)), ("", api)],
        ),
    }
    return files | ({"cluster.yaml": yaml_file(TARGET, manifest.name, "", around)} if around else {})


def _kept_note(pipeline: Inside) -> str:
    """Return what is different here about responses and batches that are kept."""
    if not pipeline.kept_gib:
        return ""
    return """
Each pipeline keeps its own responses and batches, as long as its leader's pod lives: a crash of the container
spares them, and a pod that is replaced loses them. The target kubernetes has a claim for them."""


def _any_host(pipeline: Inside) -> str:
    """Return the name of every pod of the set, as certificates have it."""
    return f"*.{pipeline.manifest.name}.{pipeline.manifest.spec.deployment.namespace or 'default'}"


def _check_equal(stages: tuple[Stage, ...]) -> None:
    for field, what in (("device", "device"), ("node_selector", "nodeSelector"), ("labels", "labels"),
                        ("tolerations", "tolerations")):  # fmt: skip
        values = [getattr(stage, field) for stage in stages]
        if any(value != values[0] for value in values):
            raise UsageError(
                f"stages differ in {what}, but all workers of a LeaderWorkerSet share one pod template; "
                "make them equal or use --target kubernetes"
            )


def _secret_lines(pipeline: Inside) -> list[str]:
    host = _any_host(pipeline)
    names = [stage.name for stage in pipeline.manifest.stages]
    files = " ".join(
        f"--from-file={pods.worker_key(name, file)}=tls/{name}/{file}"
        for name in names
        for file in pipeline.credential_files
    )
    return [
        f"relayline certs issue tls '{host}' --coordinator",
        kubernetes.from_files(pipeline, pods.COORDINATOR),
        *(f"relayline certs issue tls '{host}' --stage {name}" for name in names),
        f"KUBECTL {pods.credential_secret(pipeline, 'stages')} {files}",
    ]


def _worker_set(pipeline: Inside) -> Mapping:
    manifest = pipeline.manifest
    stages, storage = manifest.stages, manifest.spec.deployment.storage
    memories = [gib for stage in stages if (gib := stage.container_memory_gib) is not None]
    need = pods.Need(
        threads=max(stage.threads for stage in stages),
        memory_gib=max(memories) if len(memories) == len(stages) else None,
        n_gpus=max(stage.n_gpus for stage in stages),
    )
    args = pipeline.stage_command(
        join="$(LWS_LEADER_ADDRESS)",
        name="stage-$(LWS_WORKER_INDEX)",
        advertise=f"$(POD_NAME).{manifest.name}.$(POD_NAMESPACE)",
    )
    worker = pods.stage_spec(
        pipeline,
        args,
        need,
        process="stages",
        state=_own_volume(pipeline, storage.stage_gib),
        workers=[stage.name for stage in stages],
    )
    worker = pods.on_nodes(worker, stages[0], pipeline)
    waits = [cluster.wait_container(pipeline)] if pipeline.mounts_models and storage.fill else []
    kept = _own_volume(pipeline, pipeline.kept_gib) if pipeline.kept_gib else None
    leader = pods.coordinator_spec(pipeline, state=_own_volume(pipeline, storage.model_gib), kept=kept, before=waits)
    extra = dict(stages[0].labels)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": kubernetes.metadata(pipeline, manifest.name, "pipeline"),
        "spec": {
            "replicas": manifest.spec.deployment.replicas,
            "startupPolicy": "LeaderCreated",  # the leader is ready only when its workers have joined
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": 1 + len(stages),
                "restartPolicy": "None",
                "leaderTemplate": {"metadata": kubernetes.pod_metadata(pipeline, pods.COORDINATOR), "spec": leader},
                "workerTemplate": {"metadata": kubernetes.pod_metadata(pipeline, pods.STAGE, extra), "spec": worker},
            },
        },
    }


def _fill_job(pipeline: Inside, source: str) -> Mapping:
    name = f"{pipeline.manifest.name}-models"
    models = {"name": "models", "mountPath": inside.MODELS_DIR}
    container = cluster.fill_container(pipeline, source) | {
        "volumeMounts": [models, {"name": "tmp", "mountPath": "/tmp"}]
    }
    deployment = pipeline.manifest.spec.deployment
    pod = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "securityContext": pods.pod_security(),
        "imagePullSecrets": [{"name": secret} for secret in deployment.image_pull_secrets],
        "tolerations": pods.tolerations(deployment.tolerations),
        "containers": [pods.hardened(container)],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": pods.models_claim(pipeline)}},
            {"name": "tmp", "emptyDir": {"sizeLimit": pods.TMP_BYTES_MAX}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": kubernetes.metadata(pipeline, name, "models"),
        "spec": {"backoffLimit": FILL_RETRIES, "template": {"spec": without_none(pod)}},
    }


def _own_volume(pipeline: Inside, size_gib: float) -> Mapping:
    """Return a volume that lives as long as its pod, for LeaderWorkerSets keep none longer."""
    return {"ephemeral": {"volumeClaimTemplate": without_none({"spec": pods.claim_spec(pipeline, size_gib)})}}
