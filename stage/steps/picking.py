"""The last stage's sampling of a frame's rows, and its verification of draft tokens. Decode thread only.

A draft row is right if its token equals the one sampled for its position. The row before it is sampled first, with the
session's own filters, penalties, grammar and draw. Only if that gives the draft token does the draft row itself count.
So a stream's answer is the same as without drafts, greedy or drawn, and no sampler ever goes back. (Speculative
decoding in its plainest form: Leviathan et al., 2023, with draws that depend on seed and position alone in place of
rejection sampling.)

A wrong draft leaves rows in the lane. The next frame starts below them, and the lane drops them then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.device_draws import Device
from relayline.stage.sampling.pooling import Pool
from relayline.stage.sampling.rows import (
    Answer,
    Ask,
    DeviceRow,
    can_draw_on_device,
    prepare_noise,
    sample_on_device,
    sample_rows,
)
from relayline.stage.sampling.sampler import Sampled, SessionSampler
from relayline.stage.steps.placement import Placed
from relayline.stage.steps.step_types import Engine, Hidden
from relayline.wire.common.errors import RelaylineError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

log = logging.getLogger("relayline.stage")


def is_guessed_wrong(frame: QueuedFrame, sampler: SessionSampler | None) -> bool:
    """Return whether a frame's first row is known to be a wrong guess: then none of it need be computed."""
    if not frame.flags & Flag.GUESSED or sampler is None or sampler.last is None:
        return False
    position, token = sampler.last
    return position < frame.position or (position == frame.position and token != frame.draft_tokens[0])


class Picking:
    """The result of a step for a computed frame: its samples so far, and the row that waits for the next one.

    A frame wants a token behind its last row, or behind each accepted draft row. Rows of a prompt may be scored first.
    """

    __slots__ = (
        "_engine",
        "_is_drafted",
        "_row",
        "_wants_logits",
        "error",
        "is_complete",
        "item",
        "sampler",
        "samples",
    )

    def __init__(self, item: Placed, engine: Engine, sampler: SessionSampler, *, wants_logits: bool) -> None:
        """Score the rows that are to be scored."""
        self.item, self.sampler = item, sampler
        self.samples: list[pb.Sampled] = []
        self.error: RelaylineError | None = None  # samples before it are good
        self.is_complete = False  # whether there is a token behind the last row
        self._engine, self._wants_logits = engine, wants_logits
        self._row, self._is_drafted = item.frame.n_rows - 1, False  # the row that waits; -1: none
        if item.frame.flags & Flag.DRAFTED:  # or scored
            self._is_drafted = not is_scored(item.frame)
            if self._is_drafted:
                self._row = 0
            else:
                self._score()

    @property
    def device(self) -> Device | None:
        """The engine's."""
        return self._engine.device

    def _score(self) -> None:
        try:
            self.samples.extend(score(self.item, self._engine, self.sampler))
        except RelaylineError as error:
            self.answer(error)
        if not self.item.frame.flags & Flag.WANTS_SAMPLE:
            self._row = -1

    def ask(self) -> Ask | None:
        """Return the row that waits for its token; None if none does, or the device has found all there are."""
        if self._row < 0:
            return None
        item, engine, sampler = self.item, self._engine, self.sampler
        try:
            if engine.device is not None and not self._wants_logits and sampler.is_greedy:
                while (best := engine.device.token(item.row + self._row)) is not None:
                    self.answer(sampler.take(best, item.frame.position + self._row + 1))
                    if self._row < 0:
                        return None
            return Ask(sampler, engine.logits(item.row + self._row), item.frame.position + self._row + 1)
        except RelaylineError as error:
            self.answer(error)
            return None

    def device_row(self) -> DeviceRow | None:
        """Return the row that waits, if it may stay on the device."""
        item = self.item
        if self._row < 0 or self._wants_logits or not can_draw_on_device(self.sampler):
            return None
        return DeviceRow(self.sampler, item.row + self._row, item.frame.position + self._row + 1)

    def answer(self, answer: Answer) -> None:
        """Take the token of the row that waits."""
        if isinstance(answer, RelaylineError):
            self.error, self._row = answer, -1
            return
        frame, row = self.item.frame, self._row
        logits = self._engine.logits(self.item.row + row).tobytes() if self._wants_logits else b""
        self.samples.append(_sampled(frame, frame.position + row + 1, answer, logits))
        self.is_complete, self._row = row == frame.n_rows - 1, -1
        if self._is_drafted and not self.is_complete and frame.draft_tokens[row + 1] == answer.token:
            self._row = row + 1


