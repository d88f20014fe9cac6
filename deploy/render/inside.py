"""The parts common to every rendered deployment: paths and ports inside a container, its commands, its manifest. The
rendered coordinator reads a generated manifest, in which every host is a name of the deployment and every path one of
the container. The paths and hosts of the user's own file have no meaning there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from relayline.deploy.manifest.deployment import Deployment
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.model import AUTO_PROJECTOR, HUB_SCHEME, JOIN_PORT, METRICS_PORT, STAGE_PORT, Manifest
from relayline.deploy.manifest.stage import Speed, Stage
from relayline.wire.common.errors import UsageError
from relayline.wire.common.versions import version_of
from relayline.wire.links.security import address_of
from relayline.wire.model_files.adapter_texts import placed
from relayline.wire.settings.table import KEPT_DIRECTORIES

HTTP_PORT = 8_080
USER_ID = 10_001  # as in deploy/Containerfile
MANIFEST_FILE = "/etc/relayline/pipeline.yaml"
TLS_DIR = "/etc/relayline/tls"
TOKEN_DIR = "/etc/relayline/join"
TOKEN_FILE = f"{TOKEN_DIR}/token"
API_KEYS_DIR = "/etc/relayline/api-keys"
API_KEYS_FILE = f"{API_KEYS_DIR}/keys"
MODELS_DIR = "/models"
AUTHORITY_DIR = "/etc/relayline/authority"
STATE_DIR = "/var/lib/relayline"  # XDG_CACHE_HOME of the image: models from the hub, splits, artifacts, cost curves
KEPT_DIR = "/var/lib/relayline-kept"  # responses and batches of the coordinator's clients, in a volume of their own
KEPT_MARGIN_GIB = 1.0  # of that volume, beside batches' files: for responses, see wire/common/bounds.py
CREDENTIAL_FILES = ("ca.pem", "cert.pem", "key.pem", "token")  # of a process with TLS; without, the last alone

COORDINATOR_GRACE_S = 60  # drain, and time to tell the stages
STAGE_GRACE_S = 75  # stages outlive the coordinator's drain
START_BUDGET_S = 7_200  # a model of hundreds of GB is fetched and split, or an artifact fetched over a slow link
PROBE_PERIOD_S = 10
OUTPUT_FLAGS = ("--log-json", "--json")  # one JSON object per line: the log, and what people read elsewhere


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Where a stage listens in its container. Its neighbours use this port, so it is also the published one."""

    frames: int = STAGE_PORT
    """For its neighbours."""
    metrics: int = METRICS_PORT
    """For Prometheus."""


def _own_network(_: Stage) -> Ports:
    """Every stage has its own address, so all use the same ports."""
    return Ports()


