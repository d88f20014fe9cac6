"""A stage's description of itself in every handshake."""

from __future__ import annotations

import dataclasses
import uuid

from relayline.stage.config import StageConfig
from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.speed.curves import Curves
from relayline.wire.common import bounds
from relayline.wire.common.curve import ATTENTION_TILE_ROWS
from relayline.wire.common.sampler_fields import OPTIONS
from relayline.wire.model_files.adapters import choice_keys
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from relayline.wire.settings.table import wants_rows_ahead


@dataclasses.dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage's description of itself in every handshake."""

    artifact: StageArtifact
    config: StageConfig
    software_version: str
    curves: Curves = dataclasses.field(default_factory=Curves)
    rewinds: bool = True  # a lane can always be taken back by some positions, see `NativeEngine.check_rewind`
    keeps_state: bool = False  # beyond these, it goes back to checkpoints alone, see `stage.engine.lane_rewinds`
    rewind_rows: int = 0  # and by so many rows of its last step
    predictions: int = 0  # tokens that prediction layers guess behind a sample, on the last stage
    takes_mutual_rows: bool = True  # rows of a step may attend to later ones
    goes_by_tiles: bool = False  # steps of many rows round differently, see `stage.engine.native.Attention`
    instance_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    metrics_address: str = ""  # host:port of /metrics; empty when it is not served
    kernels: str = dataclasses.field(default_factory=ggml.kernels)  # relayline's, with spaces between
    place: pb.Place = dataclasses.field(default_factory=pb.Place)  # the place where it computes
    name: str = ""  # the stage name in its credential; empty without one

    @property
    def ahead_rows(self) -> int:
        """Rows of a step with rows that are computed before they are asked for, see `stage.steps.run_ahead`; 0: none.

        Larger steps may round differently from the ones that the coordinator would have made.
        """
        settings = self.config.engine
        if not wants_rows_ahead(settings) or self.artifact.stage_count > 1 or not self.rewinds:
            return 0
        return ATTENTION_TILE_ROWS - 1 if self.goes_by_tiles else settings.max_rows

    def describe(self) -> pb.DescribeResponse:
        """Return the answer to Describe: the stage's layers, its limits, and the present cost of its steps."""
        artifact, config = self.artifact, self.config
        message = pb.DescribeResponse(
            protocol_version=bounds.PROTOCOL_VERSION,
            software_version=self.software_version,
            architecture=artifact.architecture,
            source_sha256=artifact.source_sha256,
            pipeline_id=artifact.pipeline_id,
            stage_index=artifact.stage_index,
            stage_count=artifact.stage_count,
            layer_start=artifact.layer_start,
            layer_end=artifact.layer_end,
            n_embd=artifact.n_embd,
            n_vocab=artifact.n_vocab,
            n_lanes=config.engine.n_lanes,
            ctx_tokens=config.engine.ctx_tokens,
            rope_original_tokens=0 if artifact.long_rope is None else artifact.long_rope.original_tokens,
            kv_per_lane=config.engine.layout_used == "per-lane",
            max_rows=config.engine.max_rows,
            rewinds=self.rewinds,
            keeps_state=self.keeps_state,
            rewind_rows=self.rewind_rows,
            predictions=self.predictions,
            takes_guess_wishes=True,
            inner_layers=artifact.inner_layers,
            instance_id=self.instance_id,
            name=self.name,
            place=self.place,
            takes_rows=artifact.takes_rows,
            takes_mutual_rows=self.takes_mutual_rows,
            takes_grids=True,
            runs_ahead=self.ahead_rows > 0,
            options=sorted(OPTIONS),
            adapters=choice_keys(config.adapters),
        )
        self.curves.tell(message)
        return message
