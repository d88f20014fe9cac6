"""Where attention handles lanes separately, 64 decode rows cost no more each than 63, for the stage and for plans."""

from __future__ import annotations

import dataclasses

import pytest

from relayline.coordinator.engine.descriptions import stage_cost
from relayline.coordinator.schedule.groups import GroupPlanner
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.stage.speed.curves import Curves, StepShape, shape_of
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import hidden, rows_frame

MS = 1_000_000
ROWS = [(1, 1 * MS), (512, 30 * MS)]
CONTEXT_NS, TILED_NS, TOKENS = 10.0, 2.0, 5_000


def curves(*, takes_lanes_apart: bool) -> Curves:
    return Curves.of_stage(
        has_head=True, decode=ROWS, prefill=ROWS, context_ns=CONTEXT_NS, context_tiled_ns=TILED_NS,
        takes_lanes_apart=takes_lanes_apart,
    )  # fmt: skip


def decode_step(rows: int) -> StepShape:
    return StepShape(rows, 0, *(rows * TOKENS,) * 4, frame_context=rows * TOKENS)


def planned(*, takes_lanes_apart: bool, context: int = TOKENS) -> StageCost:
    curve = CostCurve(ROWS)
    return StageCost(
        curve, curve, 512, CONTEXT_NS, TILED_NS, decode_tokens=context, takes_lanes_apart=takes_lanes_apart
    )


def test_decode_rows_pay_for_their_own_lanes_however_many_they_are() -> None:
    by_tiles, apart = (curves(takes_lanes_apart=each) for each in (False, True))
    assert by_tiles.predict_ns(decode_step(64)) > 1.3 * by_tiles.predict_ns(decode_step(63))
    few, many = apart.predict_ns(decode_step(63)), apart.predict_ns(decode_step(64))
    assert 0.98 < many / 64 / (few / 63) < 1.0
    assert by_tiles.predict_ns(decode_step(63)) == few
    prompt = StepShape(8, 64, 72 * TOKENS, 9 * TOKENS, 72 * TOKENS, 9 * TOKENS, frame_context=9 * TOKENS)
    # Mostly a prompt: tiles in both.
    assert apart.predict_ns(prompt) == by_tiles.predict_ns(prompt)
    assert apart.copy(has_head=False).takes_lanes_apart


def test_big_decode_steps_teach_the_price_of_a_row() -> None:
    apart = curves(takes_lanes_apart=True)
    apart.observe(decode_step(128), round(2 * apart.predict_ns(decode_step(128))))
    assert apart.context_ns > CONTEXT_NS
    assert apart.context_ns / CONTEXT_NS > apart.context_tiled_ns / TILED_NS


def test_the_plan_knows_it_from_the_handshake() -> None:
    message = pb.DescribeResponse()
    curves(takes_lanes_apart=True).tell(message)
    assert message.takes_lanes_apart
    read = dataclasses.replace(stage_cost(message, 512, host_ns=0), decode_tokens=TOKENS)
    assert read.decode_ns(128) == planned(takes_lanes_apart=True).decode_ns(128)
    assert read.decode_ns(128) < planned(takes_lanes_apart=False).decode_ns(128)
    assert read.mixed_ns(8, 120) == planned(takes_lanes_apart=False).mixed_ns(8, 120)
    status = pb.StatusResponse()
    curves(takes_lanes_apart=False).tell(status)
    assert not stage_cost(status, 512).takes_lanes_apart


@pytest.mark.parametrize("message", [pb.DescribeResponse(), pb.StatusResponse()])
def test_the_plan_knows_of_tiles_whose_price_was_not_measured(
    message: pb.DescribeResponse | pb.StatusResponse,
) -> None:
    """Rows of a tile have other bits, whether or not a busy host let the stage measure what they cost."""
    unmeasured = Curves.of_stage(has_head=True, has_tiles=True).copy(has_head=True)
    unmeasured.tell(message)
    assert stage_cost(message, 512).may_tile
    Curves.of_stage(has_head=True).tell(message)
    assert not stage_cost(message, 512).may_tile


def test_scratch_rows_make_no_step_tiled_whose_price_was_not_measured() -> None:
    """By the curve 64 rows are cheaper than 63."""
    points = [(1, 1e6), (63, 63e6), (64, 10e6)]
    plain, tiled = (Curves.of_stage(has_head=True, decode=points, has_tiles=each) for each in (False, True))
    step = StepShape(63, 0, 0, 0, 0, 0)
    assert plain.padded_rows(step, 128) == 64
    assert tiled.padded_rows(step, 128) == 63


def step(n_decode: int, n_prompt: int) -> StepShape:
    prompt = [rows_frame(99, TOKENS, hidden(n_prompt), Flag.PREFILL)] if n_prompt else []
    return shape_of([rows_frame(session_id, TOKENS) for session_id in range(n_decode)] + prompt)


def true_context_ns(n_decode: int, n_prompt: int) -> float:
    """What the machine takes: the rows of a prompt after its first half as much as that."""
    return CONTEXT_NS * TOKENS * (n_decode + (1 + (n_prompt - 1) / 2 if n_prompt else 0))


def test_further_rows_of_a_frame_pay_half_of_what_context_costs_its_first() -> None:
    """They find the lane's keys and values in a cache. The stage and the plan predict the same step."""
    of_one_price, apart = (curves(takes_lanes_apart=each) for each in (False, True))
    for n_decode, n_prompt in ((16, 0), (0, 32), (16, 32), (1, 8)):
        shape = step(n_decode, n_prompt)
        rows_ns = apart.predict_ns(dataclasses.replace(shape, context=0, frame_context=0))
        assert apart.predict_ns(shape) - rows_ns == pytest.approx(true_context_ns(n_decode, n_prompt))
        planned_ns = dataclasses.replace(planned(takes_lanes_apart=True), prompt_tokens=TOKENS)
        assert planned_ns.mixed_ns(n_decode, n_prompt) == pytest.approx(apart.predict_ns(shape))
        assert of_one_price.predict_ns(shape) - apart.predict_ns(shape) == pytest.approx(
            CONTEXT_NS * TOKENS * max(0, n_prompt - 1) / 2
        )


def test_a_long_prompt_and_its_streams_teach_one_price() -> None:
    """Chunks of a long prompt leave the price as the streams know it."""
    known, rows = curves(takes_lanes_apart=True), CostCurve(ROWS)
    for _ in range(60):
        known.observe(step(0, 48), round(rows.cost_ns(48) + true_context_ns(0, 48)))
    assert known.context_ns == pytest.approx(CONTEXT_NS, rel=0.01)


@pytest.mark.parametrize("n_streams", [64, 65, 128])
def test_the_plan_has_no_cliff_there(n_streams: int) -> None:
    before, after = (
        GroupPlanner([planned(takes_lanes_apart=each)]).plan(n_streams, n_prompts=0) for each in (False, True)
    )
    assert after.group_rows >= 64 > before.group_rows
    assert after.period_ns <= before.period_ns
