"""The manifest of a pipeline: the user's YAML as frozen typed values.

`deploy.manifest.load_manifest` reads one from a file; `schema.json` in this folder is its published JSON Schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from relayline.deploy.manifest import layout
from relayline.deploy.manifest.deployment import HF_FILE, Deployment
from relayline.deploy.manifest.layout import METRICS_PORT as METRICS_PORT
from relayline.deploy.manifest.layout import STAGE_PORT as STAGE_PORT
from relayline.deploy.manifest.layout import check_layers, check_spares, check_stages, fixed_cuts
from relayline.deploy.manifest.scalars import DnsLabel, FilePath, Host, Labels, Part, Port, Sha256, is_local
from relayline.deploy.manifest.settings import declare_settings, read_settings
from relayline.deploy.manifest.stage import LayerRange, Link, Speed, Stage
from relayline.wire.common.places import expanded
from relayline.wire.links import enrolment
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings

API_VERSION = "relayline.dev/v1alpha1"
AUTO_PROJECTOR = "auto"  # of coordinator.mmproj: the one in the model's repository, or next to the model
HUB_SCHEME = "hf://"  # of a model on the hub
KIND = "Pipeline"
STAGES_MAX = 64
ALLOWED_HOSTS_MAX = 64
RELAY_PORT = 50_048  # of the coordinator, where tunnels of relayed stages end
JOIN_PORT = 50_050  # of the coordinator, where other hosts have to find it

__all__ = ["LayerRange", "Link", "Manifest", "Spec", "Speed", "Stage"]


class Metadata(Part):
    """Name and labels of a pipeline."""

    name: DnsLabel
    """Name of the pipeline: of its state directory, its containers and its Kubernetes objects."""
    labels: Labels = Field(default_factory=dict)
    """Free labels; rendered deployments carry them."""


class Model(Part):
    """Which model: exactly one of `path` and `hf`."""

    path: FilePath | None = None
    """A GGUF file on the coordinator's machine, or the first of its shards (...-00001-of-0000N.gguf)."""
    hf: Annotated[str, Field(pattern=HF_FILE)] | None = None
    """hf://org/repo/path/file.gguf, with @revision if not the default branch; the first file of a sharded model."""
    sha256: Sha256 | None = None
    """Of the named file, in lower-case hexadecimal; the coordinator refuses another one."""
    download: Literal["whole", "layers"] = "whole"
    """How a model of the hub comes here. `whole`: the coordinator's machine downloads and splits it. `layers`: it reads
    the header, and each stage gets its own layers from the hub through the coordinator, which keeps none of them."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.hf is None):
            raise ValueError("give either `path` (a GGUF file) or `hf` (hf://org/repo/file.gguf), and only one of them")
        if self.path is not None and self.download == "layers":
            raise ValueError("`download: layers` is for a model of the hub, given as `hf` and not as `path`")
        return self


class Context(Part):
    """How much the pipeline holds at once. Every lane reserves `tokens` cells of KV cache on every stage."""

    declare_settings(locals(), "context")


class HttpTls(Part):
    """The certificate for clients of the HTTP API. Renewed files are taken up without a restart."""

    cert_file: FilePath
    """Certificate (PEM), followed by intermediates if there are any."""
    key_file: FilePath
    """Its private key (PEM, without passphrase)."""


class Http(Part):
    """Where clients connect."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Port = 8_080
    """Port to listen on; 0 lets the system choose."""
    tls: HttpTls | None = None
    """Makes the API HTTPS."""
    declare_settings(locals(), "coordinator.http")


