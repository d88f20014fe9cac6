"""Stage 0 continues a stream by itself for just as long as the coordinator has allowed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from relayline.stage.inbound import queued_frames
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sending_back import write_back
from relayline.stage.steps.grants import Grants, mark_granted
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_TOKENS
from relayline.wire.envelopes.envelope import parse
from relayline.wire.envelopes.frames import Flag, grant_argument
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.fakes import EPOCH, ROUTE, control, rows_frame

SESSION, NUMBER, TRACE = 8, 77, bytes(range(25))


def row(position: int, number: int = 0, limit: int = 0) -> QueuedFrame:
    frame = rows_frame(SESSION, position, np.array([[7]], np.int32), Flag.WANTS_SAMPLE)
    return dataclasses.replace(frame, argument=grant_argument(number, limit), upstream_trace=TRACE)


def extension(limit: int, number: int = NUMBER) -> QueuedFrame:
    return dataclasses.replace(control(SESSION, Flag.EXTEND), argument=grant_argument(number, limit))


def positions(frames: list[QueuedFrame]) -> list[int]:
    return [frame.position for frame in frames]


def granted(limit: int = 6) -> Grants:
    grants, first = Grants(), row(3, NUMBER, limit)
    assert grants.came([first]) == [first]
    assert grants.trace == TRACE
    return grants


def test_tokens_that_follow_become_rows_until_the_end() -> None:
    grants = granted()
    for position in (4, 5):
        assert positions(grants.fed_back([row(position, NUMBER, 6)])) == [position]
    assert grants.fed_back([row(6, NUMBER, 6)]) == [], "parked"
    assert grants.n_rows == 2


def test_an_extension_releases_what_waits_for_it() -> None:
    grants = granted(limit=4)
    assert grants.fed_back([row(4, NUMBER)]) == []
    assert grants.came([extension(9, number=1)]) == []
    assert positions(grants.came([extension(9)])) == [4]
    assert grants.came([extension(10)]) == []
    assert positions(grants.fed_back([row(5, NUMBER)])) == [5]


def test_an_extension_may_come_first() -> None:
    grants = granted(limit=4)
    grants.came([extension(5)])
    assert positions(grants.fed_back([row(4, NUMBER)])) == [4]


@pytest.mark.parametrize("other", [row(3), row(4), control(SESSION, Flag.CLOSE), control(SESSION, Flag.TRIM)])
def test_whatever_the_coordinator_sends_ends_a_grant(other: QueuedFrame) -> None:
    grants = granted(limit=4)
    grants.fed_back([row(4, NUMBER)])
    assert grants.came([other]) == [other]
    assert grants.came([extension(9)]) == []
    assert grants.fed_back([row(4, NUMBER), row(5, NUMBER)]) == []


def test_tokens_of_another_grant_or_position_are_dropped() -> None:
    grants = granted()
    assert grants.fed_back([row(4, NUMBER + 1), row(5, NUMBER), row(3, NUMBER)]) == []
    prompt = rows_frame(SESSION, 4, np.array([[7]], np.int32), Flag.PREFILL)
    assert grants.fed_back([dataclasses.replace(prompt, argument=grant_argument(NUMBER, 6))]) == []
    assert positions(grants.fed_back([row(4, NUMBER)])) == [4]


def test_rows_without_a_grant_pass() -> None:
    grants = Grants()
    frames = [row(3), control(SESSION, Flag.CLOSE)]
    assert grants.came(frames) is frames
    assert grants.fed_back([row(4)]) == []


def test_the_last_stage_writes_the_rows_that_follow() -> None:
    sample = pb.Sampled(session_id=SESSION, position=4, token=42)
    frame = row(3, NUMBER, 6)
    assert mark_granted(sample, frame.argument) == 42
    assert sample.grant == NUMBER
    pool = BufferPool(DTYPE_TOKENS, 1)
    message = write_back(pool.lease(1, 1), [(frame, 42)], 9, 1, 1_000)
    view = parse(bytes(bytearray(message)), max_rows=8)
    assert view.payload.tolist() == [[42]]
    session_id, epoch, position, n_rows, flags, argument, *_ = view.heads[0]
    assert (session_id, position, n_rows, flags, argument) == (SESSION, 4, 1, Flag.WANTS_SAMPLE, frame.argument)
    assert epoch == frame.epoch
    assert frame.route_id == ROUTE


@pytest.mark.parametrize(("is_back", "sent_ns"), [(False, 900), (True, 0)])
def test_a_frame_knows_when_it_left_unless_it_came_back(is_back: bool, sent_ns: int) -> None:
    """The stage's record of its batch then says that the row did not come from the coordinator."""
    pool = BufferPool(DTYPE_TOKENS, 1)
    message = write_back(pool.lease(1, 1), [(row(3, NUMBER, 6), 7)], EPOCH, 1, 900)
    view = parse(bytes(bytearray(message)), max_rows=8)
    (frame,) = queued_frames(view, ROUTE, EPOCH, 1_000, 1, None, is_back=is_back)
    assert (frame.sent_ns, frame.arrived_ns) == (sent_ns, 1_000)
