"""Where prompts stop for checkpoints of a recurrent state, and what may then be copied from which lane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from relayline.coordinator.sessions.checkpoints import STOP_TOKENS_MIN, stops_of
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams
from relayline.coordinator.sessions.prefixes import Prefixes
from relayline.coordinator.sessions.session import OutFrame, Session, State
from relayline.wire.common.checkpoints import CHECKPOINTS_PER_LANE_MAX
from relayline.wire.envelopes.frames import Flag

END = 9  # ends messages, and answers
SYSTEM = [*range(100, 150), END]
COPY = Flag.COPY_PREFIX


def session_of(session_id: int, tokens: Sequence[int], lane: int = 0, *, cache: bool = True) -> Session:
    request = GenerationRequest(str(session_id), tuple(tokens), 8, SamplingParams(), cache_prompt=cache)
    return Session(session_id, request, lambda token: token == END, lane=lane)


def world(running: dict[int, Session] | None = None, n_max: int = 2) -> Prefixes:
    found = Prefixes(n_max, itertools.count(1_000), lambda: [4, 5, 6], {} if running is None else running, END.__eq__)
    found.renew(8, is_per_lane=True, keeps_state=True)
    return found


def read(session: Session, rows_max: int = 512) -> list[tuple[int, int]]:
    """Send the whole prompt; return each chunk's end, and whether it leaves a checkpoint."""
    chunks = iter(lambda: session.next_chunk(rows_max), None)
    return [(chunk.position + len(chunk.tokens), chunk.flags & Flag.CHECKPOINT) for chunk in chunks if chunk]


def copies(frames: list[OutFrame]) -> list[tuple[int, int, int]]:
    """Of each copy: its target, its number of tokens, its source."""
    return [(f.session.session_id, f.position, f.argument) for f in frames if f.flags == COPY]


def answer(session: Session, tokens: Sequence[int]) -> None:
    session.state = State.DECODE
    session.history.extend(tokens)


def test_chunks_end_where_messages_do_and_before_the_last_token() -> None:
    session = session_of(1, [*SYSTEM, *range(200, 230), END, 7, 8])
    world().start(session)
    assert read(session) == [(51, Flag.CHECKPOINT), (82, Flag.CHECKPOINT), (84, 0)]
    assert session.checkpoints == [51, 82]
    long_end = session_of(1, [*SYSTEM, *range(200, 230), END, *range(300, 300 + STOP_TOKENS_MIN), 8])
    world().start(long_end)
    assert read(long_end)[2:] == [(82 + STOP_TOKENS_MIN, Flag.CHECKPOINT), (83 + STOP_TOKENS_MIN, 0)]
    short = session_of(2, range(10, 10 + STOP_TOKENS_MIN))
    world().start(short)
    assert read(short) == [(STOP_TOKENS_MIN, 0)], "short text is read again in no time"


def test_chunks_are_cut_by_rows_as_well() -> None:
    session = session_of(1, range(10, 110))
    world().start(session)
    assert read(session, 40) == [(40, 0), (80, 0), (99, Flag.CHECKPOINT), (100, 0)]


def test_nothing_stops_where_stages_rewind_or_nobody_copies() -> None:
    plain = Prefixes(2, itertools.count(1_000), lambda: [4], {})
    plain.renew(8, is_per_lane=True)
    for prefixes, session in (
        (plain, session_of(1, SYSTEM)),
        (world(n_max=0), session_of(2, SYSTEM)),
        (world(), session_of(3, SYSTEM, cache=False)),
    ):
        prefixes.start(session)
        assert read(session) == [(51, 0)]


def test_the_same_prompt_again_reads_its_last_token_alone() -> None:
    """Its end minus one is a checkpoint of the kept lane, whose own end is an answer later."""
    prefixes = world()
    first = session_of(1, SYSTEM)
    prefixes.start(first)
    read(first)
    answer(first, [70, 71, 72])
    first.state = State.DONE
    assert copies(prefixes.keep(first)) == [(1_000, 53, 1)]
    again = session_of(2, SYSTEM)
    assert copies(prefixes.start(again)) == [(2, 50, 1_000)]
    assert read(again) == [(51, 0)]
    assert again.checkpoints == [50]


def test_a_chats_turns_read_only_new_text() -> None:
    """Four turns: the template closes each answer, and the kept lane is copied whole."""
    prefixes, history, lane = world(), list(SYSTEM), itertools.count()
    for turn in range(4):
        history += [*range(200 + 40 * turn, 230 + 40 * turn), END, 7]
        session = session_of(turn + 1, history, next(lane))
        prefixes.start(session)
        n_new = 31 if turn else len(history)  # END of the answer before was sampled and never read
        assert len(history) - session.n_copied == n_new + (2 if turn else 0)
        read(session)
        assert len(session.checkpoints) <= CHECKPOINTS_PER_LANE_MAX
        assert session.checkpoints[0] == 51, "where the system prompt ends, for other chats"
        answer(session, [70, 71, END])
        session.state = State.DONE
        prefixes.keep(session)
        history = list(session.history)


