"""The configuration of one coordinator process, and the reports of its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relayline.coordinator.engine.pipeline_config import PipelineConfig
from relayline.coordinator.engine.stage_curves import OnCurves
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.joining.config import JoinConfig, PoolState
from relayline.coordinator.joining.mover import CutModel, ExplainMove, ReadShape
from relayline.coordinator.joining.port import OnMember
from relayline.wire.telemetry.config import TelemetryConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ServeConfig:
    """One coordinator process."""

    pipeline_dir: Path
    """Directory with pipeline.json and tokenizer.gguf; the stages' artifacts need not be here."""
    pipeline: PipelineConfig
    """Stage addresses and scheduling. A pipeline without a given name is named after its model."""
    http: HttpListener = dataclasses.field(default_factory=HttpListener)
    """Where clients connect, and who may."""
    chat_template_file: Path | None = None
    """Jinja template for chats; None takes the model's own."""
    telemetry: TelemetryConfig = dataclasses.field(default_factory=TelemetryConfig)
    """How much is traced here, and where to."""
    push_level: bool = False
    """Whether stages that connect are set to the trace level given here, rather than left at their own."""
    cut_model: CutModel | None = None
    """Splits the model again where layers are to move; None: this process has no model file."""
    read_shape: ReadShape | None = None
    """Returns the sizes of that model, by which layers are given to others; None: this process has no model file."""
    on_moved: Callable[[PoolState], None] | None = None
    """Gets the holders and their layers whenever they have changed, on a separate thread."""
    on_curves: OnCurves | None = None
    """Gets the stages' step costs with their layers, once all serve; on a separate thread."""
    planned: dict[str, Any] | None = None
    """Which stage got which layers and why, as in GET /v1/pipeline; None: unknown."""
    explain_move: ExplainMove | None = None
    """Returns that again once layers have moved; on a separate thread."""
    join: JoinConfig | None = None
    """Let stages join by themselves; `pipeline.addresses` is empty then, and the artifacts must be in pipeline_dir."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The facts of the ready line."""

    url: str
    model_id: str
    n_stages: int
    n_lanes: int
    ctx_tokens: int
    has_chat: bool = True
    """Whether the model has a chat template."""
    ranks: bool = False
    """Whether it is a reranker, which writes no text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joinable:
    """Emitted once stages may join; requests are refused until all of them have."""

    join_address: str  # host:port
    url: str
    names: tuple[str, ...]  # of the stages that are waited for, in layer order
    enrol_address: str = ""  # host:port where hosts get their certificates; empty: nowhere


@dataclasses.dataclass(frozen=True, slots=True)
class Callbacks:
    """Receivers of the reports of a coordinator's start. Called on the event loop."""

    on_ready: Callable[[Ready], None]
    """Called once clients are served."""
    on_joinable: Callable[[Joinable], None]
    """Called once stages may join, where they do so by themselves."""
    on_member: OnMember
    """Called with every change of a joining stage's state."""
