"""What the last stage's prediction layers are told of each step, and the guesses that go with its samples.

Rows of a decode that asks for guesses (Flag.WANTS_GUESSES) are taken in before their samples leave, and the guesses go
along. Rows of prompts are taken in after that: nobody waits for it. What follows a prompt's row is known from the
session's opening (`SessionOptions.told`); sessions without it, and other decodes, cost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.told_rows import Told
from relayline.stage.steps.picking import Picking, is_scored
from relayline.stage.steps.placement import Placed
from relayline.stage.steps.step_types import Engine, Predictor
from relayline.wire.common import bounds
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.frames import Flag

log = logging.getLogger("relayline.stage")

Key = tuple[int, int]
Tokens = npt.NDArray[np.int32]


class Predicting:
    """The prediction layers of one executor's engine."""

    def __init__(self, engine: Engine, predictor: Predictor | None) -> None:
        """`predictor`: of this engine; None: nothing is told and nothing guessed."""
        self._engine, self._predictor = engine, predictor
        # Of each session, the position of the first known token of its prompt, and these; as many as there are lanes.
        self._told: dict[Key, tuple[int, Tokens]] = {}
        self._later: list[tuple[Placed, list[int]]] = []  # rows of the latest decode, with the tokens behind them
        self._n_runs = 0  # the engine's at that decode

    def open(self, key: Key, told: Sequence[int], first: int) -> None:
        """A session begins, or begins again, with these tokens from a position on; empty where it wants no guesses.

        Numbers that are no tokens are not told: they would end all predictions.
        """
        self._told.pop(key, None)
        if told and self._predictor is not None and max(told) < self._engine.n_vocab:
            self._told[key] = (first, np.array(told[: bounds.TOLD_TOKENS_MAX], np.int32))

    def close(self, key: Key) -> None:
        """Forget a session; it need not be known."""
        self._told.pop(key, None)

    def guess(self, pickings: Sequence[Picking]) -> None:
        """Add guesses to the latest sample of each frame that asks for them."""
        asked = [each for each in pickings if each.item.frame.flags & Flag.WANTS_GUESSES and each.samples]
        predictor = self._predictor
        if predictor is None or not asked:
            return
        behind = [[sample.token for sample in each.samples] for each in asked]
        try:
            told = [
                self._pair(predictor, each.item, tokens, 0 if is_scored(each.item.frame) else predictor.n_drafts)
                for each, tokens in zip(asked, behind, strict=True)
            ]
            for each, guesses in zip(asked, predictor.take(told), strict=True):
                each.samples[-1].guesses.extend(guess.token for guess in guesses)
                each.samples[-1].guess_chances.extend(guess.chance for guess in guesses)
        except NativeError as error:
            self._give_up(error)

    def note(self, placed: Sequence[Placed], pickings: Sequence[Picking]) -> None:
        """Remember rows of prompts of the latest decode for `catch_up`."""
        if not self._told or self._predictor is None:
            return
        sampled = {id(each.item): each.samples[-1].token for each in pickings if each.samples}
        self._later, self._n_runs = [], self._engine.n_runs
        for item in placed:
            frame, known = item.frame, self._told.get(item.frame.session_key)
            if known is None or not frame.flags & Flag.PREFILL or frame.position < known[0]:
                continue
            first, prompt = known
            tokens = prompt[frame.position + 1 - first : item.position_after + 1 - first].tolist()
            if len(tokens) < frame.n_rows and id(item) in sampled:
                tokens.append(sampled[id(item)])
            if tokens and len(tokens) == frame.n_rows:
                self._later.append((item, tokens))

    def catch_up(self) -> None:
        """Take in what was noted; after the step's samples have left, and before the engine's next step."""
        later, self._later = self._later, []
        predictor = self._predictor
        if not later or predictor is None or self._n_runs != self._engine.n_runs:
            return
        try:
            predictor.take([self._pair(predictor, item, tokens) for item, tokens in later])
        except NativeError as error:
            self._give_up(error)

    def _pair(self, predictor: Predictor, item: Placed, tokens: list[int], n_drafts: int = 0) -> Told:
        """Pair the frame's first rows with the tokens behind them.

        Prediction layers get a prompt's first token behind a row of zeros.
        """
        frame = item.frame
        rows = predictor.hidden(np.arange(item.row, item.row + len(tokens)))
        first, prompt = self._told.get(frame.session_key, (1, None))
        if frame.position == first == 0 and prompt is not None and predictor.begins_with_zeros:
            rows = np.concatenate([np.zeros_like(rows[:1]), rows])
            return Told(item.lane.index, 0, [int(prompt[0]), *tokens], rows, n_drafts)
        return Told(item.lane.index, frame.position + 1, tokens, rows, n_drafts)

    def _give_up(self, error: NativeError) -> None:
        what = self._predictor.what if self._predictor is not None else ""
        log.warning("no more guesses by %s: %s", what, error)
        self._predictor = None  # its memory is given back with the engine
        self._told.clear()