def test_a_turn_whose_template_rewrites_the_answer_goes_on_from_the_last_message() -> None:
    """As with templates that leave out the reasoning."""
    prefixes = world()
    first = session_of(1, [*SYSTEM, *range(200, 230), END, 7])
    prefixes.start(first)
    read(first)
    answer(first, [60, 61, 62, 70, END])
    first.state = State.DONE
    prefixes.keep(first)
    following = session_of(2, [*SYSTEM, *range(200, 230), END, 8, 70, END, *range(300, 310), END, 7])
    assert copies(prefixes.start(following)) == [(2, 82, 1_000)]


def test_other_chats_copy_the_system_prompt() -> None:
    prefixes = world()
    first = session_of(1, [*SYSTEM, *range(200, 230), END, 7])
    prefixes.start(first)
    read(first)
    answer(first, [70, END])
    first.state = State.DONE
    prefixes.keep(first)
    other = session_of(2, [*SYSTEM, *range(200, 210), *range(400, 430), END, 7])
    assert copies(prefixes.start(other)) == [(2, 51, 1_000)]


def test_an_answer_cancelled_early_keeps_its_prompts_checkpoint() -> None:
    """A row of its last token may be under way: where the lane ends then is not known."""
    prefixes = world()
    first = session_of(1, SYSTEM)
    prefixes.start(first)
    read(first)
    answer(first, [70, 71])
    assert copies(prefixes.keep(first)) == [(1_000, 50, 1)]


def test_followers_make_their_leader_stop_where_they_cease_to_agree() -> None:
    running: dict[int, Session] = {}
    prefixes = world(running)
    leader, follower = session_of(1, range(10, 110)), session_of(2, [*range(10, 70), *range(500, 520)], 1)
    for session in (leader, follower):
        running[session.session_id] = session
        assert copies(prefixes.start(session)) == []
    assert follower.leader is leader
    assert read(leader, 40) == [(40, 0), (60, Flag.CHECKPOINT), (99, Flag.CHECKPOINT), (100, 0)]
    assert copies(follower.catch_up()) == [(2, 60, 1)]
    assert follower.checkpoints == [60]
    assert read(follower) == [(79, Flag.CHECKPOINT), (80, 0)]


def test_choices_of_one_request_copy_all_but_the_last_token() -> None:
    running: dict[int, Session] = {}
    prefixes = world(running)
    sessions = [session_of(number, range(10, 110), number) for number in range(1, 4)]
    for session in sessions:
        running[session.session_id] = session
        prefixes.start(session)
    read(sessions[0])
    for session in sessions[1:]:
        assert copies(session.catch_up()) == [(session.session_id, 99, 1)]
        assert read(session) == [(100, 0)]


def test_of_a_running_answer_only_checkpoints_count() -> None:
    """Its lane's end moves on before a copy would come."""
    running: dict[int, Session] = {}
    prefixes = world(running)
    first = running[1] = session_of(1, range(10, 110))
    prefixes.start(first)
    read(first)
    answer(first, range(300, 320))
    for n_common, n_copied in ((115, 99), (99, 99), (80, 0)):
        other = session_of(2, [*first.history[:n_common], 900, 901], 1)
        assert copies(prefixes.start(other)) == ([(2, n_copied, 1)] if n_copied else [])


@pytest.mark.parametrize(("there", "n_trimmed"), [(105, 99), (99, 99), (98, 0), (0, 0)])
def test_an_epoch_later_it_goes_on_from_a_checkpoint(there: int, n_trimmed: int) -> None:
    """Stages may hold different numbers of rows of an answer; all have the checkpoint before it."""
    prefixes = world()
    session = session_of(1, range(10, 110))
    prefixes.start(session)
    read(session)
    answer(session, range(300, 310))
    prefixes.renew(8, is_per_lane=True, left_rows={1: there}, keeps_state=True)
    frames = prefixes.start(session)
    assert [frame.position for frame in frames if frame.flags == Flag.TRIM] == ([n_trimmed] if n_trimmed else [])
    assert session.n_sent == n_trimmed
    assert read(session)[-1] == (110, 0)


def test_marks_are_bounded_where_many_follow() -> None:
    running: dict[int, Session] = {}
    prefixes = world(running)
    leader = running[1] = session_of(1, range(10, 610))
    prefixes.start(leader)
    for number in range(20):
        follower = session_of(2 + number, [*range(10, 60 + 20 * number), 9_000 + number, 1, 2], 1)
        running[follower.session_id] = follower
        prefixes.start(follower)
    assert len(leader.stops) <= CHECKPOINTS_PER_LANE_MAX


def test_searching_long_prompts_for_messages_is_bounded() -> None:
    session = session_of(1, [5] * 1_000_000)
    seen: list[int] = []
    assert stops_of(session, lambda token: bool(seen.append(token))) == [999_999]
    assert len(seen) < 70_000
