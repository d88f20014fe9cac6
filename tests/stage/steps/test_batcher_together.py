"""An envelope kept whole in the batcher behaves exactly as its frames pushed one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayline.stage.queue_types import QueuedFrame, Step
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import DrainPolicy, GroupPolicy, Policy, SinglePolicy
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.frames import Flag
from tests.support.examples import thinned
from tests.support.fakes import control, rows_frame

CURVE = CostCurve([(1, 10), (2, 10), (3, 12), (4, 10), (8, 20)])
CONTROLS = {"open": Flag.OPEN, "trim": Flag.TRIM, "close": Flag.CLOSE, "copy": Flag.COPY_PREFIX}
DECODE = st.tuples(st.sampled_from(["decode"] * 7 + ["prefill"]), st.integers(0, 9), st.integers(1, 3))
CONTROL = st.tuples(st.sampled_from(list(CONTROLS)), st.integers(0, 9), st.integers(0, 9))
EVENTS = st.lists(
    st.one_of(
        st.lists(DECODE, min_size=1, max_size=6),
        st.lists(DECODE, min_size=1, max_size=6),
        st.lists(st.one_of(DECODE, CONTROL), min_size=1, max_size=6),
        st.just("take"),
        st.sampled_from([0, 1]),  # a route to drop
    ),
    max_size=40,
)


def frame_of(event: tuple[str, int, int], envelope: int, position: int) -> QueuedFrame:
    kind, session, number = event
    route = session % 2
    if kind in CONTROLS:
        frame = control(session, CONTROLS[kind], argument=number if kind == "copy" else 0, route_id=route)
    else:
        flags = Flag.PREFILL if kind == "prefill" else Flag.WANTS_SAMPLE
        frame = rows_frame(session, position, number, flags, route_id=route)
    frame.envelope = envelope
    return frame


def seen(frames: Iterable[QueuedFrame]) -> list[tuple[int, ...]]:
    return [(f.envelope, *f.session_key, f.position, f.n_rows, f.flags) for f in frames]


def summary(step: Step | None) -> tuple[Any, ...] | None:
    return step and (seen(step.controls), seen(step.frames), dataclasses.replace(step, controls=[], frames=[]))


@pytest.mark.parametrize(
    "policy", [DrainPolicy(8, 4), SinglePolicy(8), GroupPolicy(8, CURVE)], ids=lambda p: type(p).__name__
)
@settings(max_examples=thinned(200))
@given(EVENTS)
def test_frames_pushed_together_run_as_those_pushed_one_by_one(policy: Policy, events: list[Any]) -> None:
    together, singly = Batcher(policy), Batcher(policy)

    def both_take() -> bool:
        one, other = summary(together.take(7)), summary(singly.take(7))
        assert one == other
        return one is not None

    for number, event in enumerate(events):
        if event == "take":
            both_take()
        elif isinstance(event, int):
            assert seen(together.drop_route(event)) == seen(singly.drop_route(event))
        else:
            ours, theirs = ([frame_of(one, number, 8 * number + at) for at, one in enumerate(event)] for _ in "ab")
            dropped = [gone for frame in theirs for gone in singly.push(frame)]
            assert seen(together.push_together(ours)) == seen(dropped)
        assert (len(together), together.queued_rows) == (len(singly), singly.queued_rows)
    while both_take():
        pass
    assert (len(together), together.queued_rows) == (0, 0)


@pytest.mark.parametrize(
    ("frames", "is_whole"),
    [
        ([rows_frame(1, 0), rows_frame(2, 0, 3)], True),
        ([rows_frame(1, 0), rows_frame(1, 1)], False),
        ([rows_frame(1, 0), rows_frame(2, 0, 1, Flag.PREFILL)], False),
        ([rows_frame(1, 0), control(2, Flag.CLOSE)], False),
    ],
    ids=["decode rows", "one session twice", "a prompt", "a control"],
)
def test_only_decode_rows_of_different_sessions_are_kept_whole(frames: list[QueuedFrame], *, is_whole: bool) -> None:
    batcher = Batcher(DrainPolicy(8, 4))
    batcher.push_together(frames)
    assert (batcher._whole is frames) == is_whole
    batcher.push_together([rows_frame(5, 0)])
    assert not batcher._whole, "it would be in front of later frames"
    ran: list[QueuedFrame] = list(itertools.chain.from_iterable(s.frames for s in iter(lambda: batcher.take(0), None)))
    assert sum(frame.n_rows for frame in ran) == sum(frame.n_rows for frame in frames) + 1


def test_a_whole_queue_leaves_nothing_behind() -> None:
    batcher = Batcher(DrainPolicy(8, 4))
    frames = [rows_frame(1, 0), rows_frame(2, 0)]
    batcher.push_together(frames)
    step = batcher.take(3)
    assert step == Step([], frames, "queue_drained", 3, 2, 0)
    assert (len(batcher), batcher.queued_rows, batcher.take(4)) == (0, 0, None)
