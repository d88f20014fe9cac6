"""Picks the tokens of several rows of a step: what the sessions' samplers would pick row by row.

Rows that are drawn plainly share their work, see `stage.sampling.together`. All others are picked alone. A row that
fails is a fault of its session, and the other rows go on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relayline.stage.sampling.device_draws import DEVICE_ROWS, Device
from relayline.stage.sampling.draws import noise_keys
from relayline.stage.sampling.noise import ROWS
from relayline.stage.sampling.sampler import Sampled, SessionSampler, checked, checked_change, scratch_of
from relayline.stage.sampling.together import DrawsTogether, Row
from relayline.wire.common.errors import InternalError, RelaylineError

log = logging.getLogger("relayline.stage")

TOGETHER_FROM = 2  # rows; one alone is quicker
ON_DEVICE_FROM = 4  # rows; fewer are fetched whole in the time of three questions
_NO_LOGITS = np.zeros(0, np.float32)


class Ask(NamedTuple):
    """A row of logits (f32 [n_vocab], left unchanged), whose it is, and the position that its token is for."""

    sampler: SessionSampler
    logits: npt.NDArray[np.float32]
    position: int


class DeviceRow(NamedTuple):
    """A row of logits that is on a device, by its number in the step; whose it is, and the position of its token."""

    sampler: SessionSampler
    row: int
    position: int


Answer = Sampled | RelaylineError


def sample_rows(asks: Sequence[Ask]) -> list[Answer]:
    """Return what `SessionSampler.sample` of each row returns or raises. All rows are of different sessions."""
    answers: dict[int, Answer] = {}
    plain = [at for at, ask in enumerate(asks) if ask.sampler.draws_plainly]
    for together in _groups(asks, plain):
        _draw(asks, together, answers)
    return [answers[at] if at in answers else _alone(ask) for at, ask in enumerate(asks)]


def sample_on_device(device: Device, rows: Sequence[DeviceRow]) -> list[Sampled | None]:
    """Return what `sample_rows` would, of rows that stay on a device; None for those that it must have whole."""
    found: list[Sampled | None] = [None] * len(rows)
    finite: list[tuple[int, int]] = []
    for at, row in enumerate(rows):
        best = device.token(row.row)
        if best is not None:
            finite.append((at, best))
    for begin in range(0, len(finite), DEVICE_ROWS):
        some = finite[begin : begin + DEVICE_ROWS]
        if len(some) < ON_DEVICE_FROM:
            break
        for (at, _), token in zip(some, _drawn_on_device(device, [rows[at] for at, _ in some], some), strict=True):
            if token is not None:
                found[at] = rows[at].sampler.picked(token, _NO_LOGITS, 0.0, rows[at].position)
    return found


def _drawn_on_device(device: Device, rows: Sequence[DeviceRow], best: Sequence[tuple[int, int]]) -> list[int | None]:
    places, options = [row.row for row in rows], [row.sampler.options for row in rows]
    maxima = device.maxima(places)
    drawn_from = [
        Row(
            _NO_LOGITS, float(largest), each.temperature, noise_keys(each.seed, row.position), 0, each.top_p, each.min_p
        )
        for row, each, largest in zip(rows, options, maxima.max(1), strict=True)
    ]
    return scratch_of(rows[0].sampler.n_vocab).on_device.draw_on_device(
        drawn_from, [token for _, token in best], maxima, functools.partial(device.gathered, places)
    )


def can_draw_on_device(sampler: SessionSampler) -> bool:
    """Return whether a sampler's rows may stay on a device: it draws plainly from the model's own logits."""
    is_bare = sampler.options.n_logprobs < 0 and not sampler.changes_logits
    return is_bare and sampler.draws_plainly and not _is_narrow(sampler, sampler.n_vocab)


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
    except Exception:  # a fault of ours in what one session asks for; the others of the step go on
        log.exception("a token could not be sampled")
        return InternalError("a token could not be sampled; the last stage's log has the traceback")
