"""Requests that crash the pipeline are counted, tried alone and given up. The innocent ones only wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import Session
from relayline.coordinator.sessions.suspects import FURTHER_ROWS, LOSSES_ALONE, LOSSES_MAX, Suspects
from relayline.wire.common.errors import NotReadyError, RelaylineError, StageLostError, UnauthenticatedError


def sessions(n: int) -> list[Session]:
    return [
        Session(at, GenerationRequest(str(at), (1, 2), 4, SamplingParams()), lambda _: False) for at in range(1, n + 1)
    ]


def lose(suspects: Suspects, running: list[Session], n_times: int = 1) -> list[Session]:
    guilty: list[Session] = []
    for _ in range(n_times):
        guilty = lost(suspects, running)
        suspects.starting(running)
    return guilty


def lost(suspects: Suspects, running: list[Session]) -> list[Session]:
    return suspects.accuse(suspects.paused(running))


def test_all_start_again_after_one_loss() -> None:
    suspects, running = Suspects(), sessions(3)
    assert suspects.starting(running) == running
    assert lost(suspects, running) == []
    assert suspects.starting(running) == running


def test_after_a_second_loss_suspects_start_one_by_one() -> None:
    suspects, running = Suspects(), sessions(3)
    lost(suspects, running)
    suspects.starting(running)
    assert lost(suspects, running) == []
    assert suspects.starting(running) == running[:1]
    assert suspects.cleared(running[0]) == running[1:2], "it has got a token"
    assert suspects.cleared(running[0]) == [], "and more of them"
    assert suspects.cleared(running[1]) == running[2:], "its client has left"
    assert suspects.cleared(running[2]) == []


def test_only_the_request_that_crashes_a_stage_alone_is_given_up() -> None:
    suspects, running = Suspects(), sessions(3)
    lose(suspects, running, LOSSES_ALONE)
    suspects.cleared(running[0])
    assert lost(suspects, running) == [running[1]]
    assert suspects.starting([running[0], running[2]]) == [running[0], running[2]]


def test_a_token_clears_and_those_that_come_later_are_no_suspects() -> None:
    suspects, (old, new) = Suspects(), sessions(2)
    for _ in range(10 * LOSSES_MAX):
        assert lost(suspects, [old]) == []
        assert suspects.starting([old, new]) == [old, new]
        suspects.cleared(old)
    lose(suspects, [old], LOSSES_ALONE)
    assert suspects.starting([old, new]) == [new, old]


def test_broken_connections_accuse_nobody_and_clear_nobody() -> None:
    suspects, running = Suspects(), sessions(2)
    for _ in range(10 * LOSSES_MAX):
        assert suspects.paused(running) == running
        assert suspects.starting(running) == running
        assert suspects.trusted(running) == running
    lose(suspects, running, LOSSES_ALONE)
    assert suspects.paused(running) == running[:1], "the other one waits for its turn"
    assert suspects.starting(running) == running[:1]
    assert lost(suspects, running) == running[:1]


@pytest.mark.parametrize(
    ("error", "n_guilty"),
    [
        (NotReadyError("stage 1 was told to end"), 0),
        (UnauthenticatedError("its credential is revoked"), 0),
        (StageLostError("it is gone"), 2),
    ],
)
def test_stages_that_are_restarted_in_order_accuse_nobody(error: RelaylineError, n_guilty: int) -> None:
    """All stages one after the other, as in an update, before any stream gets a token in between."""
    suspects, running = Suspects(), sessions(2)
    guilty: list[Session] = []
    for turn in range(LOSSES_MAX + 1):
        guilty += [session for session, _ in suspects.guilty(dict(enumerate(running, 1)), (str(turn),))]
        for session in suspects.starting(running):
            suspects.lost([session], error)
        suspects.lost(running, error)
    assert len(guilty) == n_guilty


def test_a_session_queued_during_a_pause_had_not_been_started() -> None:
    suspects, (tried, next_in_line) = Suspects(), sessions(2)
    lose(suspects, [tried, next_in_line], LOSSES_ALONE)
    ran = suspects.paused([tried, next_in_line])
    suspects.cleared(tried)  # its client leaves before the stages are back
    assert ran == [tried]
    assert suspects.starting([next_in_line]) == [next_in_line]


def test_one_that_leaves_the_line_is_not_started() -> None:
    suspects, running = Suspects(), sessions(3)
    lose(suspects, running, LOSSES_ALONE)
    assert suspects.cleared(running[1]) == []
    assert suspects.cleared(running[0]) == [running[2]]


def test_a_suspect_that_gets_a_lane_again_waits_for_its_turn() -> None:
    suspects, (tried, moved, other) = Suspects(), sessions(3)
    lose(suspects, [tried, moved], LOSSES_ALONE)
    assert suspects.starting([tried]) == [tried], "there are fewer lanes now"
    assert suspects.joining(other) == [other], "it was there at no loss"
    assert suspects.joining(moved) == []
    assert suspects.cleared(tried) == [moved]
    assert suspects.cleared(moved) == []


def test_a_suspect_that_waits_for_a_lane_again_lets_the_next_one_try_and_stays_a_suspect() -> None:
    suspects, (first, second) = Suspects(), sessions(2)
    lose(suspects, [first, second], LOSSES_ALONE)
    assert suspects.gave_way(second) == [], "it is not the one that is tried"
    assert suspects.gave_way(first) == [second]
    assert suspects.joining(first) == []
    assert suspects.cleared(second) == [first]


def test_a_suspect_that_gets_a_lane_again_is_tried_at_once_when_no_other_is() -> None:
    suspects, (first, second) = Suspects(), sessions(2)
    lose(suspects, [first, second], LOSSES_ALONE)
    assert suspects.starting([]) == []
    assert suspects.joining(first) == [first]
    assert suspects.joining(second) == []
    assert suspects.starting([first, second]) == [first], "a new epoch begins with an empty line"
    assert suspects.cleared(first) == [second]
    assert suspects.cleared(second) == []


@given(st.integers(1, 8), st.data())
def test_nobody_waits_for_ever_and_losses_are_bounded(n: int, data: st.DataObject) -> None:
    """Some bring the pipeline down whenever they run; everybody else gets a token when they run."""
    running = sessions(n)
    poison = data.draw(st.sets(st.sampled_from(range(1, n + 1))))
    suspects, n_lost, ended = Suspects(), 0, set()
    while running:
        started = suspects.starting(running)
        abandoned: list[Session] = []
        while started and not abandoned:
            if any(session.session_id in poison for session in started):
                n_lost += 1
                abandoned = lost(suspects, running)
                assert {session.session_id for session in abandoned} <= poison, "an innocent was given up"
                break
            following: list[Session] = []
            for session in started:
                running.remove(session)
                ended.add(session.session_id)
                following += suspects.cleared(session)
            started = following
        for session in abandoned:
            running.remove(session)
            ended.add(session.session_id)
            assert suspects.cleared(session) == []
        assert n_lost <= LOSSES_MAX * max(1, len(poison))
    assert ended == set(range(1, n + 1))
    assert not suspects._losses
    assert not suspects._line


def test_a_prompt_that_gets_further_each_time_is_not_given_up() -> None:
    suspects, (reading, other) = Suspects(), sessions(2)
    n_rows = 0
    for _ in range(10):
        n_rows += FURTHER_ROWS
        assert suspects.passed(reading.session_id, n_rows) == []
        assert lost(suspects, [reading]) == []
        assert suspects.starting([reading]) == [reading]
        assert suspects.trusted([reading]) == [reading]
    assert suspects.passed(reading.session_id, n_rows + FURTHER_ROWS - 1) == []
    assert lost(suspects, [reading]) == [], "for the second time, at about the same row"
    assert suspects.starting([reading, other]) == [other, reading], "alone of the suspects"
    assert suspects.trusted([reading]) == []
    assert lose(suspects, [reading]) == [reading]


def test_a_suspect_that_gets_further_lets_the_next_one_try() -> None:
    suspects, running = Suspects(), sessions(3)
    lose(suspects, running, LOSSES_ALONE)
    assert suspects.passed(running[0].session_id, FURTHER_ROWS - 1) == []
    assert suspects.passed(running[0].session_id, FURTHER_ROWS) == running[1:2]
    assert suspects.passed(running[0].session_id, 2 * FURTHER_ROWS) == [], "once"
    assert suspects.cleared(running[0]) == []
    assert suspects.passed(running[1].session_id, FURTHER_ROWS) == running[2:]


def test_nothing_is_kept_of_sessions_that_have_a_token_or_have_ended() -> None:
    suspects, running = Suspects(), sessions(3)
    for session in running:
        suspects.passed(session.session_id, 5)
    lose(suspects, running)
    for session in running:
        suspects.cleared(session)
    assert not suspects._losses
    assert not suspects._passed
    assert not suspects._then


def test_a_follower_of_a_leader_with_progress_is_not_given_up() -> None:
    suspects, (leader, follower, other) = Suspects(), sessions(3)
    follower.leader = leader
    n_rows = 0
    for _ in range(3 * LOSSES_MAX):
        n_rows += FURTHER_ROWS
        suspects.passed(leader.session_id, n_rows)
        assert lost(suspects, [leader, follower]) == []
        assert suspects.starting([leader, follower]) == [leader, follower]
    follower.leader = other
    assert lost(suspects, [leader, follower, other]) == []
    suspects.cleared(leader)
    follower.leader = None
    assert suspects.passed(follower.session_id, FURTHER_ROWS) == [], "it reads by itself now, from its beginning"
    assert lost(suspects, [follower]) == []
    assert suspects.trusted([follower]) == [follower]


def test_a_follower_of_a_leader_without_progress_is_a_suspect_too() -> None:
    """Its open may be what crashes a stage."""
    suspects, (leader, follower) = Suspects(), sessions(2)
    follower.leader = leader
    suspects.passed(leader.session_id, FURTHER_ROWS)
    lose(suspects, [leader, follower], LOSSES_ALONE)
    assert lost(suspects, [leader]) == [leader]
    assert suspects.starting([follower]) == [follower]
    assert lost(suspects, [follower]) == [follower]
