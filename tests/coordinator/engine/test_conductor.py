"""The conductor by itself: its instructions for one event after another, with a loss and a recovery among them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.instructions import (
    Dispatch,
    Ended,
    Generated,
    Instruction,
    Log,
    Lose,
    Send,
    Started,
    Tell,
    TryLanes,
)
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.tenants import Tenant
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import (
    NotReadyError,
    NotServedError,
    OverloadedError,
    ProtocolError,
    RelaylineError,
    StageLostError,
)
from relayline.wire.common.phase import Phase
from relayline.wire.envelopes.frames import Flag
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

S = 1_000_000_000
FACTS = EpochFacts(1, 64, {}, ("a", "b"), [StageCost(CostCurve(), CostCurve(), 64)] * 2)


def new(**changes: Any) -> Conductor:
    config = ConductorConfig(ScheduleConfig(draft=0), ("stage-0", "stage-1"), 100)
    return Conductor(dataclasses.replace(config, **changes), lambda _: False, itertools.count(1), 0)


def connected(facts: EpochFacts = FACTS, **changes: Any) -> Conductor:
    conductor = new(**changes)
    conductor.begin_epoch()
    conductor.connected(facts, 0)
    conductor.dispatch(0)
    return conductor


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(name, prompt, max_tokens, SamplingParams(temperature=0.0))


def kinds(instructions: Sequence[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def frames(instructions: Sequence[Instruction]) -> list[tuple[int, int, tuple[int, ...], int]]:
    sent = [frame for each in instructions if isinstance(each, Send) for frame in each.frames]
    return [(frame.session_id, frame.position, frame.tokens, frame.flags) for frame in sent]


def sample(conductor: Conductor, position: int, token: int, session_id: int = 1, now_ns: int = 0) -> list[Instruction]:
    message = pb.ReturnResponse(epoch=conductor.epoch)
    message.samples.add(session_id=session_id, position=position, token=token)
    return conductor.returned(message, now_ns)


def test_the_way_of_one_request() -> None:
    conductor = connected()
    opened, instructions = conductor.open(request(max_tokens=2), 0)
    assert (opened.session_id, opened.is_joined) == (1, False)
    assert instructions == [Started(1, 0), Dispatch()]
    first = [(1, 0, (), Flag.OPEN), (1, 0, (1, 2, 3), Flag.PREFILL | Flag.WANTS_SAMPLE)]
    assert frames(conductor.dispatch(0)) == first
    instructions = sample(conductor, 3, 7)
    assert kinds(instructions) == ["Generated", "Send", "Tell"], "frames that stages wait for go first"
    assert frames(instructions) == [(1, 3, (7,), Flag.WANTS_SAMPLE)]
    instructions = sample(conductor, 4, 8)
    assert kinds(instructions) == ["Generated", "Ended", "Dispatch", "Send", "Tell"]
    assert frames(instructions) == [(1, 0, (), Flag.CLOSE)]
    assert instructions[0] == Generated(1, 4, "length", is_drafted=False)
    assert not conductor.readers


def test_frames_leave_before_anything_else_is_done_about_a_token() -> None:
    conductor = connected()
    conductor.open(request(max_tokens=3), 0)
    conductor.dispatch(0)
    sample(conductor, 3, 7)
    instructions = sample(conductor, 4, 8)
    assert kinds(instructions) == ["Send", "Generated", "Tell"], "neither the first token nor the last"


@pytest.mark.parametrize("chances", [[float("nan"), 0.5], [0.5], [0.5, 0.5]], ids=["no number", "too few", "no token"])
def test_odd_guesses_of_the_last_stage_cost_no_token(chances: list[float]) -> None:
    config = ScheduleConfig()
    conductor = connected(dataclasses.replace(FACTS, predictions=2), schedule=config)
    conductor.open(request(), 0)
    conductor.dispatch(0)
    for position, token in ((3, 7), (4, 8), (5, 9)):
        message = pb.ReturnResponse(epoch=conductor.epoch)
        sampled = message.samples.add(session_id=1, position=position, token=token)
        sampled.guesses.extend([8, 200])
        sampled.guess_chances.extend(chances)
        instructions = conductor.returned(message, 0)
        assert not [each for each in instructions if isinstance(each, Lose)]
        assert [each.event.token for each in instructions if isinstance(each, Tell)] == [token]


def test_tokens_that_come_with_the_last_one_are_counted_before_the_end() -> None:
    conductor = connected(dataclasses.replace(FACTS, n_lanes=2))
    for prompt in ((1, 2, 3), (4, 5, 6)):
        conductor.open(request(prompt=prompt), 0)
    conductor.dispatch(0)
    for session_id in (1, 2):
        sample(conductor, 3, 7, session_id)
    message = pb.ReturnResponse(epoch=conductor.epoch)
    message.samples.add(session_id=2, position=4, token=7)
    for position in (4, 5, 6):  # as of a frame with two right drafts
        message.samples.add(session_id=1, position=position, token=7)
    instructions = conductor.returned(message, 0)
    order = [each for each in instructions if isinstance(each, Generated | Ended)]
    assert order == [
        Generated(1, 4, None, is_drafted=False),
        Generated(1, 5, None, is_drafted=False),
        Generated(1, 6, "length", is_drafted=False),
        Ended(1, None),
        Generated(2, 4, None, is_drafted=False),
    ]
    told = [(each.session_id, each.event.token) for each in instructions if isinstance(each, Tell)]
    assert told == [(2, 7), (1, 7), (1, 7), (1, 7)]


def test_a_frame_that_has_left_does_not_change_with_its_session() -> None:
    conductor = connected()
    conductor.open(request(), 0)
    (send,) = conductor.dispatch(0)
    before = repr(send)
    sample(conductor, 3, 7)
    conductor.lost(StageLostError("gone"), 1)
    conductor.begin_epoch()
    conductor.connected(FACTS, 2)
    assert repr(send) == before
    assert hash(send)


def test_a_recovery_replays_the_history_and_repeats_no_token() -> None:
    conductor = connected()
    conductor.open(request(), 0)
    conductor.dispatch(0)
    sample(conductor, 3, 7)
    before = conductor.epoch
    assert kinds(conductor.lost(StageLostError("stage 1 is gone"), 5)) == ["Log"]
    assert conductor.dispatch(6) == [], "nothing leaves until the next epoch begins"
    conductor.begin_epoch()
    late = pb.ReturnResponse(epoch=before)
    late.samples.add(session_id=1, position=4, token=8)
    late.faults.add(session_id=0, label="stage_lost", message="of the epoch before")
    assert conductor.returned(late, 7) == []
    instructions = conductor.connected(dataclasses.replace(FACTS, held={1: 2, 9: 4}), 8)
    assert kinds(instructions) == ["Started", "Dispatch", "Log"]
    assert frames(conductor.dispatch(8)) == [
        (9, 0, (), Flag.CLOSE),  # a left lane of an unknown session
        (1, 0, (), Flag.OPEN),
        (1, 2, (), Flag.TRIM),  # all stages hold its first two rows
        (1, 2, (3, 7), Flag.PREFILL | Flag.WANTS_SAMPLE),
    ]
    assert sample(conductor, 3, 7) == [], "its client has that token"
    assert [each.event.token for each in sample(conductor, 4, 8) if isinstance(each, Tell)] == [8]  # type: ignore[union-attr]


def test_identical_requests_share_a_session_until_the_last_reader_leaves() -> None:
    conductor = connected()
    conductor.open(request("a"), 0)
    opened, instructions = conductor.open(request("b"), 0)
    assert (opened.session_id, opened.is_joined, instructions) == (1, True, [])
    assert conductor.left(1, 0) == []
    assert kinds(conductor.left(1, 0)) == ["Ended"], "its first rows have not left: a dispatch is asked for already"
    assert conductor.left(1, 0) == []


def test_a_lane_goes_to_a_waiting_session_and_a_full_line_refuses() -> None:
    conductor = connected(waiting_max=1, share=False)
    for name in ("a", "b"):
        conductor.open(request(name), 0)
    with pytest.raises(OverloadedError):
        conductor.open(request("c"), 0)
    instructions = conductor.left(1, 0)
    assert [each for each in instructions if isinstance(each, Started | Ended)] == [Ended(1, None), Started(2, 0)]


def test_a_burst_at_a_fresh_coordinator_gets_its_queues_waiting_time() -> None:
    """Nothing has ended, and no token has come yet: the stages' own speed tells how long a lane is held."""
    curve = CostCurve([(1, 10e6), (64, 20e6)])
    facts = dataclasses.replace(FACTS, ctx_tokens=512, costs=[StageCost(curve, curve, 64)] * 2)
    conductor = connected(facts, waiting_max=3, share=False)
    for name in "abcd":
        conductor.open(request(name, max_tokens=200), S)
    with pytest.raises(OverloadedError) as caught:
        conductor.open(request("e", max_tokens=200), S)
    assert caught.value.retry_after_s == pytest.approx(4 * 200 * 0.02, abs=2), "two stages of 10 ms a token"


