"""Time limits and switches of a pipeline, as its coordinator is told them."""

from __future__ import annotations

import dataclasses

from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.wire.links.security import PLAINTEXT, LinkSecurity
from relayline.wire.model_files.adapters import Adapter, choice_keys
from relayline.wire.settings.table import ServingSettings


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineConfig:
    """How the coordinator drives one pipeline."""

    addresses: tuple[str, ...]
    """host:port of every stage, in layer order; empty if a roster of joining stages reports them."""
    wire_dtype: int
    """Dtype of activations between stages (wire.envelopes.dtypes.DTYPE_F16 or DTYPE_F32)."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """How decode rows are grouped and prompts cut into chunks."""
    name: str = ""
    """The pipeline's display name, for telemetry."""
    stage_names: tuple[str, ...] = ()
    """The stages' display names, in layer order; empty where they have none."""
    serving: ServingSettings = dataclasses.field(default_factory=lambda: ServingSettings(prefix_lanes=0))
    """The request settings of the settings table. `schedule` and `wire_dtype` are derived from it too."""
    adapters: tuple[Adapter, ...] = ()
    """The LoRA adapters that `serving` names, read."""
    inner_layers: tuple[int, ...] = ()
    """Layers whose inputs all stages are to hand on, for an EAGLE-3 model on the last one."""
    start_timeout_s: float = 60.0
    """How long the stages may take to become reachable at the start."""
    recovery_timeout_s: float = 120.0
    """How long requests that ran when a stage was lost wait for it to come back."""
    names: tuple[str, ...] = ()
    """Names of the stages at `addresses`, as their join tokens say them; empty: stage-0, stage-1 and so on."""
    security: LinkSecurity = PLAINTEXT
    """Certificates and join token of the links to the stages."""

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        """A key of each choice of LoRA adapters, which all stages are to have."""
        return choice_keys(self.adapters)