@dataclasses.dataclass(frozen=True, slots=True)
class Inside:
    """One pipeline as its containers see it."""

    manifest: Manifest
    """The user's manifest."""
    coordinator_host: str
    """Name under which stages reach the coordinator."""
    stage_host: Callable[[Stage], str]
    """Name under which a stage is reached; it is in its certificate."""
    ports_of: Callable[[Stage], Ports] = _own_network
    """Where a stage listens."""
    join_port: int = JOIN_PORT
    """Where stages join the coordinator."""
    enrol_port: int = 0
    """Where hosts get their certificates by a token; 0: nowhere."""
    own: str = ""
    """Its name behind a gateway, part of its objects' names next to other pipelines'; empty for a single one."""

    def part(self, name: str) -> str:
        """Return the name of one of its parts where all pipelines have their parts in one file."""
        return f"{self.own}-{name}" if self.own else name

    @property
    def authority(self) -> str:
        """Directory of its certificates, as the commands at the head of a file make it."""
        return f"tls/{self.own}" if self.own else "tls"

    @property
    def keys_file(self) -> str:
        """File with the API keys of its clients, next to the rendered files."""
        return f"api-keys-{self.own}" if self.own else "api-keys"

    @property
    def uses_tls(self) -> bool:
        """Whether links are mutual TLS: always, unless the manifest says off, for containers are never loopback."""
        return self.manifest.spec.wire.tls.mode != "off"

    @property
    def uses_api_keys(self) -> bool:
        """Whether clients have to show a key."""
        return self.manifest.spec.coordinator.api_keys_file is not None

    @property
    def mounts_models(self) -> bool:
        """Whether the model is a file that has to be there, not one that is fetched from the hub."""
        return self.manifest.spec.model.path is not None

    @property
    def kept_gib(self) -> float:
        """Size of the volume with what the coordinator keeps for its clients; 0: it keeps nothing."""
        serving = self.manifest.serving
        if not any(getattr(serving, name) for name in KEPT_DIRECTORIES):
            return 0.0
        return KEPT_MARGIN_GIB + (serving.batch_disk_bytes / (1 << 30) if serving.batch_dir else 0.0)

    def image(self, *, on_gpu: bool = False) -> str:
        """Return the image of a process: the coordinator and stages on the CPU, or stages on a GPU."""
        deployment = self.manifest.spec.deployment
        plain = deployment.image or f"relayline:{version_of()}"
        if not on_gpu:
            return plain
        return deployment.gpu_image or (plain if deployment.image else f"{plain}-cuda")

    def coordinator_command(self) -> list[str]:
        """Return the arguments after the image's entry point."""
        enrol = ("--enrol-listen", f"0.0.0.0:{self.enrol_port}", "--authority", AUTHORITY_DIR)
        return ["serve", "--manifest", MANIFEST_FILE, "--join-listen", f"0.0.0.0:{self.join_port}",
                *(enrol if self.enrol_port else ()), "--http", f"0.0.0.0:{HTTP_PORT}", *self._link_flags(),
                *OUTPUT_FLAGS]  # fmt: skip

    def stage_command(self, *, join: str, name: str, advertise: str, ports: Ports = Ports()) -> list[str]:
        """Return the arguments after the image's entry point, of the stage that joins as `name`."""
        return ["stage", "--join", address_of(join, self.join_port), *_stage_flags(name, advertise, ports),
                *self._link_flags(), *OUTPUT_FLAGS]  # fmt: skip

    def enrolling_command(self, stage: Stage, token: str) -> list[str]:
        """Return the arguments of a stage that gets its certificate by a token, and keeps it among its state."""
        return ["join", address_of(self.coordinator_host, self.enrol_port), token,
                *_stage_flags(stage.name, self.stage_host(stage), self.ports_of(stage)),
                "--state", f"{STATE_DIR}/joined", *OUTPUT_FLAGS]  # fmt: skip

    def _link_flags(self) -> tuple[str, ...]:
        return ("--tls", TLS_DIR) if self.uses_tls else ("--insecure", "--token-file", TOKEN_FILE)

    @property
    def credential_dir(self) -> str:
        """Where a container has its own directory of `relayline certs issue`."""
        return TLS_DIR if self.uses_tls else TOKEN_DIR

    @property
    def credential_files(self) -> tuple[str, ...]:
        """The part of it that a process needs."""
        return CREDENTIAL_FILES if self.uses_tls else CREDENTIAL_FILES[-1:]

    def manifest_text(self) -> str:
        """Return the manifest that the coordinator reads in its container."""
        spec = self.manifest.spec
        path = spec.model.path
        contained = spec.model_copy(
            update={
                "model": spec.model.model_copy(update={"path": path and f"{MODELS_DIR}/{PurePosixPath(path).name}"}),
                "stages": tuple(self._contained_stage(stage) for stage in self.manifest.stages),
                "coordinator": spec.coordinator.model_copy(
                    update={
                        "host": self.coordinator_host,
                        "http": spec.coordinator.http.model_copy(
                            update={"host": "0.0.0.0", "port": HTTP_PORT, "tls": None}
                        ),
                        "join_port": self.join_port,
                        "api_keys_file": API_KEYS_FILE if self.uses_api_keys else None,
                        "chat_template_file": None,
                        "lora": _in_models(self.manifest.serving.lora),
                        "mmproj": _contained_projector(self.manifest.serving.mmproj),
                        "draft_model": _contained_draft_model(self.manifest.serving.draft_model),
                        **_contained_kept(self.manifest),
                    }
                ),
                "wire": spec.wire.model_copy(
                    update={
                        "tls": spec.wire.tls.model_copy(
                            update={
                                "mode": "required" if self.uses_tls else "off",
                                "directory": TLS_DIR if self.uses_tls else None,
                            }
                        ),
                        "token_file": None if self.uses_tls else TOKEN_FILE,
                    }
                ),
                "deployment": Deployment(),
            }
        )
        return dump_manifest(self.manifest.model_copy(update={"spec": contained}))

    def _contained_stage(self, stage: Stage) -> Stage:
        declared: Speed = stage.speed.model_copy(update={"calibration": None})
        return stage.model_copy(
            update={
                "host": self.stage_host(stage),
                "port": self.ports_of(stage).frames,
                "metrics_port": self.ports_of(stage).metrics,
                "node_selector": {},
                "tolerations": (),
                "cores": "auto",
                "speed": declared,
            }
        )