class Coordinator(Part):
    """The process that owns requests and serves the OpenAI-compatible API."""

    host: Host = "localhost"
    """Name or address under which stages on other hosts reach it. localhost is enough while all stages are local."""
    http: Http = Http()
    """The API's address."""
    join_port: Port = 0
    """Port on which stages join. 0: chosen by the system while all stages are local, else 50050."""
    enrol_port: Port = 0
    """Port where other hosts get their certificates, by the line that `relayline up` prints. 0: 50049."""
    relay_port: Port = 0
    """Port where the tunnels of stages with `relay` end. 0: chosen by the system while all stages are local, else
    50048."""
    declare_settings(locals(), "coordinator")
    api_keys_file: FilePath | None = None
    """File with one API key per line; with it, requests need `Authorization: Bearer KEY`."""
    chat_template_file: FilePath | None = None
    """File with a Jinja template for chats; without it the model's own."""
    allow_hosts: Annotated[tuple[Host, ...], Field(max_length=ALLOWED_HOSTS_MAX)] = ()
    """Hosts whose web pages may use the API, and names under which it may be called; without API keys, on loopback,
    only those of loopback may otherwise."""
    memory_gib: Annotated[float, Field(gt=0, le=1e5)] | None = None
    """Memory limit of its container, in GiB."""


class Tls(Part):
    """Mutual TLS between coordinator and stages."""

    mode: Literal["auto", "required", "off"] = "auto"
    """auto: whenever a stage is not on loopback. required: always. off: never, and every process warns beyond
    loopback."""
    directory: FilePath | None = None
    """The coordinator's directory, made by `relayline certs issue --coordinator`; those of the stages are next to it,
    under their names. Without it the launcher makes all of them.
    """


class Wire(Part):
    """What travels between stages."""

    declare_settings(locals(), "wire")
    tls: Tls = Tls()
    """Mutual TLS."""
    token_file: FilePath | None = None
    """File with the coordinator's join token, from which the launcher makes the stages'. Without it, with TLS, the
    tokens are those of the TLS directories; without TLS the launcher makes them."""


class Batching(Part):
    """How frames of many streams become native steps."""

    declare_settings(locals(), "batching", last=("calibrate",))


class Telemetry(Part):
    """How much is recorded about requests and batches."""

    declare_settings(locals(), "telemetry")