def prepare(items: Sequence[Placed], samplers: Mapping[tuple[int, int], SessionSampler], engine: Engine) -> None:
    """Do what sampling these frames needs before there are logits; of drafted ones for the first row alone."""
    rows: list[tuple[SessionSampler, int]] = []
    for frame in (item.frame for item in items):
        is_drafted = frame.flags & Flag.DRAFTED and not is_scored(frame)
        sampler = samplers.get(frame.session_key)
        if sampler is not None and (is_drafted or frame.flags & Flag.WANTS_SAMPLE):
            rows.append((sampler, frame.position + (1 if is_drafted else frame.n_rows)))
    prepare_noise(engine.n_vocab, rows)


def pick_all(pickings: Sequence[Picking]) -> None:
    """Sample computed frames' tokens, of all frames together: first behind their first rows, then behind the next."""
    due = pickings
    if pickings and (device := pickings[0].device) is not None and device.gives_parts:
        _pick_on_device(pickings, device)
    while asked := [(picking, ask) for picking in due if (ask := picking.ask()) is not None]:
        due = [picking for picking, _ in asked]
        for picking, answer in zip(due, sample_rows([ask for _, ask in asked]), strict=True):
            picking.answer(answer)


def _pick_on_device(pickings: Sequence[Picking], device: Device) -> None:
    """Sample rows that stay on the device, as far as that can be done. What it cannot do is left."""
    asked = [(picking, row) for picking in pickings if (row := picking.device_row()) is not None]
    try:
        answers = sample_on_device(device, [row for _, row in asked])
    except RelaylineError as error:
        log.warning("rows of logits are fetched whole from now on: %s", error)
        device.gives_parts = False
        return
    for (picking, _), answer in zip(asked, answers, strict=True):
        if answer is not None:
            picking.answer(answer)


def score(item: Placed, engine: Engine, sampler: SessionSampler) -> Iterator[pb.Sampled]:
    """Score the tokens of a prompt that follow the rows of a computed frame.

    Raises what `SessionSampler.score` does.
    """
    frame = item.frame
    for row in range(frame.n_rows - (frame.flags & Flag.WANTS_SAMPLE != 0)):
        position, logits = frame.position + row + 1, engine.logits(item.row + row)
        yield _sampled(frame, position, sampler.score(logits, position, frame.draft_tokens[row]))


def pooled(item: Placed, hidden: Hidden, pool: Pool) -> pb.Sampled | None:
    """Pool the hidden rows of a computed frame; returns the embedding behind the prompt's last row.

    Raises NativeError, NumericError, PositionGapError.
    """
    frame = item.frame
    if is_scored(frame):
        pool.add(frame.position, hidden.rows(item.row, frame.n_rows))
    elif frame.flags & Flag.WANTS_SAMPLE:
        pool.add(frame.position + frame.n_rows - 1, hidden.rows(item.row + frame.n_rows - 1, 1))
    if not frame.flags & Flag.WANTS_SAMPLE:
        return None
    position = frame.position + frame.n_rows
    return pb.Sampled(session_id=frame.session_id, position=position, embedding=pool.take().tobytes())


def is_scored(frame: QueuedFrame) -> bool:
    """Return whether a frame's rows score the tokens of their prompt."""
    return frame.flags & Flag.SCORED == Flag.SCORED


def _sampled(frame: QueuedFrame, position: int, sampled: Sampled, logits: bytes = b"") -> pb.Sampled:
    answer = pb.Sampled(session_id=frame.session_id, position=position, token=sampled.token)
    if sampled.logprob is not None:
        answer.logprob = sampled.logprob
        answer.top.extend(pb.TokenLogprob(token=token, logprob=logprob) for token, logprob in sampled.top)
    if logits:
        answer.logits = logits
    if sampled.mirostat_mu is not None:
        answer.mirostat_mu = sampled.mirostat_mu
    return answer


def count_wanted(frame: QueuedFrame) -> int:
    """Return how many rows of a frame want logits on the last stage."""
    if is_scored(frame):
        return frame.n_rows
    if not frame.flags & Flag.WANTS_SAMPLE:
        return 0
    return frame.n_rows if frame.flags & Flag.DRAFTED else 1


def wanted_rows(frame: QueuedFrame) -> list[int]:
    """Return 1 for each row of a frame that wants logits, else 0."""
    n_wanted = count_wanted(frame)
    return [0] * (frame.n_rows - n_wanted) + [1] * n_wanted


def drafts_of(frames: list[QueuedFrame]) -> list[int]:
    """Return the tokens of all drafted rows, in order, for the next stage."""
    return [token for frame in frames for token in frame.draft_tokens]
