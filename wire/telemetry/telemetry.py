"""Telemetry of one process: its level, where spans go, and losses. Explicitly passed, never a global.

Serving comes first: a collector that is dead, slow or refuses costs the user only `dropped_spans`. Spans wait in a
bounded queue (wire.telemetry.export); spans that do not fit are counted and dropped.

Levels. `off` records nothing at all. `summary` keeps the in-memory rings and makes one trace per request. `batches`
adds a span per native batched decode. `frames` adds the wait of every member frame. The level may change at any time;
where spans go is decided once at the start, by the standard OTEL_* variables and the endpoint given by flag.

The OpenTelemetry SDK is imported only where spans have somewhere to go.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context

from relayline.wire.common.texts import layer_range
from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.clock import Clock
from relayline.wire.telemetry.config import LEVEL_NAMES, Level, TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import Attributes, AttributeValue

    from relayline.wire.telemetry.export import Pipe
    from relayline.wire.telemetry.spans import Finished

__all__ = ["LEVEL_NAMES", "SHUTDOWN_TIMEOUT_S", "Level", "Role", "Telemetry", "TelemetryConfig", "context_of"]

AT_ONCE_NS = 20_000  # two readings of clocks that nothing came between
READINGS_MAX = 4
SHUTDOWN_TIMEOUT_S = 2.0  # for the last spans at the end of a process; spans that remain then are dropped


class Role(enum.Enum):
    """The kind of process; the value is the end of its service.name, a stage's without its index."""

    COORDINATOR = names.SERVICE_COORDINATOR
    STAGE = names.SERVICE_STAGE


