"""How the coordinator drives a pipeline."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.schedule.scheduler import ScheduleConfig
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.settings.table import ServingSettings


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How the coordinator drives one pipeline."""

    addresses: tuple[str, ...]
    """host:port of every stage, in layer order; empty when a roster of joining stages tells them."""
    wire_dtype: int
    """Dtype of activations between stages (wire.envelopes.envelope.DTYPE_F16 or DTYPE_F32)."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """How decode rows are grouped and prompts cut into chunks."""
    name: str = ""
    """What people call the pipeline, for telemetry."""
    stage_names: tuple[str, ...] = ()
    """What they call its stages, in layer order; empty where they have no names."""
    serving: ServingSettings = dataclasses.field(default_factory=lambda: ServingSettings(prefix_lanes=0))
    """What the table of settings says of requests. `schedule` and `wire_dtype` are made of it too."""
    start_timeout_s: float = 60.0
    """How long the stages may take to become reachable at the start."""
    recovery_timeout_s: float = 120.0
    """How long requests that ran when a stage was lost wait for it to come back."""
    names: tuple[str, ...] = ()
    """Names of the stages at `addresses`, as their join tokens say them; empty: stage-0, stage-1 and so on."""
    security: LinkSecurity = PLAINTEXT
    """Certificates and join token of the links to the stages."""
