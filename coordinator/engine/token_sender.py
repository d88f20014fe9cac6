"""Token envelopes for stage 0: the frames that the scheduler sends together travel as one message."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from relayline.coordinator.sessions.session import OutFrame
from relayline.wire.common import bounds
from relayline.wire.common.errors import InternalError, RelaylineError
from relayline.wire.common.tasks import end_task
from relayline.wire.envelopes import trace_context
from relayline.wire.envelopes.buffers import with_extras
from relayline.wire.envelopes.frames import Flag, set_traces
from relayline.wire.links.relay_link import RelayLink
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.coordinator")

_FIELD_BYTES = 8  # tag and length of a text, at most
_Waiting: TypeAlias = "tuple[list[OutFrame], bytes, int]"  # frames, their trace context, when they were chosen


class TokenSender:
    """Sends the scheduler's envelopes in order, each as a message of its own. One per epoch.

    Bounded: a session has at most its history queued here, sessions are bounded by lanes.
    """

    def __init__(
        self,
        link: RelayLink,
        epoch: int,
        on_error: Callable[[RelaylineError], None],
        on_sent: Callable[[bytes, Sequence[OutFrame], int, int], None] = lambda context, frames, chosen_ns, sent_ns: (
            None
        ),
    ) -> None:
        """`on_sent(context, frames, chosen_ns, sent_ns)` is called for what has left with a sampled context."""
        self._link, self._epoch, self._on_error, self._on_sent = link, epoch, on_error, on_sent
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._wake, self._all_sent = asyncio.Event(), asyncio.Event()
        self._sequence = 0
        self._task = asyncio.create_task(self._run())

    def push(self, envelope: Iterable[OutFrame], context: bytes = trace_context.NONE, chosen_ns: int = 0) -> None:
        """Queue frames that stay together; they leave at the end of this turn of the loop.

        context: 25 bytes, of the root of the trace of passes that they belong to. chosen_ns: when they were chosen.
        """
        self._waiting.extend([(frames, context, chosen_ns) for frames in _within_bounds(list(envelope))])
        self._all_sent.clear()
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
                while self._waiting:
                    frames, context, chosen_ns = self._waiting.popleft()
                    await self._send(frames, context)
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

    async def _send(self, batch: Sequence[OutFrame], context: bytes) -> None:
        now_ns = time.monotonic_ns()
        tokens = [token for frame in batch for token in frame.tokens]
        buffer = self._link.pool.lease(len(batch), len(tokens))
        buffer.payload[:, 0] = tokens
        records = buffer.frames
        records["session_id"] = [frame.session.session_id for frame in batch]
        records["epoch"] = self._epoch
        records["position"] = [frame.position for frame in batch]
        records["n_rows"] = [len(frame.tokens) for frame in batch]
        records["flags"] = [frame.flags for frame in batch]
        records["argument"] = [frame.argument for frame in batch]
        records["enqueued_ns"] = now_ns
        set_traces(records, [frame.session.record.trace for frame in batch])
        self._sequence += 1
        buffer.seal(self._epoch, self._sequence, now_ns, context)
        options = [_options(frame) for frame in batch if frame.flags & Flag.OPEN]
        drafts = [token for frame in batch if frame.flags & Flag.DRAFTED for token in frame.tokens]
        await self._link.send(buffer, with_extras(buffer, None, options, drafts))


def _within_bounds(frames: list[OutFrame]) -> list[list[OutFrame]]:
    """Cut what exceeds one message into several."""
    envelopes: list[list[OutFrame]] = []
    n_rows = options_bytes = 0
    for frame in frames:
        n_rows += len(frame.tokens)
        options_bytes += _options_bytes_max(frame)
        is_full = envelopes and len(envelopes[-1]) == bounds.FRAMES_PER_ENVELOPE_MAX
        is_full = is_full or options_bytes > bounds.OPTIONS_PER_ENVELOPE_BYTES_MAX
        if not envelopes or is_full or n_rows > bounds.ROWS_PER_ENVELOPE_MAX:
            envelopes.append([])
            n_rows, options_bytes = len(frame.tokens), _options_bytes_max(frame)
        envelopes[-1].append(frame)
    return envelopes


def _options_bytes_max(frame: OutFrame) -> int:
    if not frame.flags & Flag.OPEN:
        return 0
    has_grammar = frame.session.request.sampling.grammar
    return bounds.OPTIONS_BYTES_MAX if has_grammar else bounds.PLAIN_OPTIONS_BYTES_MAX


def _options(frame: OutFrame) -> pb.SessionOptions:
    session, request, sampling = frame.session, frame.session.request, frame.session.request.sampling
    said = session.history[len(request.prompt_tokens) : session.n_opened] if sampling.looks_back else []
    n_said_max = bounds.GRAMMAR_TOKENS_MAX if sampling.grammar else bounds.PENALTY_TOKENS_MAX
    options = pb.SessionOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n_logprobs=sampling.n_logprobs,
        wants_logits=request.wants_logits,
        kept=session.is_kept,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        said=said[-n_said_max:],
        bias_tokens=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        grammar=sampling.grammar,
    )
    # Telemetry takes what room is left: no request fails for it.
    baggage = session.record.baggage
    if baggage and options.ByteSize() + len(baggage) + _FIELD_BYTES <= _options_bytes_max(frame):
        options.baggage = baggage
    return options
