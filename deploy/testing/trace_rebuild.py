"""Rebuilds the work of the stages from stored spans alone: sessions, batches, and the batch of any token at any stage.

It knows the names of attributes and the meaning of links, and nothing about the processes that made the spans.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from relayline.deploy.testing.otlp_receiver import StoredSpan
from relayline.wire.telemetry import names

ROUTE = "POST /v1/completions"  # the span of a request at the HTTP API


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One frame of a batch."""

    session: str  # 16 hexadecimal digits
    position: int  # of its first row
    n_rows: int
    wait_ns: int

    def holds(self, session: str, position: int) -> bool:
        """Return whether this frame holds a session's row of that position."""
        return self.session == session and self.position <= position < self.position + self.n_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One native batched decode, read from its span."""

    span: StoredSpan
    stage: int
    step: int
    n_rows: int
    members: tuple[Member, ...]
    requests: tuple[tuple[str, str], ...]  # contexts of the member links, in the order of the members
    upstream: tuple[tuple[str, str], ...]  # contexts of its rows' spans: its parent first, then the others


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One generation, read from the spans of its request."""

    session: str
    request_id: str
    trace_id: str
    n_prompt: int
    n_generated: int
    decode_span: StoredSpan

    @property
    def sampled_rows(self) -> range:
        """Positions of the rows that its tokens were sampled from, one per token."""
        return range(self.n_prompt - 1, self.n_prompt - 1 + self.n_generated)


@dataclasses.dataclass(frozen=True, slots=True)
class Rebuilt:
    """Everything in the spans of one run."""

    sessions: tuple[Session, ...]
    batches: Mapping[tuple[int, int], Batch]  # by (stage, step)
    batch_by_context: Mapping[tuple[str, str], Batch]

    def of_stage(self, stage: int) -> list[Batch]:
        """The batches of a stage in the order of its steps."""
        return [self.batches[key] for key in sorted(self.batches) if key[0] == stage]

    def batches_of(self, session: str, position: int, stage: int) -> list[Batch]:
        """Every batch of a stage that decoded this position of a session, in order.

        There is one, unless it was replayed or had a wrong guess before.
        """
        return [
            batch for batch in self.of_stage(stage) if any(member.holds(session, position) for member in batch.members)
        ]


def batch_of(span: StoredSpan) -> Batch:
    """Read one batch span. AssertionError when it contradicts itself."""
    found = span.attributes
    members = tuple(
        Member(*each)
        for each in zip(
            found[names.ATTR_MEMBER_SESSIONS],
            found[names.ATTR_MEMBER_POSITIONS],
            found[names.ATTR_MEMBER_ROWS],
            found[names.ATTR_MEMBER_WAITS_NS],
            strict=True,
        )
    )
    stage, step = found[names.ATTR_STAGE_INDEX], found[names.ATTR_BATCH_STEP]
    assert found[names.ATTR_BATCH_ID] == f"{stage}:{step}"
    assert found[names.ATTR_BATCH_ROWS] == sum(member.n_rows for member in members)
    assert found[names.ATTR_BATCH_FRAMES] == len(members)
    assert found[names.ATTR_BATCH_SESSIONS] == len({member.session for member in members})
    assert span.parent_id, "a batch is below the root of its second of passes, or below the batch of the stage before"
    assert span.name in names.BATCH_NAMES
    assert span.n_dropped_links == span.n_dropped_attributes == 0
    by_kind = {
        kind: tuple((link.trace_id, link.span_id) for link in span.links if link.attributes[names.ATTR_LINK] == kind)
        for kind in (names.LINK_MEMBER, names.LINK_UPSTREAM_BATCH)
    }
    assert len(by_kind[names.LINK_MEMBER]) + len(by_kind[names.LINK_UPSTREAM_BATCH]) == len(span.links)
    return Batch(
        span, stage, step, found[names.ATTR_BATCH_ROWS], members,
        by_kind[names.LINK_MEMBER], ((span.trace_id, span.parent_id), *by_kind[names.LINK_UPSTREAM_BATCH]),
    )  # fmt: skip


def session_of(span: StoredSpan) -> Session:
    """Read one decode span."""
    found = span.attributes
    return Session(
        session=found[names.ATTR_SESSION_ID],
        request_id=found[names.ATTR_REQUEST_ID],
        trace_id=span.trace_id,
        n_prompt=found[names.ATTR_PROMPT_TOKENS],
        n_generated=found[names.ATTR_GENERATED_TOKENS],
        decode_span=span,
    )


def rebuild(spans: Iterable[StoredSpan]) -> Rebuilt:
    """Sort spans into sessions and batches."""
    spans = list(spans)
    batches = [batch_of(span) for span in spans if is_batch(span)]
    found = Rebuilt(
        sessions=tuple(session_of(span) for span in spans if span.name == names.SPAN_DECODE),
        batches={(batch.stage, batch.step): batch for batch in batches},
        batch_by_context={batch.span.context: batch for batch in batches},
    )
    assert len(found.batches) == len(found.batch_by_context) == len(batches), "two spans claim one step"
    return found


def is_batch(span: StoredSpan) -> bool:
    """Whether a span is a native batched decode; a frame in it has the same name."""
    return names.ATTR_BATCH_STEP in span.attributes


def is_complete(spans: Iterable[StoredSpan], n_steps: int, n_requests: int) -> bool:
    """Whether all spans of every request and of every native step have arrived: processes send theirs in any order.

    The requests have more than one token each.
    """
    spans = list(spans)
    found = collections.Counter(span.name for span in spans)
    # A stage sends its last span of a request, which is of the decode phase, at its close.
    decodes = {span.context for span in spans if span.name == names.SPAN_DECODE}
    last = [span for span in spans if span.name == names.SPAN_BATCHES and (span.trace_id, span.parent_id) in decodes]
    n_stages = len({span.attributes[names.ATTR_STAGE_INDEX] for span in spans if is_batch(span)})
    is_ended = len(last) >= n_requests * n_stages
    roots = {span.trace_id for span in spans if span.name in names.PASSES_NAMES}
    of_passes = {span.trace_id for span in spans if span.parent_id and is_batch(span)}  # also those that stages make
    is_ended &= found[ROUTE] == found[names.SPAN_DECODE] == n_requests
    return is_ended and of_passes <= roots and sum(map(is_batch, spans)) >= n_steps
