"""The coordinator's orders to the stages that join it: their number, their names and each engine's settings."""

from __future__ import annotations

import dataclasses
import datetime
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from relayline.coordinator.joining.codes import CodedInvitation
from relayline.coordinator.joining.invitations import Invitation
from relayline.coordinator.model.pipeline_file import PipelineFile, StageFile
from relayline.coordinator.relay.config import RelayConfig
from relayline.wire.common.errors import UsageError
from relayline.wire.common.kv_layout import choose_pipeline_layout
from relayline.wire.links import enrolment
from relayline.wire.links.join_code import JoinCode
from relayline.wire.links.roles import Identity
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.model_files.eagle3 import Drafter
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.setting import write_message
from relayline.wire.settings.table import EngineSettings
from relayline.wire.telemetry.config import Level

STAGES_MAX = 256  # members of one pipeline, hence memberships that are kept
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # a DNS label, because names become host and file names


def engine_message(engine: EngineSettings) -> pb.EngineSettings:
    """Return the wire form of a stage's engine."""
    message = pb.EngineSettings()
    write_message(engine, message)
    return message


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryDefaults:
    """A joining stage's telemetry settings, unless its own flags differ."""

    level: str = ""
    """off, summary, batches or frames; empty leaves it to the stage."""
    otlp_endpoint: str = ""
    """Where spans go; empty leaves it to the stage's environment."""
    sampler_ratio: float = 1.0
    """Share of requests that are sampled, 0 to 1."""
    metrics_port: int = 0
    """Port of the stage's own metrics endpoint; 0 for none."""

    def message(self) -> pb.TelemetryOrder:
        """Return the wire form. Raises UsageError for an unknown level or a port out of range."""
        if not 0 <= self.metrics_port <= 65_535:
            raise UsageError(f"metrics port {self.metrics_port} is outside 0..65535")
        return pb.TelemetryOrder(
            level=Level.named(self.level).to_wire() if self.level else None,
            otlp_endpoint=self.otlp_endpoint,
            sampler_ratio=self.sampler_ratio,
            metrics_port=self.metrics_port,
        )


OpenUnread = Callable[[PipelineFile, StageFile, int, int, threading.Event], Iterator[bytes | memoryview]]
"""Yields the bytes of an unread artifact from one offset up to another, and perhaps more; each piece is good until the
next one. It blocks, and soon after the event is set it ends. Raises RelaylineError."""


@dataclasses.dataclass(frozen=True, slots=True)
class JoiningStage:
    """One place in the pipeline, to be taken by the stage of that name."""

    name: str
    """A DNS label, unique in the pipeline."""
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    """The settings of its engine."""
    telemetry: TelemetryDefaults = dataclasses.field(default_factory=TelemetryDefaults)
    """Its telemetry settings."""
    listen_port: int = 0
    """Port that it listens on unless its own flags say so; 0 lets its system choose."""
    is_spare: bool = False
    """Whether it holds layers only in the place of another one."""
    memory_bytes: int = 0
    """Memory that it may use; 0 where only its host limits it."""


class Authority(Protocol):
    """A CA with its invitations. Every call may block; each is made in a thread, one at a time."""

    def ca_pem(self) -> str:
        """Return the CA's certificate."""

    def invitation(self, name: str) -> Invitation | None:
        """Return the invitation of a stage."""

    def invite(self, name: str, host: str) -> CodedInvitation:
        """Make the invitation of a stage on a host with its short code, in place of earlier ones. Raises UsageError."""

    def coded(self, slot: int) -> CodedInvitation | None:
        """Return the invitation whose code begins with `slot`, whether or not it is open."""

    def note_wrong(self, code: JoinCode, n_wrong: int) -> None:
        """Write down that a code had so many wrong tries, or more; a code that was replaced has none to count."""

    def bind(self, name: str, key_digest: str, address: str) -> None:
        """Note that the invitation of a stage is used."""

    def key_of(self, csr_pem: str) -> bytes:
        """Return the public key (DER) of a certificate request that its key has signed. Raises UsageError."""

    def holder(self, certificate_pem: str, now: datetime.datetime) -> tuple[Identity, bytes]:
        """Return whom a certificate of this CA names and its public key (DER).

        Raises UnauthenticatedError for one that is not of this CA, not valid at `now`, or revoked.
        """

    def sign(self, csr_pem: str, stage: Identity, names: tuple[str, ...], now: datetime.datetime) -> enrolment.Enrolled:
        """Return the credentials of a stage. Raises UsageError."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnrolConfig:
    """How hosts enrol."""

    authority: Authority
    """Signs."""
    host: str
    """Address to listen on."""
    port: int
    """Port to listen on; 0 lets the system choose."""
    pipeline: str = ""
    """Name of the pipeline, as hosts around are told."""
    model: str = ""
    """Name of its model, likewise."""
    announce: bool = False
    """Whether the local network is told of it; never where nothing but loopback is listened on."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolState:
    """Which places hold layers and which do not, as a coordinator keeps it for its successor. Places by name."""

    cuts: tuple[int, ...]
    """The first layer of each stage but the first."""
    stages: tuple[str, ...]
    """Those that hold layers, in layer order."""
    drained: tuple[str, ...] = ()
    """Those that are to hold none."""
    added: tuple[str, ...] = ()
    """Those that came while it served."""
    added_spares: tuple[str, ...] = ()
    """Which of `added` are spares."""