class Telemetry:
    """Spans of one process. Make it with `Telemetry.start`; `Telemetry()` exports nothing.

    Event loop only, apart from `level`, `is_exporting` and `records`, which any thread may read.
    """

    def __init__(
        self,
        config: TelemetryConfig | None = None,
        pipe: Pipe | None = None,
        who: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        self.config = config or TelemetryConfig()
        self.level = self.config.level
        self._pipe, self._who = pipe, dict(who or {})
        self._clock: Clock | None = None
        self._noted_clock: Clock | None = None  # the resource's note on the clock

    @classmethod
    def start(
        cls,
        role: Role,
        instance_id: str,
        config: TelemetryConfig,
        exporters: Sequence[SpanExporter] | None = None,
        **more: Any,
    ) -> Telemetry:
        """Set up export as flags and OTEL_* variables say, or to the given exporters (tests).

        instance_id becomes service.instance.id unless OTEL_RESOURCE_ATTRIBUTES says otherwise; `more` is as for
        `identify`. Never waits for a collector. Raises UsageError for settings that cannot be used.
        """
        from relayline.wire.telemetry import choice as telemetry_choice

        if exporters is None:
            exporters = telemetry_choice.exporters(config.otlp_endpoint)
        if not exporters:
            return cls(config)
        from relayline.wire.telemetry.export import Pipe

        who = {names.RESOURCE_SERVICE_NAME: role.value, names.RESOURCE_SERVICE_INSTANCE: instance_id}
        hint = telemetry_choice.hint(config.otlp_endpoint, os.environ)
        telemetry = cls(config, Pipe(who, config.sampler_ratio, exporters, hint), who)
        telemetry.identify(**more)
        return telemetry

    def identify(
        self,
        *,
        stage_index: int | None = None,
        pipeline_name: str | None = None,
        stage_name: str | None = None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Set the resource of later spans, as far as known. layers: first, and one past the last.

        Omitted values stay unchanged.
        """
        known = dict(self._who)
        if stage_index is not None:
            known[names.RESOURCE_SERVICE_NAME] = f"{names.SERVICE_STAGE}-{stage_index}"
        if layers is not None:
            known[names.RESOURCE_STAGE_LAYERS] = layer_range(*layers)
        if pipeline_name is not None:
            known[names.RESOURCE_SERVICE_NAMESPACE] = pipeline_name
        if stage_name is not None:
            known[names.RESOURCE_STAGE_NAME] = stage_name
        self._say(known)

    def _say(self, known: dict[str, AttributeValue]) -> None:
        if known != self._who and self._pipe is not None:
            self._pipe.identify({key: value for key, value in known.items() if value != ""})
        self._who = known

    def set_clock(self, clock: Clock) -> None:
        """Stamp spans with the coordinator's wall clock from here on, and say so in the resource."""
        self._clock = clock
        if self._noted_clock is not None and clock.is_like(self._noted_clock):
            return  # a resource for every estimate would make a service of many of each stage
        self._noted_clock = clock
        offset_ns = clock.unix_offset_ns - own_offset_ns()
        self._say(
            {
                **self._who,
                names.RESOURCE_CLOCK: names.CLOCK_COORDINATOR,
                names.RESOURCE_CLOCK_OFFSET: round(offset_ns / 1e9, 6) + 0.0,
                names.RESOURCE_CLOCK_UNCERTAINTY: round(clock.uncertainty_ns / 1e9, 6),
            }
        )

    @property
    def clock(self) -> Clock | None:
        """The coordinator's last estimate of its clock; None: spans use this host's own clock."""
        return self._clock

    @property
    def is_exporting(self) -> bool:
        """Whether spans are exported."""
        return self._pipe is not None

    def records(self, level: Level) -> bool:
        """Return whether spans of this level are made now."""
        return self._pipe is not None and self._pipe.is_sampling and self.level >= level

    @property
    def dropped_spans(self) -> int:
        """Spans that never reached a collector: queue full, refused, out of time."""
        return self._pipe.dropped_spans if self._pipe else 0

    @property
    def exported_spans(self) -> int:
        """Spans that every exporter took."""
        return self._pipe.exported_spans if self._pipe else 0

    def start_span(
        self,
        name: str,
        *,
        start_ns: int,
        parent: trace.SpanContext | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        links: Sequence[trace.Link] = (),
        attributes: Attributes = None,
    ) -> trace.Span:
        """Start a span that began at start_ns of the wall clock, under `parent` or as the root of a new trace."""
        # An explicit context: the event loop's current one belongs to other work.
        above = trace.NonRecordingSpan(parent) if parent is not None else trace.INVALID_SPAN
        context = trace.set_span_in_context(above, Context())
        if self._pipe is None:
            return trace.INVALID_SPAN
        return self._pipe.tracer.start_span(
            name, context=context, kind=kind, links=links, attributes=attributes, start_time=start_ns
        )

    def emit(self, finished: Finished) -> None:
        """Export a span that is over; whether to record it has been decided where its ids were chosen."""
        if self._pipe is not None:
            self._pipe.emit(finished)

    def samples(self, context: bytes) -> bool:
        """Return whether the root of a new trace with these ids is to be recorded, by what OTEL_* says."""
        return self._pipe is not None and self._pipe.samples(context)

    def wall_offset_ns(self) -> int:
        """Return the number to add to this process's monotonic nanoseconds to get the wall clock of spans.

        Computed again for every span, since the wall clock may be set; use one answer for all times of one span.
        """
        return self._clock.unix_offset_ns if self._clock is not None else own_offset_ns()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans that have ended are exported or dropped; False if time ran out. Blocks."""
        return self._pipe.flush(timeout_s) if self._pipe else True

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Export the remaining spans within timeout_s, then drop and count the rest. Blocks; call it off the event
        loop."""
        if self._pipe is not None:
            self._pipe.shutdown(timeout_s)


def own_offset_ns() -> int:
    """Return the number to add to this process's monotonic nanoseconds to get its own wall clock.

    Both clocks should be read at the same moment, but between two readings this thread may have to wait for a core.
    """
    for _ in range(READINGS_MAX):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after_ns - before_ns < AT_ONCE_NS:
            break
    return wall_ns - (before_ns + after_ns) // 2


def context_of(span: trace.Span) -> bytes:
    """Return the 25 bytes with which a span's context travels in frames."""
    return trace_context.pack(span.get_span_context())
