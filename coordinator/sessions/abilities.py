"""Compares a request's options with those that the stages know: an older version silently ignores newer ones."""

from __future__ import annotations

from collections.abc import Iterator, Set

from relayline.coordinator.sessions.generation import GenerationRequest
from relayline.wire.common.errors import NotServedError
from relayline.wire.common.sampler_fields import LISTS, PROMPT_SCORES
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import EngineSettings


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


def image_refusal(request: GenerationRequest, rows_max: int, *, takes_grids: bool) -> NotServedError | None:
    """Return why the stages cannot read a request's images; None: they can.

    `rows_max`: the most rows that may attend to each other, in one step of every stage; 0: some stage is older.
    `takes_grids`: whether every stage takes rows with places on several axes.
    """
    n_rows, has_grids = request.mutual_rows_max, any(each.grid for each in request.images)
    if n_rows <= rows_max and (takes_grids or not has_grids):
        return None
    if not rows_max or n_rows <= rows_max:
        return NotServedError("a stage runs an older relayline, which cannot read this model's images; upgrade it")
    flag = entry_of(EngineSettings, "max_rows").flag
    text = f"the {n_rows} rows of an image are one native step, and a stage takes {rows_max}"
    return NotServedError(f"{text}; start the stages with {flag} {n_rows} or more")
