"""The OpenTelemetry SDK behind `Telemetry`: a private provider, a bounded queue, and a count of lost spans.

The SDK's batch processor queues, and its exporters send, in their own thread. A counter wraps both: it refuses a span
before the SDK's queue would overflow, and it sees the spans that an exporter failed to send. The SDK's messages about a
failing collector become an occasional line in our log, not one per attempt.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from relayline.wire.common.versions import version_of
from relayline.wire.envelopes import trace_context
from relayline.wire.telemetry import names
from relayline.wire.telemetry.spans import FinishedSpan

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from relayline.wire.telemetry.spans import Finished

log = logging.getLogger("relayline.telemetry")

LINKS_PER_SPAN_MAX = 4_096  # a batch links every member; OTEL_SPAN_LINK_COUNT_LIMIT wins
EVENTS_PER_SPAN_MAX = 4_096
SPANS_QUEUED_MAX = 8_192  # ended, not yet handed to the exporter; OTEL_BSP_MAX_QUEUE_SIZE wins
SPANS_PER_EXPORT_MAX = 512  # OTEL_BSP_MAX_EXPORT_BATCH_SIZE wins
EXPORT_EVERY_MS = 1_000  # OTEL_BSP_SCHEDULE_DELAY wins
COMPLAIN_EVERY_S = 60.0  # lines about a failing collector
COMPLAINT_CHARS_MAX = 500


class Pipe:
    """A tracer whose spans go to exporters. Every method may be called by any thread."""

    def __init__(
        self,
        who: Mapping[str, AttributeValue],
        sampler_ratio: float,
        exporters: Sequence[SpanExporter],
        hint: str = "",
    ) -> None:
        """`who` are the attributes of the resource; names.RESOURCE_SERVICE_NAME there is without its stem.

        `hint` is logged when spans do not arrive: how they are sent, and which setting changes that.
        """
        _route_sdk_log(hint)
        self._processors = [_Counted(exporter) for exporter in exporters]
        self._sampler_ratio, self._limits = sampler_ratio, _limits()
        self._scope = InstrumentationScope(names.SCOPE, version_of())
        self._identify(who)

    def identify(self, who: Mapping[str, AttributeValue]) -> None:
        """Make spans from here on those of another resource: a stage has been given its place, or another one."""
        self._identify(who)

    def _identify(self, who: Mapping[str, AttributeValue]) -> None:
        self._resource = _resource(who)
        self._provider = TracerProvider(
            # 1.0 expresses no wish: then the SDK reads OTEL_TRACES_SAMPLER.
            sampler=ParentBasedTraceIdRatio(self._sampler_ratio) if self._sampler_ratio < 1.0 else None,
            resource=self._resource,
            shutdown_on_exit=False,
            span_limits=self._limits,
        )
        # Otherwise no span of this process is ever recorded, and none may be promised.
        self.is_sampling = not self._provider.sampler.get_description().startswith("AlwaysOff")
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self.tracer: trace.Tracer = self._provider.get_tracer(names.SCOPE, version_of())

    def samples(self, context: bytes) -> bool:
        """Return whether the head sampler takes the root of a new trace with these ids."""
        trace_id = int.from_bytes(context[: trace_context.TRACE_ID_BYTES], "big")
        decided = self._provider.sampler.should_sample(None, trace_id, names.SPAN_PASSES).decision
        return decided is Decision.RECORD_AND_SAMPLE

    def emit(self, finished: Finished) -> None:
        """Export a span that is over. Whether it is recorded has been decided where its ids were chosen."""
        links, events = self._limits.max_links, self._limits.max_events
        n_links, n_events = _beyond(len(finished.links), links), _beyond(len(finished.events), events)
        if n_links or n_events:
            finished = finished._replace(links=finished.links[:links], events=finished.events[n_events:])
        span = FinishedSpan(finished, self._resource, self._scope, n_links, n_events)
        for processor in self._processors:
            processor.on_end(span)

    @property
    def dropped_spans(self) -> int:
        """Spans lost on the way to any exporter."""
        return sum(processor.dropped for processor in self._processors)

    @property
    def exported_spans(self) -> int:
        """Spans that every exporter took."""
        return min(processor.exported for processor in self._processors)

    def flush(self, timeout_s: float) -> bool:
        """Export everything ended so far; false when timeout_s was not enough."""
        return _within(timeout_s, self._provider.force_flush)

    def shutdown(self, timeout_s: float) -> None:
        """Export the remaining spans within timeout_s and close. Spans that still remain count as dropped."""
        if not _within(timeout_s, self._provider.shutdown):
            for processor in self._processors:
                processor.give_up()
        if self.dropped_spans:
            log.warning("telemetry lost spans", extra={"fields": {"dropped_spans": self.dropped_spans}})


def _within(timeout_s: float, work: Callable[[], object]) -> bool:
    """Run blocking work of the SDK in a thread, because the SDK has no time limit; false if it is still at it."""
    thread = threading.Thread(target=work, name="telemetry-flush", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _beyond(n: int, most: int | None) -> int:
    return 0 if most is None else max(0, n - most)


def _resource(who: Mapping[str, AttributeValue]) -> Resource:
    given = dict(OTELResourceDetector().detect().attributes)
    # One name for all of its services would take their places in the pipeline away from them.
    stem = str(given.pop(names.RESOURCE_SERVICE_NAME, names.SERVICE_STEM))
    name = f"{stem}-{who[names.RESOURCE_SERVICE_NAME]!s}"
    ours = {**who, names.RESOURCE_SERVICE_VERSION: version_of()}
    # Resource.create would let our values win over OTEL_RESOURCE_ATTRIBUTES, and OTEL_SERVICE_NAME over our name.
    detected = Resource.create({}).attributes
    return Resource({**detected, **ours, **given, names.RESOURCE_SERVICE_NAME: name})


def _limits() -> SpanLimits:
    # An argument would beat the variable, so it is given only where the variable says nothing.
    return SpanLimits(
        max_links=None if "OTEL_SPAN_LINK_COUNT_LIMIT" in os.environ else LINKS_PER_SPAN_MAX,
        max_events=None if "OTEL_SPAN_EVENT_COUNT_LIMIT" in os.environ else EVENTS_PER_SPAN_MAX,
    )


class _Counted(SpanProcessor):
    """The SDK's batch processor and one exporter, with a count at both ends."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _CountedExporter(exporter)
        self._queued_max = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", SPANS_QUEUED_MAX)
        self._batch = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._queued_max,
            schedule_delay_millis=_from_environment("OTEL_BSP_SCHEDULE_DELAY", EXPORT_EVERY_MS),
            max_export_batch_size=min(
                self._queued_max, _from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", SPANS_PER_EXPORT_MAX)
            ),
        )
        self._lock = threading.Lock()
        self._taken = self._refused = 0
        self._closed = False

    @property
    def exported(self) -> int:
        return self._exporter.exported

    @property
    def dropped(self) -> int:
        # Once closed, queued and half-sent spans are lost.
        lost = self._taken - self._exporter.exported if self._closed else self._exporter.failed
        return self._refused + lost

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            # The exporter's count only grows, so the queue is at most as long as this says.
            if self._closed or self._taken - self._exporter.seen >= self._queued_max:
                self._refused += 1
                return
            self._taken += 1
        self._batch.on_end(span)

    def shutdown(self) -> None:
        self._batch.shutdown()  # type: ignore[no-untyped-call]
        self._closed = True

    def give_up(self) -> None:
        """Stop waiting for the exporter in any state."""
        self._closed = True
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._batch.force_flush(timeout_millis)