def _stages_tag(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "count"


Stages = Annotated[
    Annotated[Annotated[int, Field(ge=1, le=STAGES_MAX)], Tag("count")]
    | Annotated[Annotated[tuple[Stage, ...], Field(min_length=1, max_length=STAGES_MAX)], Tag("list")],
    Discriminator(_stages_tag),
]


class Spec(Part):
    """The pipeline: its model, stages and settings."""

    model: Model
    """The model."""
    context: Context = Context()
    """Tokens and streams."""
    stages: Stages = 2
    """The stages in layer order, or a number of them on localhost."""
    spares: Annotated[tuple[Stage, ...], Field(max_length=STAGES_MAX)] = ()
    """Stages that stand by without layers, and take over those of a stage that is drained or lost for longer than
    coordinator.takeoverSeconds."""
    coordinator: Coordinator = Coordinator()
    """The coordinator."""
    wire: Wire = Wire()
    """Links between the processes."""
    batching: Batching = Batching()
    """How steps are formed."""
    telemetry: Telemetry = Telemetry()
    """The telemetry settings."""
    deployment: Deployment = Deployment()
    """For `relayline render`."""

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Spec:
        members = (*self.stage_list, *self.spares)
        check_stages(members, self._coordinator_ports(members), self.coordinator.host)
        check_spares(self.spares)
        check_layers(self.stage_list)
        return self

    def _coordinator_ports(self, members: Sequence[Stage]) -> dict[int, str]:
        own = self.coordinator
        is_apart = not (is_local(own.host) and all(stage.is_local for stage in members))
        ports = {
            own.http.port: "http",
            own.join_port or is_apart * JOIN_PORT: "joinPort",
            own.enrol_port or is_apart * enrolment.PORT: "enrolPort",
            own.relay_port or is_apart * RELAY_PORT: "relayPort",
        }
        return {port: use for port, use in ports.items() if port}

    @model_validator(mode="after")
    def _filled_volume_holds_the_model(self) -> Spec:
        source, path = self.deployment.storage.fill, self.model.path
        if source is None:
            return self
        if path is None:
            raise ValueError("deployment.storage.fill needs model.path; with model.hf the coordinator loads the model")
        if PurePosixPath(source.partition("@")[0]).name != PurePosixPath(path).name:
            raise ValueError(f"deployment.storage.fill loads another file than model.path names: {path}")
        return self

    @property
    def stage_list(self) -> tuple[Stage, ...]:
        """The stages in layer order; a number N becomes stage-0 .. stage-(N-1) on localhost."""
        if isinstance(self.stages, int):
            return tuple(Stage(name=f"stage-{index}") for index in range(self.stages))
        return self.stages


class ManifestFile(Part):
    """A manifest of any kind. Its relative paths start from the directory of its file."""

    _directory: Path = PrivateAttr(default_factory=Path)

    @property
    def directory(self) -> Path:
        """Where relative paths start."""
        return self._directory

    def with_directory(self, directory: Path) -> Self:
        """Return the same manifest with relative paths starting from `directory`."""
        copy = self.model_copy()
        copy._directory = directory
        return copy

    def resolve(self, path: str) -> Path:
        """Return one of the manifest's paths in full: `~` expanded, relative to the manifest's directory."""
        return self._directory / expanded(path)


class Manifest(ManifestFile):
    """A pipeline: one model over stages, its coordinator, and how it is deployed."""

    model_config = ConfigDict(title="relayline pipeline manifest")

    api_version: Literal["relayline.dev/v1alpha1"]
    """Version of this format."""
    kind: Literal["Pipeline"]
    """Always Pipeline."""
    metadata: Metadata
    """Name and labels."""
    spec: Spec
    """The pipeline itself."""

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.metadata.name

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in layer order, a number resolved."""
        return self.spec.stage_list

    @property
    def spares(self) -> tuple[Stage, ...]:
        """The stages that stand by."""
        return self.spec.spares

    @property
    def members(self) -> tuple[Stage, ...]:
        """Every stage that joins: those that hold layers at the start, then the spares."""
        return (*self.stages, *self.spares)

    @property
    def model_path(self) -> Path | None:
        """The model's file, None for an hf:// reference."""
        return None if self.spec.model.path is None else self.resolve(self.spec.model.path)

    @property
    def all_local(self) -> bool:
        """Whether `relayline up` starts every process on this machine."""
        return is_local(self.spec.coordinator.host) and all(stage.is_local for stage in self.members)

    @property
    def uses_tls(self) -> bool:
        """Whether links run over mutual TLS (see wire.tls.mode)."""
        mode = self.spec.wire.tls.mode
        return mode == "required" or (mode == "auto" and not self.all_local)

    @property
    def join_port(self) -> int:
        """Port on which stages join; 0 means chosen by the system."""
        return self.spec.coordinator.join_port or (0 if self.all_local else JOIN_PORT)

    @property
    def enrol_port(self) -> int:
        """Port where other hosts get their certificates."""
        return self.spec.coordinator.enrol_port or enrolment.PORT

    @property
    def relay_port(self) -> int:
        """Port where tunnels of relayed stages end; 0 means chosen by the system."""
        return self.spec.coordinator.relay_port or (0 if self.all_local else RELAY_PORT)

    @property
    def engine(self) -> EngineSettings:
        """The engine settings of all stages, which a stage's own settings override."""
        return read_settings(EngineSettings, self.spec)

    @property
    def serving(self) -> ServingSettings:
        """How the coordinator takes requests and fills its stages."""
        return read_settings(ServingSettings, self.spec)

    @property
    def telemetry(self) -> TelemetrySettings:
        """The telemetry settings."""
        return read_settings(TelemetrySettings, self.spec)

    def listen_port(self, stage: Stage) -> int:
        """Return the port where others reach a stage; 0 means chosen by the system."""
        return layout.listen_port(self.members, stage)

    def metrics_port(self, stage: Stage) -> int:
        """Return the port of a stage's Prometheus endpoint; 0 means chosen by the system."""
        return layout.metrics_port(self.members, stage)

    def fixed_cuts(self) -> tuple[int | None, ...]:
        """Return the first layer of every stage but the first; None where the planner decides."""
        return fixed_cuts(self.stages)
