"""The last stage's prediction layers: whatever fails there ends guesses, and no step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from relayline.stage.engine.told_rows import Guess, Told
from relayline.stage.steps.predicting import Predicting
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

N_VOCAB = 100


class FakePredictor:
    """Guesses the token behind each last one, unless it is to fail."""

    n_drafts = 2

    begins_with_zeros, what = True, "prediction layers"

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.n_takes = 0

    def hidden(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        if self.failing == "hidden":
            raise NativeError("llama.cpp gave no rows")
        return np.zeros((len(rows), 4), np.float32)

    def take(self, told: Sequence[Told]) -> list[list[Guess]]:
        self.n_takes += 1
        if self.failing == "take":
            raise NativeError("llama_decode gave 1")
        return [[Guess(part.tokens[-1] + 1, 0.5)] for part in told]


def asking(token: int) -> Any:
    frame = SimpleNamespace(
        flags=Flag.WANTS_SAMPLE | Flag.WANTS_GUESSES, session_key=(1, 1), position=5, n_rows=1, argument=0
    )
    item = SimpleNamespace(frame=frame, row=0, lane=SimpleNamespace(index=0), position_after=6)
    return SimpleNamespace(item=item, samples=[pb.Sampled(token=token)])


def predicting(predictor: FakePredictor) -> Predicting:
    return Predicting(SimpleNamespace(n_runs=1, n_vocab=N_VOCAB), predictor)  # type: ignore[arg-type]


def test_guesses_go_with_the_sample() -> None:
    picking = asking(7)
    predicting(FakePredictor()).guess([picking])
    assert list(picking.samples[0].guesses) == [8]


@pytest.mark.parametrize("failing", ["hidden", "take"])
def test_a_failure_ends_guesses_and_no_step(failing: str) -> None:
    predictor, picking = FakePredictor(failing), asking(7)
    layers = predicting(predictor)
    layers.guess([picking])
    layers.guess([picking])
    assert predictor.n_takes <= 1, "it is asked no more"
    assert not picking.samples[0].guesses


@pytest.mark.parametrize("token", [N_VOCAB, 1 << 31, (1 << 32) - 1])
def test_numbers_that_are_no_tokens_are_not_told(token: int) -> None:
    layers = predicting(FakePredictor())
    layers.open((1, 1), [3, token], 0)
    assert not layers._told
    layers.open((1, 1), [3, N_VOCAB - 1], 0)
    assert layers._told
