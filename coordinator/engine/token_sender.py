"""Token envelopes for stage 0: the frames that the scheduler sends together travel as one message."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from relayline.coordinator.sessions.frame import Frame, Opening
from relayline.coordinator.sessions.request_log import UNKNOWN, SessionRecord
from relayline.wire.common import bounds
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.common.tasks import end_task
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.buffers import Buffer, with_extras
from relayline.wire.envelopes.frames import Flag, Head
from relayline.wire.links.eager import Begun
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")

_FIELD_BYTES = 8  # tag and length of a text, at most
_TOKEN_BYTES = 4  # at most, of a vocabulary of up to 2^28
# Of rows that the event loop writes itself. 512 rows of a wide model are 40 MiB, whose copy and checksum take 35 ms and
# more, in which no other stream would get its tokens.
_WRITTEN_BYTES_MAX = 256 * 1024
_Waiting: TypeAlias = "tuple[list[Frame], bytes, int]"  # frames, their trace context, when they were chosen
RecordOf: TypeAlias = "Callable[[int], SessionRecord]"


class TokenSender:
    """Sends the scheduler's envelopes in order, each as its own message.

    One per epoch. Bounded: a session has at most its history queued here, and lanes bound the sessions.
    """

    def __init__(
        self,
        link: RelayLink,
        epoch: int,
        on_error: Callable[[RelaylineError], None],
        on_sent: Callable[[bytes, Sequence[Frame], int, int], None] = lambda context, frames, chosen_ns, sent_ns: None,
        record_of: RecordOf = lambda session_id: UNKNOWN,
    ) -> None:
        """`on_sent(context, frames, chosen_ns, sent_ns)` is called for frames that have left with a sampled context.

        `record_of(session_id)` is the telemetry record of a session: the trace and the baggage that its frames carry.
        """
        self._link, self._epoch, self._on_error, self._on_sent = link, epoch, on_error, on_sent
        self._record_of = record_of
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._begun: tuple[_Waiting, Begun[None]] | None = None  # the write under way, begun by `push`
        self._wake, self._all_sent = asyncio.Event(), asyncio.Event()
        self._sequence = 0
        self._is_sending = False  # whether the task waits for gRPC
        self._task = asyncio.create_task(self._run())

    def push(self, envelope: Sequence[Frame], context: bytes = trace_context.NONE, chosen_ns: int = 0) -> None:
        """Send frames that stay together. If nothing is being sent, gRPC has them before this returns: stages must not
        wait for the readers of the tokens before.

        context: 25 bytes, of the root of the trace of passes that they belong to. chosen_ns: when they were chosen.
        """
        self._waiting.extend([(frames, context, chosen_ns) for frames in within_bounds(envelope)])
        self._all_sent.clear()
        if self._begun is None and not self._is_sending:
            first = self._waiting.popleft()
            self._begun = first, Begun(self._send(first[0], first[1]))
        self._wake.set()

    def is_idle(self) -> bool:
        """Whether everything that was pushed has been handed to gRPC."""
        return self._all_sent.is_set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued has been handed to gRPC, or can no longer be, or the time is over."""
        sent = asyncio.ensure_future(self._all_sent.wait())
        await asyncio.wait({sent, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()

    async def close(self) -> None:
        """Stop sending."""
        await end_task(self._task)

    async def _run(self) -> None:
        try:
            while True:
                while self._begun is not None or self._waiting:
                    self._is_sending = True
                    (frames, context, chosen_ns), sending = self._next()
                    await sending
                    self._is_sending = False
                    if context != trace_context.NONE:
                        self._on_sent(context, frames, chosen_ns, self._link.handed_ns)
                self._all_sent.set()
                self._wake.clear()
                await self._wake.wait()
        except RelaylineError as error:
            self._on_error(error)
        except Exception as error:  # a bug of ours: without a word, every later request would wait for ever
            log.exception("sending to stage 0 failed")
            self._on_error(InternalError(f"sending to stage 0 failed: {error}"))

    def _next(self) -> tuple[_Waiting, Awaitable[None]]:
        """Return the write under way, which `push` may have begun."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        entry = self._waiting.popleft()
        return entry, self._send(entry[0], entry[1])

    async def _send(self, frames: Sequence[Frame], context: bytes) -> None:
        self._sequence += 1
        n_bytes = sum([frame.rows.nbytes for frame in frames if frame.rows is not None])
        if n_bytes > _WRITTEN_BYTES_MAX:
            buffer, message = await asyncio.to_thread(self._written, frames, context, self._sequence)
        else:
            buffer, message = self._written(frames, context, self._sequence)
        await self._link.send(buffer, message)

    def _written(self, frames: Sequence[Frame], context: bytes, sequence: int) -> tuple[Buffer, bytes]:
        pool = self._link.pool if frames[0].rows is None else self._link.row_pool
        buffer = pool.lease(len(frames), sum([len(frame.tokens) for frame in frames]))
        message = write_tokens(buffer, frames, self._epoch, sequence, context, self._record_of, time.monotonic_ns())
        return buffer, message


def write_tokens(
    buffer: Buffer,
    frames: Sequence[Frame],
    epoch: int,
    sequence: int,
    context: bytes,
    record_of: RecordOf,
    now_ns: int,
) -> bytes:
    """Write an envelope of tokens, or of rows of images, into a buffer of its shape; returns the message.

    context: 25 bytes, of the root of the trace of passes that it belongs to.
    """
    if frames[0].rows is None:
        buffer.payload[:, 0] = [token for frame in frames for token in frame.tokens]
    else:
        np.concatenate([frame.rows for frame in frames if frame.rows is not None], out=buffer.payload)
    heads: list[Head] = []
    options: list[pb.SessionOptions] = []
    drafts: list[int] = []
    for session_id, position, tokens, flags, argument, _, opening, followers, _ in frames:
        trace = record_of(session_id).trace
        heads.append((session_id, epoch, position, len(tokens), flags, argument, 0, now_ns, trace.context))
        if opening is not None:
            options.append(_options(opening, trace.baggage))
        if flags & Flag.DRAFTED:
            drafts += followers or tokens
    buffer.seal(epoch, sequence, now_ns, context, heads)
    return with_extras(buffer, None, options, drafts)


def within_bounds(frames: Sequence[Frame]) -> list[list[Frame]]:
    """Cut what exceeds one message into several; one holds tokens or rows of images."""
    envelopes: list[list[Frame]] = []
    n_rows = options_bytes = 0
    for frame in frames:
        n_rows += len(frame.tokens)
        own_bytes = 0 if frame.opening is None else _options_bytes_max(frame.opening)
        options_bytes += own_bytes
        is_full = envelopes and len(envelopes[-1]) == bounds.FRAMES_PER_ENVELOPE_MAX
        is_full = is_full or options_bytes > bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX
        is_other = bool(envelopes) and (frame.rows is None) != (envelopes[-1][0].rows is None)
        if not envelopes or is_full or is_other or n_rows > bounds.ROWS_PER_ENVELOPE_MAX:
            envelopes.append([])
            n_rows, options_bytes = len(frame.tokens), own_bytes
        envelopes[-1].append(frame)
    return envelopes


def _options_bytes_max(opening: Opening) -> int:
    sampling = opening.sampling
    is_long = bool(sampling.grammar or opening.told) or sampling.has_lists
    return bounds.OPTIONS_BYTES_MAX if is_long else bounds.PLAIN_OPTIONS_BYTES_MAX


def _options(opening: Opening, baggage: str) -> pb.SessionOptions:
    sampling = opening.sampling
    options = pb.SessionOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n_logprobs=sampling.n_logprobs,
        wants_logits=opening.wants_logits,
        kept=opening.is_kept,
        kept_key=opening.kept_key,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        said=opening.said,
        bias_tokens=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        grammar=sampling.grammar,
        numbers=dict(sampling.numbers),
        read=opening.read,
        allowed_tokens=sampling.allowed_tokens,
        held_back_tokens=sampling.held_back_tokens,
        dry_breaker_steps=[
            token - before for before, token in zip((0, *sampling.dry_breakers), sampling.dry_breakers, strict=False)
        ],
        dry_sequences=[pb.TokenList(tokens=each) for each in sampling.dry_sequences],
        bad_words=[pb.TokenList(tokens=word) for word in sampling.bad_words],
        thought_marks=[pb.TokenList(tokens=mark) for mark in sampling.thought_marks or ()],
    )
    if opening.told:
        room_bytes = bounds.OPTIONS_BYTES_MAX - options.ByteSize() - 2 * _FIELD_BYTES
        told = opening.told[-(room_bytes // _TOKEN_BYTES) :] if room_bytes >= _TOKEN_BYTES else ()
        options.told.extend(told)
        options.told_from = opening.told_from + len(opening.told) - len(told)
    # Telemetry takes what room is left: no request fails for it.
    if baggage and options.ByteSize() + len(baggage) + _FIELD_BYTES <= _options_bytes_max(opening):
        options.baggage = baggage
    return options