def test_a_refused_lane_is_asked_for_again_after_a_while() -> None:
    conductor = connected()
    conductor.open(request(), 0)
    conductor.dispatch(0)
    message = pb.ReturnResponse(epoch=1)
    message.faults.add(session_id=1, label="no_lane", message="taken", retryable=True)
    instructions = conductor.returned(message, 0)
    assert [each for each in instructions if isinstance(each, TryLanes)] == [TryLanes(0.5)]
    assert frames(conductor.dispatch(0)) == [(1, 0, (), Flag.CLOSE)]
    assert kinds(conductor.try_lanes(S // 2)) == ["Started", "Dispatch"]


def test_a_request_that_came_during_a_loss_is_refused_in_time() -> None:
    conductor = connected(lost_wait_s=3.0)
    conductor.lost(StageLostError("gone"), 10 * S)
    conductor.open(request(), 11 * S)
    assert conductor.look(12 * S) == []
    events = [each.event for each in conductor.look(13 * S) if isinstance(each, Tell)]
    assert [type(event) for event in events] == [NotReadyError]
    assert conductor.availability.phase is Phase.UNREACHABLE
    with pytest.raises(NotReadyError):
        conductor.open(request(), 13 * S)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.ReturnResponse(epoch=1, samples=[pb.Sampled(session_id=1, position=3, token=100)]), ProtocolError),
        (pb.ReturnResponse(epoch=1, faults=[pb.SessionFault(label="stage_lost", message="m")]), StageLostError),
    ],
)
def test_a_bad_return_ends_the_epoch_and_no_request(message: pb.ReturnResponse, kind: type[RelaylineError]) -> None:
    conductor = connected()
    conductor.open(request(), 0)
    lost = [each.error for each in conductor.returned(message, 0) if isinstance(each, Lose)]
    assert [type(error) for error in lost] == [kind]
    assert len(conductor.readers) == 1


