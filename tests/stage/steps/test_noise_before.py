"""What sampling needs before there are logits is computed while a GPU computes, and nowhere else."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from relayline.stage.sampling import sampler
from relayline.stage.sampling.draws import Draws
from relayline.stage.steps.step import StepExecutor
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.draft_world import GUESSES, KEYS, DraftWorld, frame_of, played_plainly
from tests.support.fakes import MAX_ROWS, FakeEngine, control, greedy, rows_frame, step_of
from tests.support.steps import PREFILL, SAMPLE, only, opened

DRAWN: dict[str, object] = {"temperature": 0.9, "top_p": 0.95, "n_logprobs": -1}


@pytest.fixture(name="made")
def made_fixture(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows whose noise was made for a step, one entry for each time."""
    made: list[int] = []
    monkeypatch.setattr(sampler, "_local", threading.local())  # nothing of other tests is kept
    block_noise = Draws.block_noise

    def counted(draws: Draws, keys: np.ndarray, *rest: np.ndarray) -> None:
        if keys.ndim:  # and not of a row that goes on alone, behind a token that top-p leaves out
            made.append(keys.size)
        block_noise(draws, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Draws, "block_noise", counted)
    return made


def drawn(engine: FakeEngine) -> StepExecutor:
    """Three sessions that draw with separate seeds, and one that does not."""
    executor = opened(engine, 0)
    for session_id in range(4):
        options = greedy(**(DRAWN | {"seed": session_id})) if session_id < 3 else greedy()
        executor.execute(step_of(control(session_id, Flag.OPEN, options=options)))
    return executor


@pytest.mark.parametrize("computes_apart", [True, False])
def test_the_noise_of_a_step_is_there_before_its_logits(made: list[int], computes_apart: bool) -> None:
    engine = FakeEngine(is_last=True)
    engine.computes_apart = computes_apart
    before: list[list[int]] = []
    make = engine.make_logits
    engine.make_logits = lambda lane: before.append(list(made)) or make(lane)  # type: ignore[func-returns-value]
    frames = [rows_frame(0, 0, 3, PREFILL | SAMPLE), rows_frame(1, 0, 1, SAMPLE), rows_frame(2, 0, 2, PREFILL)]
    result = drawn(engine).execute(step_of(*frames, rows_frame(3, 0, 1, SAMPLE)))
    assert before[0] == ([2] if computes_apart else []), "two rows of it draw"
    assert made == [2], "and it is made once"
    assert [(each.session_id, each.position) for each in only(result).samples] == [(0, 3), (1, 1), (3, 1)]


def test_tokens_are_the_same(made: list[int]) -> None:
    plain, apart = DraftWorld(DRAWN), DraftWorld(DRAWN)
    apart.engine.computes_apart = True
    truth = played_plainly(plain, 12)
    made.clear()
    assert played_plainly(apart, 12) == truth
    assert made == [len(KEYS)] * 12


def test_rows_computed_ahead_have_theirs_too(made: list[int]) -> None:
    plain, ahead = DraftWorld(DRAWN), DraftWorld(DRAWN, ahead_rows=MAX_ROWS)
    ahead.engine.computes_apart = True
    truth = played_plainly(plain, 8)
    for _ in range(2):  # the first rows of two streams are not computed together
        ahead.run([ahead.row(key) for key in KEYS])
    sampled: list[int] = []
    for _ in range(6):
        before = len(made)
        ahead.run([ahead.row(key) for key in KEYS])
        sampled.append(len(made) - before)
    assert ahead.history == truth
    assert sampled == [1] * 6, "each for the rows ahead; none when these are sampled"


def test_drafts_have_it_for_their_first_row(made: list[int]) -> None:
    world = DraftWorld(DRAWN)
    world.engine.computes_apart = True
    made.clear()
    world.run([frame_of(key, len(world.history[key]) - 1, [world.history[key][-1], 1, 2], GUESSES) for key in KEYS])
    assert made[0] == len(KEYS)


def test_a_stage_without_a_head_has_nothing_to_do_meanwhile() -> None:
    engine = FakeEngine()
    engine.computes_apart = True
    executor = opened(engine, 2, **DRAWN)
    decode = engine.decode
    seen: list[object] = []

    def watched(n_rows: int, **options: object) -> None:
        seen.append(options.get("meanwhile"))
        decode(n_rows, **options)  # type: ignore[arg-type]

    engine.decode = watched  # type: ignore[method-assign, assignment]
    executor.execute(step_of(rows_frame(0, 0, 2, PREFILL), rows_frame(1, 0)))
    assert seen == [None]
    assert pb.SessionOptions(**DRAWN).temperature > 0
