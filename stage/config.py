"""What a stage process can be told, with its bounds checked once at the start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from relayline.wire.common import bounds
from relayline.wire.common.errors import UsageError
from relayline.wire.common.kv_layout import KV_LAYOUTS, choose_layout
from relayline.wire.links.roles import Identity
from relayline.wire.links.security import PLAINTEXT, LinkSecurity, check_listen
from relayline.wire.telemetry.config import TelemetryConfig

POLICIES = ("auto", "drain", "single")
LANES_MAX = 255  # llama.cpp is compiled for 256 sequences, and one is kept for padding rows
KV_TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


@dataclasses.dataclass(frozen=True, slots=True)
class StageConfig:
    """One stage process."""

    artifact: Path
    """The stage's own GGUF, made by `relayline split`."""
    name: str = ""
    """What the stage is called in a pipeline that it joined; empty: stage-INDEX."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 lets the system choose, and the ready line tells."""
    ctx_tokens: int = 2_048
    """Tokens that one session may hold, prompt and completion together."""
    n_lanes: int = 32
    """Sessions that may be open at once; the KV cache holds n_lanes * ctx_tokens cells."""
    n_threads: int = 0
    """Threads of a native decode; 0 takes every core of the host."""
    gpu_layers: int = 0
    """Layers to put on a GPU; -1 means all."""
    max_rows: int = 512
    """Rows of one native step; also the largest prefill chunk this stage accepts."""
    prefill_rows: int = 128
    """Prefill rows that may run beside waiting decoders in one step."""
    kv_type: str = "f16"
    """Element type of the KV cache."""
    kv_layout: str = "auto"
    """unified: all lanes share the KV cells, and a step is one micro-batch; per-lane: each lane has cells of its own,
    so that attention never walks those of the others, which on a CPU it does at great cost; auto: see
    wire.common.kv_layout."""
    policy: str = "auto"
    """auto: keep the coordinator's groups and pad to cheaper row counts; drain: take what is queued; single: one
    frame a step, no batching."""
    calibrate: bool = True
    """Measure the cost curve at start (remembered, and then held against a few steps); without it the curve is learned
    from real steps."""
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
        checks = (
            ("--port", self.port, 0, 65_535),
            ("--ctx", self.ctx_tokens, 8, bounds.CTX_TOKENS_MAX),
            ("--lanes", self.n_lanes, 1, LANES_MAX),
            ("--threads", self.n_threads, 0, 1_024),
            ("--gpu-layers", self.gpu_layers, -1, 100_000),
            ("--max-rows", self.max_rows, 1, bounds.ROWS_PER_ENVELOPE_MAX),
            ("--prefill-rows", self.prefill_rows, 1, bounds.ROWS_PER_ENVELOPE_MAX),
        )
        for flag, value, low, high in checks:
            if not low <= value <= high:
                raise UsageError(f"{flag} {value} is outside {low}..{high}")
        if self.policy not in POLICIES:
            raise UsageError(f"--policy {self.policy} is unknown; choose one of {', '.join(POLICIES)}")
        if self.kv_type not in KV_TYPES:
            raise UsageError(f"--kv-type {self.kv_type} is unknown; choose one of {', '.join(KV_TYPES)}")
        if self.kv_layout not in KV_LAYOUTS:
            raise UsageError(f"--kv-layout {self.kv_layout} is unknown; choose one of {', '.join(KV_LAYOUTS)}")
        check_listen(self.host, self.security, "this stage")  # here, because loading the artifact may take long
        if self.metrics is not None:
            check_listen(self.metrics[0], self.security, "the metrics port")

    @property
    def layout_used(self) -> str:
        """The layout of KV cells after resolving auto."""
        return choose_layout(self.kv_layout, ctx_tokens=self.ctx_tokens, gpu_layers=self.gpu_layers)

    @property
    def threads_used(self) -> int:
        """Threads after resolving 0 to the cores this process may run on."""
        return self.n_threads or len(os.sched_getaffinity(0))
