"""Trace contexts on the wire: 25 bytes, all zero for none.

Layout: trace id (16, big endian as in W3C's text form), span id (8), flags (1; bit 0 = sampled). Fixed-width bytes
rather than a text header: every frame of every step carries one, and most are only passed on.

Importing this module does not import OpenTelemetry; only `unpack` and `pack` need its API package.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from relayline.wire.envelopes.frames import TRACE_BYTES

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

NONE: Final = bytes(TRACE_BYTES)
TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
IDS_BYTES: Final = TRACE_ID_BYTES + SPAN_ID_BYTES  # the identity of a span: the context without its flags
_FLAGS_AT: Final = IDS_BYTES
_SAMPLED: Final = 0x01
# A private generator: a caller that seeds the shared one must not make two processes choose the same ids. Seeded by the
# system once, since asking the system for every id takes several times as long.
_ids = random.Random(random.SystemRandom().getrandbits(256))
os.register_at_fork(after_in_child=lambda: _ids.seed(random.SystemRandom().getrandbits(256)))
_getrandbits = _ids.getrandbits


def is_sampled(context: bytes) -> bool:
    """Return whether a context of TRACE_BYTES belongs to a trace that is recorded."""
    return context[_FLAGS_AT] & _SAMPLED != 0


def new_root() -> bytes:
    """Return a fresh sampled context for the root span of a new trace. Any thread; about a microsecond."""
    while True:
        ids = _getrandbits(8 * IDS_BYTES).to_bytes(IDS_BYTES, "big")
        if any(ids[:TRACE_ID_BYTES]) and any(ids[TRACE_ID_BYTES:]):
            return ids + b"\x01"


def new_below(parent: bytes) -> bytes:
    """Return a fresh sampled context in the trace of another one. Any thread; less than a microsecond."""
    return parent[:TRACE_ID_BYTES] + (_getrandbits(8 * SPAN_ID_BYTES) or 1).to_bytes(SPAN_ID_BYTES, "big") + b"\x01"


def sampled_of(contexts: Iterable[bytes]) -> bytes:
    """Return the first context that belongs to a recorded trace; NONE without one."""
    return next((context for context in contexts if context[_FLAGS_AT] & _SAMPLED), NONE)


def pack(context: SpanContext) -> bytes:
    """Return the TRACE_BYTES of a span context; NONE for an invalid one. The trace state does not travel."""
    if not context.is_valid:
        return NONE
    return (
        context.trace_id.to_bytes(TRACE_ID_BYTES, "big")
        + context.span_id.to_bytes(SPAN_ID_BYTES, "big")
        + bytes([context.trace_flags & _SAMPLED])
    )


def unpack(context: bytes) -> SpanContext | None:
    """Return the remote span context that TRACE_BYTES (or IDS_BYTES, then sampled) name; None for zeros.

    Raises ValueError for another number of bytes.
    """
    from opentelemetry.trace import SpanContext, TraceFlags

    if len(context) not in (TRACE_BYTES, IDS_BYTES):
        raise ValueError(f"a trace context has {TRACE_BYTES} or {IDS_BYTES} bytes, not {len(context)}")
    trace_id = int.from_bytes(context[:TRACE_ID_BYTES], "big")
    span_id = int.from_bytes(context[TRACE_ID_BYTES:IDS_BYTES], "big")
    if not trace_id or not span_id:
        return None
    flags = context[_FLAGS_AT] & _SAMPLED if len(context) == TRACE_BYTES else _SAMPLED
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
