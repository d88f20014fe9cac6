"""Spans that are made in one piece after they have ended, such as a stage's spans of its batches.

The SDK starts a span, extends it, ends it and then exports it. For a step of a tiny model this takes a stage longer
than all its other work. A `FinishedSpan` holds plain values, unchecked, and any exporter of the SDK can use it: it
makes the SDK's objects when an exporter asks for them. `wire.telemetry.otlp` never asks: it writes OTLP from the plain
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from relayline.wire.envelopes import trace_context

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.util.types import AttributeValue

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FINE = Status(StatusCode.UNSET)
_NONE: dict[str, AttributeValue] = {}  # never written to


class Event(NamedTuple):
    """Something at one moment of a span."""

    name: str
    at_ns: int  # of the wall clock
    attributes: dict[str, AttributeValue] = _NONE


class Link(NamedTuple):
    """Another span that a span has to do with, by its 24 or 25 bytes of context."""

    context: bytes
    attributes: dict[str, AttributeValue] = _NONE


class Finished(NamedTuple):
    """A span as its maker says it. Times are of the wall clock; contexts are 25 bytes (trace_context)."""

    name: str
    own: bytes
    parent: bytes  # trace_context.NONE for the root of a trace
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    kind: SpanKind = SpanKind.INTERNAL
    error: str = ""  # what went wrong; empty: nothing


class FinishedSpan(ReadableSpan):
    """A Finished in the form that processors and exporters take."""

    def __init__(
        self,
        finished: Finished,
        resource: Resource,
        scope: InstrumentationScope,
        n_dropped_links: int = 0,
        n_dropped_events: int = 0,
    ) -> None:
        own = finished.own
        ids = (int.from_bytes(own[:16], "big"), int.from_bytes(own[16:24], "big"))
        super().__init__(
            finished.name,
            SpanContext(*ids, is_remote=False, trace_flags=SAMPLED),
            resource=resource,
            kind=finished.kind,
            status=Status(StatusCode.ERROR, finished.error) if finished.error else _FINE,
            start_time=finished.start_ns,
            end_time=finished.end_ns,
            instrumentation_scope=scope,
        )
        self.finished = finished
        self._n_dropped_links, self._n_dropped_events = n_dropped_links, n_dropped_events

    @property
    def parent(self) -> SpanContext | None:
        """The span above."""
        return trace_context.unpack(self.finished.parent)

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """Its attributes, lists as tuples as the SDK keeps them."""
        return {
            key: tuple(value) if isinstance(value, list) else value for key, value in self.finished.attributes.items()
        }

    @property
    def events(self) -> Sequence[SdkEvent]:
        """Its events."""
        return [SdkEvent(event.name, event.attributes, event.at_ns) for event in self.finished.events]

    @property
    def links(self) -> Sequence[SdkLink]:
        """Its links."""
        found = ((trace_context.unpack(link.context), link.attributes) for link in self.finished.links)
        return [SdkLink(context, attributes) for context, attributes in found if context is not None]

    @property
    def dropped_links(self) -> int:
        """Links that were more than a span may have."""
        return self._n_dropped_links

    @property
    def dropped_events(self) -> int:
        """Events that were more than a span may have."""
        return self._n_dropped_events
