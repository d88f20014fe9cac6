"""Prompt rows that score the tokens behind them: one answer for each, and nothing is sampled."""

from __future__ import annotations

import numpy as np
import pytest

from relayline.stage.queue_types import QueuedFrame
from relayline.stage.steps.policy import Choice, DrainPolicy, GroupPolicy, Policy
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import FakeEngine, logits_of, rows_frame, step_of
from tests.support.steps import PREFILL, SAMPLE, labels, only, opened


def scored(session_id: int, position: int, followers: tuple[int, ...], flags: int = 0) -> QueuedFrame:
    frame = rows_frame(session_id, position, len(followers), Flag.SCORED | flags)
    frame.draft_tokens = followers
    return frame


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def test_each_row_scores_the_token_behind_it() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 1, n_logprobs=2)
    output = only(executor.execute(step_of(scored(0, 0, (3, 1, 2)))))
    assert [(each.position, each.token) for each in output.samples] == [(1, 3), (2, 1), (3, 2)]
    assert [(each.session_id, each.position) for each in output.progress] == [(0, 3)]
    for row, sample in enumerate(output.samples):
        expected = log_softmax(logits_of(engine.lanes[0][: row + 1]))
        assert sample.logprob == pytest.approx(expected[sample.token], abs=1e-5)
        assert sample.top[0].token == int(expected.argmax())
        assert len(sample.top) == 2


def test_the_last_row_of_a_prompt_is_sampled_and_scores_nothing() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 1, n_logprobs=0)
    output = only(executor.execute(step_of(scored(0, 0, (3, 1, 0), SAMPLE))))
    assert [each.position for each in output.samples] == [1, 2, 3]
    assert output.samples[2].token == int(logits_of(engine.lanes[0]).argmax())
    assert not output.progress


def test_a_token_that_the_vocabulary_lacks_is_a_fault_of_its_session() -> None:
    engine = FakeEngine(is_last=True)
    executor = opened(engine, 2)
    result = executor.execute(step_of(scored(0, 0, (1 << 20,)), rows_frame(1, 0, 2, PREFILL | SAMPLE)))
    assert labels(result) == [(0, "protocol")]
    assert [sample.session_id for sample in only(result).samples] == [1]


@pytest.mark.parametrize("policy", [DrainPolicy(64, 64, 6), GroupPolicy(64, CostCurve([(1, 1.0)]), 6)])
def test_two_scored_frames_do_not_want_more_logits_than_there_is_room_for(policy: Policy) -> None:
    frames = [scored(session_id, 0, (1, 2, 3, 4)) for session_id in range(2)]
    for frame in frames:
        frame.envelope = 1
    choice = policy.choose([], frames, is_prefill_first=True)
    assert isinstance(choice, Choice)
    assert (choice.n_decode, choice.n_prefill) == (0, 1)
