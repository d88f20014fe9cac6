from __future__ import annotations

import random
from pathlib import Path

import pytest

from relayline.deploy.testing.cluster.clock import Clock
from relayline.deploy.testing.cluster.node import Node, Part
from relayline.deploy.testing.simulation.stage import SimStage
from relayline.deploy.testing.simulation.world import equal_stages
from relayline.stage.assembly import make_policy
from relayline.stage.config import StageConfig
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.speed.curves import Curves
from relayline.stage.steps.policy import (
    GROUP,
    PAD_TARGET,
    POLICIES,
    PREFILL_BUDGET,
    QUEUE_DRAINED,
    ROW_CAP,
    DrainPolicy,
    GroupPolicy,
    SinglePolicy,
)
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from relayline.wire.settings.table import POLICIES as SETTING_POLICIES
from relayline.wire.settings.table import EngineSettings
from tests.support.fakes import rows_frame

ROWS_MAX = 40


def heads(*rows: int, first_id: int = 0) -> list[QueuedFrame]:
    """Heads of different sessions, numbered from `first_id` on, with these row counts."""
    return [rows_frame(first_id + index, 0, n_rows, Flag.PREFILL) for index, n_rows in enumerate(rows)]


CASES = {  # max_rows 16, prefill_rows 8: (decode, prefill, prefill came first) -> (n_decode, n_prefill, reason)
    "all decoders": ([1] * 16, [], False, (16, 0, QUEUE_DRAINED)),
    "row cap": ([1] * 17, [], False, (16, 0, ROW_CAP)),
    "frames of several rows are not split": ([5, 5, 5, 5], [], False, (3, 0, ROW_CAP)),
    "prefill alone takes the step": ([], [8, 8], False, (0, 2, QUEUE_DRAINED)),
    "prefill alone up to the cap": ([], [8, 8, 1], False, (0, 2, ROW_CAP)),
    "prefill beside decoders has a budget": ([1, 1], [4, 4, 4], False, (2, 2, PREFILL_BUDGET)),
    "one chunk above the budget runs": ([1, 1], [12, 1], False, (2, 1, PREFILL_BUDGET)),
    "a chunk that does not fit waits": ([1] * 8, [12], False, (8, 0, PREFILL_BUDGET)),
    "a chunk that waited longest goes before decoders": ([1] * 8, [12], True, (4, 1, ROW_CAP)),
    "a full chunk that waited longest goes alone": ([1] * 8, [16], True, (0, 1, ROW_CAP)),
    "all fit, whoever came first": ([1] * 8, [8], True, (8, 1, QUEUE_DRAINED)),
    "too many decoders leave the oldest chunk its place": ([1] * 40, [8], True, (8, 1, ROW_CAP)),
    "a frame wider than the step goes alone": ([17, 1], [1], False, (1, 0, ROW_CAP)),
    "a chunk wider than the step goes alone": ([], [17, 1], False, (0, 1, ROW_CAP)),
    "a chunk wider than the step waits for decoders": ([1], [17], False, (1, 0, PREFILL_BUDGET)),
    "and then goes alone": ([1], [17], True, (0, 1, ROW_CAP)),
}


@pytest.mark.parametrize("name", CASES)
def test_choice(name: str) -> None:
    decode, prefill, prefill_first, expected = CASES[name]
    policy = DrainPolicy(max_rows=16, prefill_rows=8)
    choice = policy.choose(heads(*decode, first_id=100), heads(*prefill), is_prefill_first=prefill_first)
    assert (choice.n_decode, choice.n_prefill, choice.close_reason) == expected


STAIRS = CostCurve([(1, 10), (2, 30), (3, 40), (4, 20), (5, 50), (6, 60), (7, 70), (8, 40)])  # tiles of four rows


def in_envelopes(frames: list[QueuedFrame], *envelopes: int) -> list[QueuedFrame]:
    """The frames as having come in the envelopes of these numbers."""
    for frame, envelope in zip(frames, envelopes, strict=True):
        frame.envelope = envelope
    return frames


