"""Pure sessions for tests, and their frames."""

from __future__ import annotations

from collections.abc import Iterable

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag

SAMPLE, PREFILL = Flag.WANTS_SAMPLE, Flag.PREFILL
END_TOKEN = 3


def new_session(n_prompt: int, max_tokens: int, *, ignore_eos: bool = False) -> Session:
    prompt = tuple(range(100, 100 + n_prompt))
    request = GenerationRequest("r", prompt, max_tokens, SamplingParams(), ignore_eos=ignore_eos)
    return Session(7, request, lambda token: token == END_TOKEN)


def chunks_of(session: Session, rows_max: int) -> list[OutFrame]:
    """All chunks that the session still has to send."""
    return list(iter(lambda: session.next_chunk(rows_max), None))  # type: ignore[arg-type]


def prefilled(session: Session) -> None:
    """Send everything up to the first sample."""
    session.start()
    chunks_of(session, 64)


def shape(frames: Iterable[OutFrame]) -> list[tuple[int, tuple[int, ...], int]]:
    return [(frame.position, frame.tokens, int(frame.flags)) for frame in frames]
