"""The table of a stage's figures: what /metrics shows and the page of metrics says. Pure.

To add one, write an entry here and count it in `stats` (or hold it in `Gauges`); nothing else has to know of it.
"""

from __future__ import annotations

import dataclasses

from relayline.wire.telemetry import names

SECONDS = "seconds"  # the unit of figures that are counted in nanoseconds
_UNIT_SCALES = {SECONDS: 1e-9}


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One figure. A counter's name gets `_total` on its way out."""

    name: str
    help: str
    field: str
    """The attribute that holds it: a number, or numbers by label."""
    unit: str = ""
    label: str = ""
    """The label by which it is counted."""

    @property
    def scale(self) -> float:
        """The factor from the field's number to the metric's unit."""
        return _UNIT_SCALES.get(self.unit, 1.0)


COUNTERS: tuple[Figure, ...] = (  # of StageStats
    Figure(names.METRIC_STEPS, "Native steps", "n_steps"),
    Figure(names.METRIC_ROWS, "Rows decoded, without padding", "n_rows"),
    Figure(names.METRIC_ROWS_AHEAD, "Of these rows, those computed before they were asked for", "n_rows_ahead"),
    Figure(names.METRIC_ROWS_DROPPED, "Rows computed ahead in vain; not among the rows decoded", "n_rows_dropped"),
    Figure(names.METRIC_PADDED_ROWS, "Padding rows decoded in the same steps", "n_padded_rows"),
    Figure(names.METRIC_MICRO_BATCHES, "Micro-batches that llama.cpp ran", "n_micro_batches"),
    Figure(names.METRIC_STEP_SECONDS, "Time inside native decode", "busy_ns", SECONDS),
    Figure(
        names.METRIC_STEP_PREDICTED_SECONDS, "Predicted time of the steps with a prediction", "predicted_ns", SECONDS
    ),
    Figure(names.METRIC_STEP_MEASURED_SECONDS, "Measured time of the same steps", "measured_ns", SECONDS),
    Figure(names.METRIC_ENCODE_SECONDS, "Time for encoding rows or sampling", "encode_ns", SECONDS),
    Figure(names.METRIC_EPOCHS, "Connections by a coordinator; all after its first are recoveries", "n_epochs"),
    Figure(names.METRIC_CLOSE_REASONS, "Batches by close reason", "close_reasons", label=names.LABEL_CLOSE_REASON),
    Figure(names.METRIC_FAULTS, "Faults of sessions by error", "faults_by_label", label=names.LABEL_ERROR),
    Figure(names.METRIC_TIER_LOOKUPS, "Lookups in the stored prefix cache", "tier_lookups", label=names.LABEL_OUTCOME),
    Figure(
        names.METRIC_LINK_BYTES, "Payload bytes on links to neighbours", "payload_bytes", label=names.LABEL_DIRECTION
    ),
    Figure(names.METRIC_LINK_ENVELOPES, "Envelopes on links to neighbours", "envelopes", label=names.LABEL_DIRECTION),
)
TELEMETRY_COUNTERS: tuple[Figure, ...] = (  # of Telemetry
    Figure(names.METRIC_SPANS_EXPORTED, "Spans that a collector accepted", "exported_spans"),
    Figure(names.METRIC_SPANS_DROPPED, "Spans that were lost", "dropped_spans"),
)
GAUGES: tuple[Figure, ...] = (  # of Gauges
    Figure(names.METRIC_QUEUED_ROWS, "Rows waiting for a step", "queued_rows"),
    Figure(names.METRIC_QUEUED_FRAMES, "Frames waiting for a step, controls included", "queued_frames"),
    Figure(names.METRIC_LANES_USED, "Lanes of running sessions", "lanes_used"),
    Figure(names.METRIC_LANES_KEPT, "Lanes that hold prefixes of ended sessions", "lanes_kept"),
    Figure(names.METRIC_LANES_LIMIT, "Sessions that this stage can hold", "lanes_total"),
    Figure(
        names.METRIC_TIER_BYTES,
        "Bytes in the stored prefix cache",
        "tier_bytes",
        label=names.LABEL_PLACE,
    ),
    Figure(names.METRIC_TIER_STATES, "Prefixes in the stored prefix cache", "tier_states"),
    Figure(names.METRIC_LINK_IN_FLIGHT, names.HELP_LINK_IN_FLIGHT, "in_flight_bytes"),
    Figure(names.METRIC_LINK_WINDOW, names.HELP_LINK_WINDOW, "window_bytes"),
)
TELEMETRY_GAUGES: tuple[Figure, ...] = (
    Figure(names.METRIC_TELEMETRY_LEVEL, "0 off, 1 summary, 2 batches, 3 frames", "level"),
)
HISTOGRAMS = (  # of StageStats, each in its own form
    Figure(names.METRIC_BATCH_ROWS, "Rows of a native step, without padding", "steps_by_rows"),
    Figure(
        names.METRIC_BATCH_SESSIONS, "Frames of a native step; nearly always one of each session", "steps_by_sessions"
    ),
    Figure(
        names.METRIC_FRAME_WAIT, "Wait of a frame from its arrival to the start of its step", "waits_by_bucket", SECONDS
    ),
)
