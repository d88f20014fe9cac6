"""Picks the tokens of several rows of a step: what the sessions' samplers would pick row by row.

Rows that are drawn plainly share their work, see `stage.sampling.together`. All others are picked alone. A row that
fails is a fault of its session, and the other rows go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.draws import noise_keys
from relayline.stage.sampling.noise import ROWS
from relayline.stage.sampling.sampler import Sampled, SessionSampler, checked, checked_change, scratch_of
from relayline.stage.sampling.together import DrawsTogether, Row
from relayline.wire.common.errors import RelaylineError

TOGETHER_FROM = 2  # rows; one alone is quicker


class Ask(NamedTuple):
    """A row of logits (f32 [n_vocab], left unchanged), whose it is, and the position that its token is for."""

    sampler: SessionSampler
    logits: npt.NDArray[np.float32]
    position: int


Answer = Sampled | RelaylineError


def sample_rows(asks: Sequence[Ask]) -> list[Answer]:
    """Return what `SessionSampler.sample` of each row returns or raises. All rows are of different sessions."""
    answers: dict[int, Answer] = {}
    plain = [at for at, ask in enumerate(asks) if ask.sampler.draws_plainly]
    for together in _groups(asks, plain):
        _draw(asks, together, answers)
    return [answers[at] if at in answers else _alone(ask) for at, ask in enumerate(asks)]


def prepare_noise(n_vocab: int, rows: Sequence[tuple[SessionSampler, int]]) -> None:
    """Compute what draws for positions of some sessions need, before there are logits. See `Noise.prepare`."""
    keys = [
        noise_keys(sampler.options.seed, position)[0]
        for sampler, position in rows
        if sampler.draws_plainly and not _is_narrow(sampler, n_vocab)
    ]
    if len(keys) >= TOGETHER_FROM:
        scratch_of(n_vocab).noise.prepare(keys)


def _groups(asks: Sequence[Ask], plain: Sequence[int]) -> Iterator[list[int]]:
    """Divide rows into groups that are drawn together: those with a top-k for themselves."""
    for is_narrow in (False, True):
        alike = [at for at in plain if _is_narrow(asks[at].sampler, asks[at].logits.size) == is_narrow]
        if len(alike) >= TOGETHER_FROM:
            yield from (alike[begin : begin + ROWS] for begin in range(0, len(alike), ROWS))


def _is_narrow(sampler: SessionSampler, n_vocab: int) -> bool:
    return 0 < sampler.options.top_k < n_vocab


def _draw(asks: Sequence[Ask], together: Sequence[int], answers: dict[int, Answer]) -> None:
    """Draw some rows together, and note their answers."""
    draws = scratch_of(asks[together[0]].logits.size).together
    keys = [noise_keys(asks[at].sampler.options.seed, asks[at].position) for at in together]
    draws.begin([key for key, _ in keys])
    drawn: list[tuple[int, float]] = []
    for place, at in enumerate(together):
        try:
            row, largest = _row_of(asks[at], draws, keys[place])
        except RelaylineError as error:
            answers[at] = error
            continue
        draws.add(row, place)
        drawn.append((at, largest))
    tokens = draws.draw()
    for token, (at, largest) in zip(tokens, drawn, strict=True):
        sampler, logits, position = asks[at]
        try:
            answers[at] = sampler.picked(token, logits, largest, position)
        except RelaylineError as error:
            answers[at] = error


def _row_of(ask: Ask, draws: DrawsTogether, keys: tuple[int, int]) -> tuple[Row, float]:
    """Return what a row is drawn from, and the largest of the model's own logits. Raises as `SessionSampler.sample`."""
    sampler, logits, position = ask
    options, drawn_from = sampler.options, logits
    if sampler.changes_logits:
        largest = checked(float(logits.max()), position)
        drawn_from = draws.changed
        sampler.change(logits, position, drawn_from)
        greatest = checked_change(draws.look(drawn_from), position)
    else:
        largest = greatest = checked(draws.look(logits), position)
    row = Row(drawn_from, greatest, options.temperature, keys, options.top_k, options.top_p, options.min_p)
    return row, largest


def _alone(ask: Ask) -> Answer:
    try:
        return ask.sampler.sample(ask.logits, ask.position)
    except RelaylineError as error:
        return error
