"""Telemetry that keeps its spans in memory, for tests."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from relayline.wire.telemetry.config import Level, TelemetryConfig
from relayline.wire.telemetry.telemetry import Role, Telemetry

FLUSH_TIMEOUT_S = 60.0


class Kept:
    """One process's telemetry and the spans that it ended."""

    def __init__(
        self, role: Role = Role.COORDINATOR, level: Level = Level.BATCHES, *, content: bool = False, name: str = "test"
    ) -> None:
        self._exporter = InMemorySpanExporter()
        config = TelemetryConfig(level=level, content=content)
        self.telemetry = Telemetry.start(role, name, config, [self._exporter])

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Every span ended so far, or those of one name, in the order of their ends."""
        assert self.telemetry.flush(FLUSH_TIMEOUT_S)
        return [span for span in self._exporter.get_finished_spans() if name in (None, span.name)]

    def one(self, name: str) -> ReadableSpan:
        """The only span of that name."""
        (span,) = self.spans(name)
        return span


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})
