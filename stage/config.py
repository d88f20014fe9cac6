"""A stage process's configuration, with its bounds checked once at the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from relayline.wire.common.errors import UsageError
from relayline.wire.links.ports import check_free
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, check_listen
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.model_files.eagle3 import InnerRows
from relayline.wire.settings.table import EngineSettings
from relayline.wire.telemetry.config import TelemetryConfig


@dataclasses.dataclass(frozen=True, slots=True)
class StageConfig:
    """One stage process."""

    artifact: Path
    """The stage's own GGUF, made by `relayline split`."""
    name: str = ""
    """The stage's name in a pipeline that it joined; empty: stage-INDEX."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 lets the system choose, and the ready line has it."""
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    """The engine's settings, from flags or the coordinator's order."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters, in the order in which sessions choose them."""
    inner: InnerRows | None = None
    """The inner rows that stages hand on, for an EAGLE-3 model; None: none are."""
    verify: bool = True
    """Check the artifact's sha256 against pipeline.json (remembered, so the second start is quick)."""
    security: LinkSecurity = PLAINTEXT
    """Certificates and join token of every link, listening and connecting."""
    coordinator: Identity | None = None
    """The one coordinator that may give this stage work over TLS; None: any of the CA's."""
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    """How much is traced and where spans go."""
    metrics: tuple[str, int] | None = None
    """Host and port of the HTTP endpoint /metrics, which beyond loopback has the links' TLS; port 0 lets the system
    choose; None serves no metrics."""

    def __post_init__(self) -> None:
        """Raise UsageError for the first value out of range."""
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"--listen: port {self.port} is outside 0..65535")
        check_listen(self.host, self.security, "this stage")  # here, because loading the artifact may take long
        if self.metrics is not None:
            check_listen(self.metrics[0], self.security, "the metrics port")

    def check_ports(self) -> None:
        """Raise StartError for ports that are taken: its layers may take long to come and to load."""
        check_free(("--listen", (self.host, self.port)), ("--metrics", self.metrics))
