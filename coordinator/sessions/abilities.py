"""Whether the last stage can do what a request asks for: an older version passes over newer options in silence."""

from __future__ import annotations

from collections.abc import Iterator, Set

from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.wire.common.errors import NotServedError
from relayline.wire.common.sampler_fields import LISTS, PROMPT_SCORES


def options_of(request: GenerationRequest) -> Iterator[str]:
    """Yield the names of wire.common.sampler_fields.OPTIONS that a request uses."""
    sampling = request.sampling
    yield from (name for name, _ in sampling.numbers)
    yield from (name for name in LISTS if getattr(sampling, name))
    if request.scores_prompt:
        yield PROMPT_SCORES


def refusal(request: GenerationRequest, known: Set[str]) -> NotServedError | None:
    """Return why a last stage that knows these options cannot serve a request; None: it can."""
    missing = sorted({*options_of(request)} - known)
    if not missing:
        return None
    names = ", ".join(missing)
    return NotServedError(f"the last stage runs an older relayline, which does not know {names}; upgrade that stage")