def _stage_flags(name: str, advertise: str, ports: Ports) -> list[str]:
    return ["--name", name, "--listen", f"0.0.0.0:{ports.frames}", "--advertise", advertise,
            "--metrics", f"0.0.0.0:{ports.metrics}", "--cache", f"{STATE_DIR}/artifacts"]  # fmt: skip


def check_names(manifest: Manifest, taken: frozenset[str]) -> None:
    """Raise UsageError for a stage that is called like another part of the deployment."""
    for stage in manifest.stages:
        if stage.name in taken:
            raise UsageError(f"stage name {stage.name!r} is taken by another part of this deployment; rename the stage")


def _in_models(lora: str) -> str:
    return placed(lora, lambda path: Path(MODELS_DIR) / PurePosixPath(path).name) if lora else ""


def _contained_projector(mmproj: str) -> str:
    return mmproj if mmproj in ("", AUTO_PROJECTOR) else f"{MODELS_DIR}/{PurePosixPath(mmproj).name}"


def _contained_draft_model(draft_model: str) -> str:
    if not draft_model or draft_model.startswith(HUB_SCHEME):
        return draft_model
    return f"{MODELS_DIR}/{PurePosixPath(draft_model).name}"


def _contained_kept(manifest: Manifest) -> dict[str, str]:
    return {
        name: f"{KEPT_DIR}/{name.removesuffix('_dir')}" for name in KEPT_DIRECTORIES if getattr(manifest.serving, name)
    }


def notes(manifest: Manifest, *, in_kubernetes: bool) -> list[str]:
    """Return, one line each for stderr, the settings that the renderer could not carry over or had to guess."""
    found = []
    if manifest.spec.coordinator.http.tls is not None:
        found.append(
            "relayline.coordinator.http.tls is left out: give the proxy or ingress before this deployment the TLS"
        )
    if manifest.spec.coordinator.chat_template_file is not None:
        found.append("coordinator.chatTemplateFile is a file of this machine and is left out")
    serving = manifest.serving
    if serving.lora or serving.draft_model or serving.mmproj not in ("", AUTO_PROJECTOR):
        names = "coordinator.lora, coordinator.draftModel and coordinator.mmproj"
        found.append(f"put the files of {names} into {MODELS_DIR}, next to the model")
    for stage in manifest.stages:
        if in_kubernetes and stage.memory_gib is None:
            found.append(f"stage {stage.name!r} has no memoryGib, so its pod asks for no memory; see `relayline plan`")
        if stage.n_gpus and stage.memory_gib is not None:
            found.append(f"stage {stage.name!r}: memoryGib is its GPU's memory; the container's own is not limited")
        if in_kubernetes and stage.threads == 0:
            found.append(f"stage {stage.name!r} has no threads, so it takes every core of its node but asks for one")
        if in_kubernetes and stage.kept_cores:
            found.append(f"stage {stage.name!r}: cores are left out, since a pod gets its own from the node's kubelet")
        if stage.speed.calibration is not None:
            found.append(f"stage {stage.name!r}: speed.calibration is a file of this machine and is left out")
    return found