GROUP_CASES = {  # max_rows 8: (rows and envelopes of decode heads, of prefill heads, prefill came first) -> choice
    "one envelope": ([1, 1, 1, 1], [1, 1, 1, 1], [], [], False, (4, 0, GROUP)),
    "two groups that met are not merged": ([1] * 8, [1] * 4 + [2] * 4, [], [], False, (4, 0, GROUP)),
    "what is left joins where it costs nothing": ([1, 1, 1, 1], [1, 1, 1, 2], [], [], False, (4, 0, PAD_TARGET)),
    "but not if some would still be left": ([1] * 6, [1, 1, 1, 2, 2, 2], [], [], False, (3, 0, GROUP)),
    "an envelope wider than a step is cut": ([3, 3, 3], [1, 1, 1], [], [], False, (2, 0, ROW_CAP)),
    "prefill that came first": ([1, 1], [2, 2], [4, 4, 4], [1, 1, 1], True, (0, 2, ROW_CAP)),
    "prefill that came later waits": ([1, 1], [1, 1], [4], [2], False, (2, 0, GROUP)),
    "prompt rows ride with their envelope": ([1, 1, 1], [1, 1, 2], [4], [1], False, (2, 1, GROUP)),
    "and so do decode rows, whichever stands first": ([1, 1], [1, 1], [4, 4], [1, 2], True, (2, 1, GROUP)),
    "prompt rows that do not fit beside them wait": ([1, 1], [1, 1], [7], [1], False, (2, 0, ROW_CAP)),
    "nothing joins a step that prompt rows ride in": ([1, 1, 1, 1], [1, 1, 1, 2], [1], [1], False, (3, 1, GROUP)),
    "prefill alone": ([], [], [4, 4], [1, 2], False, (0, 1, GROUP)),
    "a frame wider than a step goes alone": ([9, 1], [1, 1], [], [], False, (1, 0, ROW_CAP)),
    "a chunk wider than a step goes alone": ([], [], [9, 1], [1, 1], False, (0, 1, ROW_CAP)),
}


@pytest.mark.parametrize("name", GROUP_CASES)
def test_groups_stay_together_and_apart(name: str) -> None:
    decode, decode_envelopes, prefill, prefill_envelopes, prefill_first, expected = GROUP_CASES[name]
    decoders = in_envelopes(heads(*decode, first_id=100), *decode_envelopes)
    chunks = in_envelopes(heads(*prefill), *prefill_envelopes)
    is_prefill_first = prefill_first or not decode
    choice = GroupPolicy(8, STAIRS).choose(decoders, chunks, is_prefill_first=is_prefill_first)
    assert (choice.n_decode, choice.n_prefill, choice.close_reason) == expected


def test_remaining_rows_do_not_turn_a_group_into_an_attention_tile() -> None:
    """Each of them would pay for the context of all in such a tile. A step that is one already takes it."""
    curve = CostCurve(
        [(1, 25), (4, 80), (5, 180), (6, 280), (7, 380), (8, 160), (60, 1_200), (64, 1_240), (128, 2_480)]
    )
    for n_rows, expected in ((58, (60, PAD_TARGET)), (62, (62, GROUP)), (66, (68, PAD_TARGET))):
        decoders = in_envelopes(heads(*[1] * (n_rows + 2)), *[1] * n_rows, 2, 2)
        choice = GroupPolicy(128, curve).choose(decoders, [], is_prefill_first=False)
        assert (choice.n_decode, choice.close_reason) == expected


def test_single_takes_the_oldest_whatever_it_is() -> None:
    decoders, chunks, policy = heads(1, 1, first_id=10), heads(4), SinglePolicy(8)
    assert policy.choose(decoders, chunks, is_prefill_first=True).n_prefill == 1
    assert policy.choose(decoders, [], is_prefill_first=False).n_decode == 1
    assert policy.choose(decoders, chunks, is_prefill_first=False).n_decode == 1


def test_a_new_policy_is_its_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage process and both simulations take it from the table, by the name in the table of settings."""
    assert tuple(POLICIES) == SETTING_POLICIES
    monkeypatch.setitem(POLICIES, "auto", lambda limits: SinglePolicy(limits.max_rows + 1))
    wanted = SinglePolicy(ROWS_MAX + 1)
    config = StageConfig(Path("slice.gguf"), engine=EngineSettings(policy="auto", max_rows=ROWS_MAX))
    assert make_policy(config, Curves()) == wanted
    node = Node(0, Part(0, 1, range(2)), 2, "auto", Clock(), random.Random(0))
    assert isinstance(node.batcher.policy, SinglePolicy)
    (model,) = equal_stages(1)
    stage = SimStage(0, model, "auto", 2, random.Random(0), is_calibrated=True, is_last=True)
    assert stage.batcher.policy == SinglePolicy(model.rows_max + 1)
