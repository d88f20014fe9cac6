"""The scope of one comparison of `benches.compare`, and its measured points."""

from __future__ import annotations

import dataclasses
from typing import Any

from benches.models import Shape
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The scope of one comparison."""

    shape: Shape
    mix: str
    streams: tuple[int, ...]
    repeats: int
    repeat_minutes: int
    """Seconds after the start by which repeats of `streams` must end; later ones are left out, and delays are measured
    once. 0: no limit.
    """
    n_tokens: int  # of every answer
    n_prompt: int  # tokens of every prompt
    rounds: int  # requests of each stream: more of them make its start and end matter less
    n_stages: int
    kv_layout: str  # of relayline's stages
    gpu_layers: int  # layers of each stage, and of the unsplit server, on a GPU; -1 for all
    cores: tuple[int, ...]
    systems: tuple[str, ...]
    delays_ms: tuple[float, ...]  # one way, between the processes of a 4-stage pipeline
    delay_streams: tuple[int, ...]
    prefill_tokens: int  # of the long prompt during decode; 0 skips that part
    open_rate_per_s: float  # Poisson arrivals; 0 skips that part
    open_requests: int
    sweep: bool  # hand-set groups x rows, compared with the automatic choice


@dataclasses.dataclass(slots=True)
class Run:
    """One measured point: a system at a number of streams, once."""

    part: str  # streams, delay, prefill, open, sweep
    system: str
    n_streams: int
    repeat: int
    summary: load.Summary
    pipeline: dict[str, Any]  # relayline's figures of the run: rows per step, overlap, plan; empty for other systems
    requests: list[Request]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""  # why the run does not count
    n_exact: int = 0  # answers equal to the unsplit model's, token for token
    worst_gap: float = 0.0  # of answers that differ: deviations of the logits
