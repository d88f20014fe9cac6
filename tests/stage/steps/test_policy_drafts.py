"""Steps with drafted frames: how many rows with logits a policy takes, and the cost of such a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relayline.deploy.testing.engines import stage_config
from relayline.stage.assembly import make_policy
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.speed.curves import Curves, shape_of
from relayline.stage.steps.policy import (
    PREFILL_BUDGET,
    QUEUE_DRAINED,
    ROW_CAP,
    DrainPolicy,
    GroupPolicy,
    Policy,
    SinglePolicy,
)
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX, DRAFTED_ROWS_MAX
from relayline.wire.common.curve import PAD_SEARCH_ROWS, CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.fakes import rows_frame

PREFILL, SAMPLE, GUESSES = Flag.PREFILL, Flag.WANTS_SAMPLE, Flag.WANTS_SAMPLE | Flag.DRAFTED


def heads(*frames: tuple[int, int], first_id: int = 0) -> list[QueuedFrame]:
    """Heads of sessions, numbered from `first_id` on, (rows, flags) each."""
    return [rows_frame(first_id + index, 9, *frame) for index, frame in enumerate(frames)]


def drafted(*rows: int) -> list[tuple[int, int]]:
    return [(n_rows, GUESSES if n_rows > 1 else SAMPLE) for n_rows in rows]


CHUNK, END = (4, PREFILL), (4, PREFILL | SAMPLE)
CASES = {  # max_rows 32, prefill_rows 16, wanted_rows 12: (decode, prefill, prefill came first) -> choice
    "as many as want logits": (drafted(4, 4, 4), [], False, (3, 0, QUEUE_DRAINED)),
    "no more of them": (drafted(4, 4, 4, 1), [], False, (3, 0, ROW_CAP)),
    "nor the first one that is too wide": (drafted(4, 9), [], False, (1, 0, ROW_CAP)),
    "one that is wider goes alone": (drafted(13, 1), [], False, (1, 0, ROW_CAP)),
    "prompt rows that want none go beside them": (drafted(4, 4, 4), [CHUNK, CHUNK], False, (3, 2, QUEUE_DRAINED)),
    "the end of a prompt wants one": (drafted(4, 4, 3), [END, END], False, (3, 1, PREFILL_BUDGET)),
    "and waits where none is left": (drafted(4, 4, 4), [END], False, (3, 0, PREFILL_BUDGET)),
    "but not for ever": (drafted(4, 4, 4), [END], True, (2, 1, ROW_CAP)),
    "what wants none and came first takes no place": (drafted(4, 4, 4), [CHUNK], True, (3, 1, QUEUE_DRAINED)),
    "what came first leaves rows for the others": (drafted(13), [END], True, (0, 1, ROW_CAP)),
    "ends of prompts alone": ([], [(1, PREFILL | SAMPLE)] * 13, False, (0, 12, ROW_CAP)),
}


@pytest.mark.parametrize("name", CASES)
def test_drained_steps_want_no_more_than_the_engine_gives(name: str) -> None:
    decode, prefill, prefill_first, expected = CASES[name]
    lines = heads(*decode, first_id=100), heads(*prefill)
    choice = DrainPolicy(32, 16, 12).choose(*lines, is_prefill_first=prefill_first)
    assert (choice.n_decode, choice.n_prefill, choice.close_reason) == expected


def wanted(frames: list[QueuedFrame]) -> int:
    return sum(frame.n_rows if frame.flags & Flag.DRAFTED else bool(frame.flags & SAMPLE) for frame in frames)


@pytest.mark.parametrize("name", ["drain", "auto", "single"])
def test_no_policy_takes_more_than_load_stage_makes_room_for(name: str) -> None:
    """For any waiting frames of as many sessions as there are lanes, also if earlier stages have joined envelopes."""
    rng = random.Random(3)
    curves = Curves(CostCurve([(rows, 100 - rows % 8) for rows in range(1, 129)]))
    for n_lanes in (1, 2, 5, 40):
        config = stage_config(Path("x"), n_lanes=n_lanes, ctx_tokens=64, max_rows=512, policy=name)
        policy: Policy = make_policy(config, curves)
        assert isinstance(policy, {"drain": DrainPolicy, "auto": GroupPolicy, "single": SinglePolicy}[name])
        for _ in range(300):
            decode: list[QueuedFrame] = []
            prefill: list[QueuedFrame] = []
            room: dict[int, int] = {}
            for index in range(n_lanes):
                envelope = rng.randrange(3)
                left = room.setdefault(envelope, rng.choice((1, 3)) * DRAFTED_ROWS_MAX)
                n_guesses = rng.randint(0, min(left, DRAFT_TOKENS_MAX)) if rng.random() < 0.6 else 0
                if rng.random() < 0.4:
                    frame = rows_frame(index, 9, rng.randint(1, 3), PREFILL | SAMPLE * rng.randint(0, 1))
                    prefill.append(frame)
                else:
                    room[envelope] -= n_guesses
                    frame = rows_frame(index, 9, 1 + n_guesses, GUESSES if n_guesses else SAMPLE)
                    decode.append(frame)
                frame.envelope = envelope
            rng.shuffle(decode)
            rng.shuffle(prefill)
            is_prefill_first = bool(prefill) and (not decode or rng.random() < 0.5)
            choice = policy.choose(decode, prefill, is_prefill_first=is_prefill_first)
            taken = decode[: choice.n_decode] + prefill[: choice.n_prefill]
            assert taken
            assert wanted(taken) <= n_lanes + DRAFTED_ROWS_MAX + PAD_SEARCH_ROWS


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_drafted_rows_are_decode_rows() -> None:
    """They pay for the head, and each for the context of its lane; a frame's lane is read once."""
    found = shape_of([rows_frame(1, 100, 4, GUESSES), rows_frame(2, 1_000, 1, SAMPLE), rows_frame(3, 10, 8, PREFILL)])
    assert (found.decode_rows, found.prefill_rows, found.n_rows) == (5, 8, 13)
    assert found.context == 4 * 100 + 1_000 + 8 * 10
    assert found.tile_tokens == 100 + 1_000 + 10
    assert found.lane_context == 5 * 1_000 + 8 * 10
    assert found.lane_tokens == 2 * 1_000 + 10


def test_a_frame_of_guesses_costs_its_curve_and_its_context() -> None:
    curve = CostCurve([(1, 100), (32, 3_200)])
    unified = Curves(curve, curve, context_ns=2.0)
    assert unified.predict_ns(shape_of([rows_frame(1, 50, 4, GUESSES)])) == curve.cost_ns(4) + 2.0 * 4 * 50
    per_lane = Curves(curve, curve, context_ns=2.0, context_tiled_ns=0.5, is_per_lane=True)
    cost_ns = per_lane.predict_ns(shape_of([rows_frame(1, 50, 4, GUESSES)]))
    assert cost_ns == curve.cost_ns(4) + 2.0 * 50 + 0.5 * 3 * 50, "as the rows of a prompt: the lane is read once"


def test_a_frame_of_guesses_reads_its_lane_once_for_each_tile() -> None:
    for before, tile_tokens in ((0, 70), (62, 2 * 70), (32, 70)):
        frames = [rows_frame(2, 0, before, PREFILL)] * bool(before) + [rows_frame(1, 70, 32, GUESSES)]
        assert shape_of(frames).tile_tokens == tile_tokens
