"""Grants: what the stages would do by themselves does not leave, everything else does, and no sample counts early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relayline.coordinator.schedule.grants import SIT_OUT_MAX, Grants
from relayline.coordinator.sessions.drafts import Acceptance
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.session import OutFrame, Session
from relayline.wire.envelopes.frames import Flag, grant_of
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

N_STEPS, MAX_TOKENS = 4, 40
PROMPT = (1, 2, 3)


def new_session(session_id: int = 1, max_tokens: int = MAX_TOKENS, sampling: SamplingParams | None = None) -> Session:
    request = GenerationRequest(str(session_id), PROMPT, max_tokens, sampling or SamplingParams(temperature=0.0))
    return Session(session_id, request, lambda _: False)


def row(session: Session, position: int = 3, flags: int = Flag.WANTS_SAMPLE) -> OutFrame:
    return OutFrame(session, position, (7,), flags)


def granting(n_steps: int = N_STEPS) -> Grants:
    grants = Grants(n_steps)
    grants.connected(5, takes_back=True)
    grants.feeds_back(5)
    return grants


def leave(grants: Grants, *frames: OutFrame, is_calm: bool = True) -> tuple[Frame, ...]:
    return grants.leave(frames, is_calm=is_calm)


def sample(frame: Frame, position: int) -> pb.Sampled:
    number, _ = grant_of(frame.argument)
    return pb.Sampled(session_id=frame.session_id, position=position, token=7, grant=number)


def test_rows_of_a_grant_do_not_leave_until_it_ends() -> None:
    grants, session = granting(), new_session()
    (first,) = leave(grants, row(session))
    number, limit = grant_of(first.argument)
    assert number > 0
    assert limit == 4 + N_STEPS
    for position in range(4, limit):
        assert grants.takes(sample(first, position))
        assert leave(grants, row(session, position), is_calm=False) == ()
    assert grants.n_granted == N_STEPS
    (after,) = leave(grants, row(session, limit), is_calm=False)
    assert (after.position, after.argument) == (limit, 0)
    assert grants.n_repeated == 0


def test_a_grant_is_extended_half_way() -> None:
    grants, session = granting(), new_session()
    (first,) = leave(grants, row(session))
    assert leave(grants, row(session, 4)) == ()
    (extension,) = leave(grants, row(session, 5))
    assert extension.flags == Flag.EXTEND
    assert grant_of(extension.argument) == (grant_of(first.argument)[0], 6 + N_STEPS)
    assert leave(grants, row(session, 6)) == ()


def test_no_row_behind_the_last_token_is_granted() -> None:
    grants, session = granting(n_steps=64), new_session(max_tokens=3)
    (first,) = leave(grants, row(session))
    assert grant_of(first.argument)[1] == 5, "tokens 3, 4 and 5; the last one's row is never computed"
    assert leave(grants, row(session, 4)) == ()
    (last,) = leave(granting(), row(new_session(max_tokens=2), 4))
    assert last.argument == 0


@pytest.mark.parametrize("broken", ["position", "flags", "tokens"])
def test_other_rows_end_a_grant(broken: str) -> None:
    grants, session = granting(), new_session()
    (first,) = leave(grants, row(session))
    other = row(session, 4)
    if broken == "position":
        other.position = 3
    elif broken == "flags":
        other.flags |= Flag.DRAFTED
    else:
        other.tokens, other.flags = (7, 8), Flag.WANTS_SAMPLE | Flag.DRAFTED
    (sent,) = leave(grants, other)
    assert (sent.position, sent.argument) == (other.position, 0)
    assert not grants.takes(sample(first, 4)), "its row will be computed again"
    assert grants.n_repeated == 1


def test_a_group_that_changes_leaves_whole() -> None:
    grants, (one, two, three) = granting(), [new_session(number) for number in (1, 2, 3)]
    leave(grants, row(one), row(two))
    assert leave(grants, row(one, 4), row(two, 4)) == ()
    assert [frame.session_id for frame in leave(grants, row(one, 5), row(two, 5), row(three))] == [1, 2, 3]


def test_a_stream_that_ended_leaves_its_group_alone() -> None:
    grants, one, two = granting(), new_session(1), new_session(2)
    leave(grants, row(one), row(two))
    grants.forget(2)
    (close,) = leave(grants, OutFrame(two, 0, (), Flag.CLOSE), row(one, 4))
    assert close.flags == Flag.CLOSE


def test_rows_of_two_groups_are_not_taken_for_one() -> None:
    grants, one, two = granting(), new_session(1), new_session(2)
    leave(grants, row(one))
    leave(grants, row(two))
    assert len(leave(grants, row(one, 4), row(two, 4))) == 2


def test_early_samples_wait_for_their_rows() -> None:
    grants, session = granting(), new_session()
    (first,) = leave(grants, row(session))
    assert grants.takes(sample(first, 4))
    assert not grants.takes(sample(first, 5)), "row 4 was not decided"
    assert not grants.takes(sample(first, 6))
    assert not grants.takes(sample(first, 6)), "an echo"
    assert grants.due() == []
    assert leave(grants, row(session, 4)) == ()
    assert [each.position for each in grants.due()] == [5]
    assert leave(grants, row(session, 5), is_calm=False) == ()
    assert [each.position for each in grants.due()] == [6]
    assert grants.due() == []


def test_samples_without_a_grant_count() -> None:
    grants = granting()
    assert grants.takes(pb.Sampled(session_id=1, position=4, token=7))


def test_wrong_grants_make_way_for_a_while() -> None:
    grants, session = granting(), new_session(max_tokens=1_000)
    n_without: list[int] = []
    position = 3
    for _ in range(8):
        count = 0
        while not leave(grants, row(session, position))[0].argument:
            count += 1
        n_without.append(count)
    assert n_without == [0, 2, 4, 8, 16, 32, SIT_OUT_MAX, SIT_OUT_MAX]


def looking_back() -> Sequence[SamplingParams]:
    return [SamplingParams(grammar="root ::= 'a'"), SamplingParams(frequency_penalty=1.0)]


@pytest.mark.parametrize("sampling", looking_back())
def test_samplers_with_a_state_are_not_granted(sampling: SamplingParams) -> None:
    (sent,) = leave(granting(), row(new_session(sampling=sampling)))
    assert sent.argument == 0


def test_streams_with_drafts_are_not_granted() -> None:
    session = new_session()
    session.acceptance = Acceptance()
    assert leave(granting(), row(session))[0].argument == 0


def test_nothing_is_granted_while_prompts_are_read() -> None:
    assert leave(granting(), row(new_session()), is_calm=False)[0].argument == 0


@pytest.mark.parametrize("missing", ["steps", "epoch", "rewinds", "link"])
def test_nothing_is_granted_where_it_cannot_be(missing: str) -> None:
    grants = Grants(0 if missing == "steps" else N_STEPS)
    if missing != "link":
        grants.feeds_back(5)
    grants.connected(6 if missing == "epoch" else 5, takes_back=missing != "rewinds")
    assert leave(grants, row(new_session()))[0].argument == 0


def test_a_lost_epoch_ends_all_grants() -> None:
    grants, session = granting(), new_session()
    (first,) = leave(grants, row(session))
    grants.takes(sample(first, 4))
    grants.lost()
    grants.connected(6, takes_back=True)
    (sent,) = leave(grants, row(session, 4))
    assert sent.argument == 0, "before the last stage can send back"
    grants.feeds_back(6)
    assert leave(grants, row(session, 5))[0].argument


def pause_after(grants: Grants) -> int:
    """Let a grant be in vain, and return how many envelopes leave without one after it."""
    session, position, n_without = new_session(99, max_tokens=1_000), 3, 0
    while not leave(grants, row(session, position))[0].argument:
        pass
    leave(grants, row(session, position))
    while not leave(grants, row(session, position))[0].argument:
        n_without += 1
    grants.forget(99)
    return n_without + 1


@pytest.mark.parametrize("n_steps", [N_STEPS, 64])
def test_short_answers_lower_the_pause_after_wrong_grants(n_steps: int) -> None:
    """Their grants are never extended, since they end with the answer; yet all of their rows were of use."""
    grants = granting(n_steps)
    pauses = [pause_after(grants) for _ in range(4)]
    assert pauses == [2, 4, 8, 16]
    for number in range(1, 4):
        session = new_session(number, max_tokens=4)
        position = 3
        while not leave(grants, row(session, position))[0].argument:
            pass
        for position in (4, 5):
            assert leave(grants, row(session, position)) == ()
        grants.forget(number)
    assert pause_after(grants) == 4, "16, halved three times, and doubled by this one"
    assert grants.n_extended == 0


def test_grants_and_rows_in_vain_are_counted() -> None:
    grants, one, two = granting(), new_session(1), new_session(2)
    first, _ = leave(grants, row(one), row(two))
    assert leave(grants, row(one, 4), row(two, 4)) == ()
    assert leave(grants, row(one, 5), row(two, 5)) != (), "extensions of both"
    assert not grants.takes(sample(first, 7))
    figures = grants.figures()
    assert (figures["given"], figures["extended"], figures["rows"], figures["vain_rows"]) == (1, 1, 4, 0)
    leave(grants, row(one, 6), row(two, 6), row(new_session(3)))
    assert grants.n_vain == 1, "a sample that waited for its row"
    assert not grants.takes(sample(first, 8))
    figures = grants.figures()
    assert (figures["repeated"], figures["vain_rows"], figures["steps"]) == (1, 2, N_STEPS)
    assert not Grants(0).figures()["steps"]
