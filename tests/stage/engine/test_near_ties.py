"""How far company in a step moves the logits of the tiny model: the measure of every test that compares answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import write_whole
from tests.support.fleet import CTX, LOGIT_MOVE, NEAR_TIE, SHAPE

pytestmark = pytest.mark.kernels

N_ANSWERS, N_TOKENS, N_LANES = 4, 120, 4


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceModel]:
    path = write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", SHAPE)
    with ReferenceModel(path, CTX * N_LANES, N_LANES) as model:
        yield model


def in_company(model: ReferenceModel, texts: list[list[int]]) -> np.ndarray:
    """The logits of the first text, each row in a step with one of each other text."""
    lanes = range(len(texts))
    for lane in lanes:
        model.drop_from(lane, 0)
    steps = [
        model.decode([text[at] for text in texts], [at] * len(texts), lanes, [True] * len(texts))[0]
        for at in range(N_TOKENS)
    ]
    return np.array(steps)


def test_a_near_tie_is_as_wide_as_company_makes_it(model: ReferenceModel) -> None:
    """Alone, read as a prompt and in company: a token of any of them passes as one of the others."""
    rng = np.random.default_rng(1)
    for n_others in range(N_LANES):
        texts = rng.integers(0, SHAPE.n_vocab, (1 + n_others, N_TOKENS)).tolist()
        together = in_company(model, texts)
        model.drop_from(0, 0)
        read = model.read(texts[0], 0)
        assert np.abs(read - together).max() < LOGIT_MOVE
        assert np.abs(read - in_company(model, texts[:1])).max() < LOGIT_MOVE


def test_one_wrong_token_of_a_history_is_no_near_tie(model: ReferenceModel) -> None:
    """An answer on a wrong history has tokens that are far behind, so a wide near-tie hides none."""
    rng = np.random.default_rng(2)
    for _ in range(N_ANSWERS):
        text = rng.integers(0, SHAPE.n_vocab, N_TOKENS).tolist()
        wrong = [*text[:10], (text[10] + 1) % SHAPE.n_vocab, *text[11:]]
        model.drop_from(0, 0)
        right = model.read(text, 0)
        model.drop_from(0, 0)
        picked = model.read(wrong, 0).argmax(axis=1)
        behind = right.max(axis=1) - right[np.arange(N_TOKENS), picked]
        assert behind[20:80].max() > 20 * NEAR_TIE