class _CountedExporter(SpanExporter):
    """Passes spans on and counts how that went; never raises."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.seen = self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.seen += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # any exception of a third-party exporter
            _complain(f"{type(error).__name__}: {error}")
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
        else:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _from_environment(key: str, default: int) -> int:
    try:
        return max(1, int(os.environ[key]))
    except (KeyError, ValueError):
        return default


# --- the SDK's own messages -------------------------------------------------------------------------------------------


class _SdkLog(logging.Handler):
    """Turns the SDK's warnings into ours, a line in COMPLAIN_EVERY_S at most."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until_s = 0.0
        self.hint = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.complain(record.getMessage())

    def complain(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + COMPLAIN_EVERY_S
        line = " ".join(what.split())[:COMPLAINT_CHARS_MAX]
        hint = f"; {self.hint}" if self.hint else ""
        text = "spans do not reach the collector%s. Serving goes on and counts them. The exporter's message: %s"
        log.warning(text, hint, line)


_SDK_LOG = _SdkLog()


def _complain(what: str) -> None:
    _SDK_LOG.complain(what)


def _route_sdk_log(hint: str) -> None:
    """Take the SDK's loggers over; they are the process's, so once is enough."""
    _SDK_LOG.hint = hint
    sdk = logging.getLogger("opentelemetry")
    if _SDK_LOG not in sdk.handlers:
        sdk.addHandler(_SDK_LOG)
        sdk.propagate = False
