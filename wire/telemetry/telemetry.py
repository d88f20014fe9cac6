"""Telemetry of one process: how much is traced, where spans go, what was lost. Explicitly passed, never a global.

Serving comes first: a collector that is dead, slow or refuses costs the user nothing but `dropped_spans`. Spans wait in
a bounded queue (wire.telemetry.export); what does not fit is counted and gone.

Levels. `off` records nothing at all. `summary` keeps the in-memory rings and makes one trace per request. `batches`
adds a span per native batched decode. `frames` adds what every member frame waited for. The level may change at any
time; where spans go is decided once at the start, by the standard OTEL_* variables and the endpoint given by flag.

The OpenTelemetry SDK is imported only where spans have somewhere to go.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context

from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.config import LEVEL_NAMES, Level, TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import Attributes

    from relayline.wire.telemetry.export import Pipe

__all__ = ["LEVEL_NAMES", "SHUTDOWN_TIMEOUT_S", "Level", "Role", "Telemetry", "TelemetryConfig", "context_of"]

SHUTDOWN_TIMEOUT_S = 2.0  # for the last spans at the end of a process; what is left then is dropped


class Role(enum.Enum):
    """Which process speaks; the value is its service.name."""

    COORDINATOR = names.SERVICE_COORDINATOR
    STAGE = names.SERVICE_STAGE


class Telemetry:
    """Spans of one process. Make it with `Telemetry.start`; `Telemetry()` exports nothing.

    Event loop only, apart from `level`, `is_exporting` and `records`, which any thread may read.
    """

    def __init__(self, config: TelemetryConfig | None = None, pipe: Pipe | None = None) -> None:
        self.config = config or TelemetryConfig()
        self.level = self.config.level
        self._pipe = pipe
        self.tracer: trace.Tracer = pipe.tracer if pipe else trace.NoOpTracer()

    @classmethod
    def start(
        cls,
        role: Role,
        instance_id: str,
        config: TelemetryConfig,
        exporters: Sequence[SpanExporter] | None = None,
    ) -> Telemetry:
        """Set up export as flags and OTEL_* variables say, or to the given exporters (tests).

        instance_id becomes service.instance.id unless OTEL_RESOURCE_ATTRIBUTES says otherwise. Never waits for a
        collector. Raises UsageError for settings that cannot be used.
        """
        from relayline.wire.telemetry import choice as telemetry_choice

        if exporters is None:
            exporters = telemetry_choice.exporters(config.otlp_endpoint)
        if not exporters:
            return cls(config)
        from relayline.wire.telemetry.export import Pipe

        hint = telemetry_choice.hint(config.otlp_endpoint, os.environ)
        return cls(config, Pipe(role.value, instance_id, config.sampler_ratio, exporters, hint))

    @property
    def is_exporting(self) -> bool:
        """Whether spans have anywhere to go."""
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
        own: bytes | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        links: Sequence[trace.Link] = (),
        attributes: Attributes = None,
    ) -> trace.Span:
        """Start a span that began at start_ns of the wall clock, under `parent` or as the root of a new trace.

        own: 25 bytes of trace_context that were promised before the span could be made; root spans only.
        """
        if own is not None and self._pipe is not None:
            self._pipe.plan_ids(own)
        # An explicit context: what happens to be current on the event loop belongs to somebody else.
        above = trace.NonRecordingSpan(parent) if parent is not None else trace.INVALID_SPAN
        context = trace.set_span_in_context(above, Context())
        return self.tracer.start_span(
            name, context=context, kind=kind, links=links, attributes=attributes, start_time=start_ns
        )

    @staticmethod
    def wall_offset_ns() -> int:
        """Return what to add to this process's monotonic nanoseconds to get the wall clock's.

        Asked anew for every span, since the wall clock may be set; use one answer for all times of one span.
        """
        return time.time_ns() - time.monotonic_ns()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything ended so far was exported or given up; false when time ran out. Blocks."""
        return self._pipe.flush(timeout_s) if self._pipe else True

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Export what is left within timeout_s, drop and count the rest. Blocks; call it off the event loop."""
        if self._pipe is not None:
            self._pipe.shutdown(timeout_s)


def context_of(span: trace.Span) -> bytes:
    """Return the 25 bytes with which a span's context travels in frames."""
    return trace_context.pack(span.get_span_context())
