"""The part of a manifest that only rendered deployments read: images, volumes, secrets, and the cluster's own ways."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relayline.deploy.manifest.scalars import DnsLabel, LabelKey, Labels, LabelValue, Part, Text

# The repository, the file inside it, the revision; no `..` and no hidden part in any of them.
_HF_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
HF_FILE = rf"^hf://({_HF_NAME}/{_HF_NAME})/((?:{_HF_NAME}/)*{_HF_NAME}\.gguf)(?:@({_HF_NAME}(?:/{_HF_NAME})*))?$"
TOLERATIONS_MAX = 32
PULL_SECRETS_MAX = 16


class Secrets(Part):
    """Names of existing secrets; a rendered deployment refers to them and holds none of their content."""

    tls: DnsLabel | None = None
    """Prefix of the secrets with ca.pem, cert.pem, key.pem and token, one per process: PREFIX-coordinator and
    PREFIX-STAGE. By default NAME-tls."""
    token: DnsLabel | None = None
    """Without TLS: prefix of the secrets with the join token under the key `token`, one per process. By default
    NAME-join."""
    api_keys: DnsLabel | None = None
    """Secret with the key file under the key `keys`; by default NAME-api-keys, used when apiKeysFile is set."""
    hf_token: DnsLabel | None = None
    """Secret with a Hugging Face token under the key `token`, for gated models; none by default."""


class Toleration(Part):
    """Kubernetes: a taint of nodes on which a pod may run all the same."""

    key: LabelKey | None = None
    """The taint's key; without it, with operator Exists, every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal: the taint has this value. Exists: any value."""
    value: LabelValue | None = None
    """The taint's value, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; without it, every effect."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """With effect NoExecute: how long the pod stays."""

    @model_validator(mode="after")
    def _is_one_that_kubernetes_takes(self) -> Toleration:
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key; with operator Exists and no key every taint is tolerated")
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value; leave it out, or use Equal")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs effect NoExecute")
        return self


Tolerations = Annotated[tuple[Toleration, ...], Field(max_length=TOLERATIONS_MAX)]


class CertManager(Part):
    """Kubernetes: certificates by cert-manager, in place of those that `relayline certs issue` makes."""

    issuer: DnsLabel
    """Name of the issuer, one with a CA of its own (kind CA or Vault): it must sign URIs and client certificates."""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Issuer: of the deployment's namespace."""
    days: Annotated[int, Field(ge=1, le=3_650)] = 90
    """Days for which a certificate is valid; cert-manager renews it after two thirds of them."""


class Monitoring(Part):
    """Kubernetes: objects for the Prometheus operator, whose resource types the cluster must have."""

    pod_monitor: bool = False
    """Makes a PodMonitor: Prometheus then reads coordinator and stages."""
    rules: bool = False
    """Makes a PrometheusRule with relayline's alerts."""
    labels: Labels = Field(default_factory=dict)
    """Labels by which the operator's Prometheus selects both."""


class Storage(Part):
    """Volumes of a Kubernetes deployment."""

    class_name: DnsLabel | None = None
    """Storage class; the cluster's default without it."""
    model_gib: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    """Size of the coordinator's volume, which holds the model and its split: twice the model's size, in GiB."""
    stage_gib: Annotated[float, Field(gt=0, le=1e6)] = 50.0
    """Size of every stage's cache, which holds its own slice, in GiB."""
    fill: Annotated[str, Field(pattern=HF_FILE)] | None = None
    """With model.path: hf://org/repo/path/file.gguf, from which a Job fills the models volume once. The file has the
    name of model.path."""


class Deployment(Part):
    """What only rendered deployments need."""

    image: Text = ""
    """Container image of every process, made from deploy/Containerfile; empty for relayline:VERSION."""
    gpu_image: Text = ""
    """Image of stages with device gpu; empty for `image`, with -cuda behind its tag if that is empty too."""
    replicas: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Whole pipelines side by side; more than one needs the target leaderworkerset."""
    namespace: DnsLabel | None = None
    """Kubernetes namespace; without it, kubectl's."""
    gpu_resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")] = "nvidia.com/gpu"
    """Extended resource that a stage with device gpu asks for."""
    gpu_runtime_class: DnsLabel | None = None
    """Kubernetes: RuntimeClass of stages with device gpu, such as `nvidia`; without it, the node's default."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Kubernetes: when images are pulled; without it, the cluster's rule."""
    image_pull_secrets: Annotated[tuple[DnsLabel, ...], Field(max_length=PULL_SECRETS_MAX)] = ()
    """Kubernetes: secrets with the registry's credentials."""
    tolerations: Tolerations = ()
    """Kubernetes: taints of nodes on which every pod may run; a stage may have more."""
    network_policy: bool = True
    """Kubernetes: makes NetworkPolicies. Stages then take work only from pods of this pipeline; the API and the metrics
    stay open to all."""
    cert_manager: CertManager | None = None
    """Kubernetes: certificates by cert-manager."""
    monitoring: Monitoring = Monitoring()
    """Kubernetes: objects for the Prometheus operator."""
    storage: Storage = Storage()
    """Volumes."""
    secrets: Secrets = Secrets()
    """Secrets by name."""