@dataclasses.dataclass(frozen=True, slots=True)
class JoinConfig:
    """How stages find their way into a pipeline on their own."""

    stages: tuple[JoiningStage, ...]
    """The places; those that are no spares in layer order."""
    host: str = "127.0.0.1"
    """Address that stages join at."""
    port: int = 0
    """Port that stages join at; 0 lets the system choose, and `Joinable` reports it."""
    fetches_max: int = 8
    """Artifacts that are sent at once; further stages wait their turn."""
    relay: RelayConfig = dataclasses.field(default_factory=RelayConfig)
    """For stages that can only dial out."""
    enrol: EnrolConfig | None = None
    """Let hosts get their certificates too, with the line that `relayline up` prints; takes TLS."""
    offer_path: bool = True
    """Tell stages where the artifact lies here, so that those who see the same files need not fetch it."""
    open_unread: OpenUnread | None = None
    """Reads the artifacts of a hollow model from the hub; None where the weights are here, or the model is unknown."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters, in the order in which sessions choose them."""
    drafter: Drafter | None = None
    """An EAGLE-3 model, which the last stage gets; None: there is none."""
    known: PoolState | None = None
    """The holders of layers; by default every stage that is no spare."""
    fixed: tuple[str, ...] = ()
    """Names of the stages whose layers the manifest fixes."""

    def __post_init__(self) -> None:
        """Raise UsageError for names that are not distinct, or values out of range."""
        check_names([stage.name for stage in self.stages])
        for flag, value, low, high in (
            ("the port to join at", self.port, 0, 65_535),
            ("the number of fetches at once", self.fetches_max, 1, STAGES_MAX),
        ):
            if not low <= value <= high:
                raise UsageError(f"{flag}, {value}, is outside {low}..{high}")

    @property
    def holders(self) -> tuple[int, ...]:
        """The places that hold layers at the start, in layer order."""
        if self.known is None or not self.known.stages:
            return tuple(index for index, stage in enumerate(self.stages) if not stage.is_spare)
        names = [stage.name for stage in self.stages]
        return tuple(names.index(name) for name in self.known.stages)

    @property
    def reflection(self) -> bool:
        """Whether the join port lists its services for tools. One setting for it and for all stages."""
        return any(stage.engine.reflection for stage in self.stages)

    def with_one_layout(self, architecture: str) -> JoinConfig:
        """Return the same with one layout of KV cells for all stages, where each might choose another.

        `architecture`: of the model.
        """
        gpu_layers = [place.engine.gpu_layers for place in self.stages]

        def settled(engine: EngineSettings) -> EngineSettings:
            layout = choose_pipeline_layout(
                engine.kv_layout, architecture, ctx_tokens=engine.ctx_tokens, gpu_layers=gpu_layers
            )
            return dataclasses.replace(engine, kv_layout=layout)

        stages = tuple(dataclasses.replace(place, engine=settled(place.engine)) for place in self.stages)
        return dataclasses.replace(self, stages=stages)


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError unless the names are DNS labels, unique, and not too many."""
    if not 1 <= len(names) <= STAGES_MAX:
        raise UsageError(f"a pipeline has 1 to {STAGES_MAX} stages, not {len(names)}")
    for index, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise UsageError(f"stage name {name!r} is not a DNS label; use lower-case letters, digits and hyphens")
        if name in names[:index]:
            raise UsageError(f"stage name {name!r} is given twice")