def test_a_bug_comes_with_its_traceback() -> None:
    conductor = connected()
    conductor.open(request(), 0)
    with mock.patch.object(conductor.scheduler, "take", side_effect=ZeroDivisionError("a bug")):
        log, lose = conductor.dispatch(0)
    assert isinstance(log, Log)
    assert isinstance(log.bug, ZeroDivisionError)
    assert isinstance(lose, Lose)


NEWER_OPTIONS = (
    dataclasses.replace(
        request(), sampling=SamplingParams(numbers=(("repetition_penalty", 1.3),), bad_words=((1, 2),))
    ),
    dataclasses.replace(request(), scores_prompt=True),
    dataclasses.replace(request(), sampling=SamplingParams(numbers=(("pooling", 3.0), ("ranked", 1.0)))),
)
OLDER = dataclasses.replace(FACTS, options=frozenset({"dry_multiplier", "pooling"}))


@pytest.mark.parametrize(
    ("asked", "names"),
    [*zip(NEWER_OPTIONS, ("bad_words, repetition_penalty", "prompt_logprobs", "ranked"), strict=True)],
)
def test_an_older_last_stage_gets_no_request_whose_options_it_would_pass_over(
    asked: GenerationRequest, names: str
) -> None:
    conductor = connected(OLDER)
    with pytest.raises(NotServedError, match=f"does not know {names}; upgrade"):
        conductor.open(asked, 0)
    assert conductor.dispatch(0) == []
    conductor.open(request(), 0)
    assert len(frames(conductor.dispatch(0))) == 2, "known lanes are served"


def test_a_stream_ends_when_an_older_last_stage_cannot_go_on_with_it() -> None:
    conductor = connected()
    asked, waiting, _ = NEWER_OPTIONS
    conductor.open(asked, 0)
    conductor.dispatch(0)
    conductor.open(dataclasses.replace(waiting, request_id="waits"), 0)
    conductor.lost(StageLostError("gone"), 0)
    conductor.begin_epoch()
    endings = [each for each in conductor.connected(OLDER, 0) if isinstance(each, Tell)]
    assert [(each.session_id, type(each.event)) for each in endings] == [(1, NotServedError), (2, NotServedError)]
    assert not conductor.admission.running


def test_identical_requests_share_a_stream_within_one_key_only() -> None:
    conductor = connected(share=True)

    def of(name: str) -> GenerationRequest:
        return dataclasses.replace(request(), tenant=Tenant(name))

    first = conductor.open(of("alice"), 1)[0]
    assert conductor.open(of("alice"), 2)[0].session_id == first.session_id
    assert not conductor.open(of("batch"), 3)[0].is_joined
    assert conductor.admission.of_tenants()["alice"] == (1, 0)


def test_a_key_that_comes_gets_the_next_lane() -> None:
    conductor = connected(share=False)
    n_lanes = conductor.admission.n_lanes
    names = ["batch"] * (n_lanes + 3) + ["alice"]
    opened = [
        conductor.open(dataclasses.replace(request(str(at)), tenant=Tenant(name)), 1)[0].session_id
        for at, name in enumerate(names)
    ]
    started = conductor.left(opened[0], 2)
    assert [each.session_id for each in started if isinstance(each, Started)] == [opened[-1]]


def test_a_key_that_may_run_more_streams_starts_those_that_waited() -> None:
    facts = dataclasses.replace(FACTS, n_lanes=4)
    conductor = connected(facts, share=False)

    def started(name: str, streams: int) -> list[int]:
        tenant = Tenant("batch", streams_max=streams)
        _, instructions = conductor.open(dataclasses.replace(request(name), tenant=tenant), 1)
        return [each.session_id for each in instructions if isinstance(each, Started)]

    assert [started("a", 1), started("b", 1), started("c", 1)] == [[1], [], []]
    assert started("d", 4) == [2, 3, 4]
