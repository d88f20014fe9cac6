"""Looks at the stages' steps: each step once, by number; gaps are reported; groups keep their number for life."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relayline.coordinator.observe.step_looks import (
    COLOURS,
    MEMBERS_MAX,
    MEMBERS_READ_MAX,
    NO_GROUP,
    STEPS_MAX,
    STEPS_PER_STAGE_MAX,
    Colours,
    StepLooks,
    steps_asked,
)
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

MS = 1_000_000


def batch(step: int, at_ms: float, sessions: Sequence[int], *, took_ms: float = 1, wait_ms: float = 0,
          position: int = 0, is_prefill: bool = False) -> pb.BatchRecord:  # fmt: skip
    members = [
        pb.BatchMember(session_id=each, position=position, n_rows=2 if is_prefill else 1, is_prefill=is_prefill,
                       wait_ns=round(wait_ms * MS))
        for each in sessions
    ]  # fmt: skip
    rows = sum(member.n_rows for member in members)
    return pb.BatchRecord(step=step, start_ns=round(at_ms * MS), decode_ns=round(took_ms * MS), n_rows=rows,
                          close_reason="drained", members=members)  # fmt: skip


def response_of(*batches: pb.BatchRecord, instance: str = "a") -> pb.BatchesResponse:
    return pb.BatchesResponse(instance_id=instance, batches=batches)


def numbers(steps: Sequence[Sequence[object]]) -> list[tuple[object, object]]:
    return [(step[0], step[1]) for step in steps]


def test_a_step_is_shown_in_one_look_and_asked_for_once() -> None:
    looks = StepLooks(0)
    assert looks.after(0, "a") == 0
    first = looks.look([response_of(batch(1, 10, [5]), batch(2, 12, [6])), response_of(batch(1, 11.5, [5]))], 20 * MS)
    assert numbers(first.steps) == [(0, 1), (1, 1), (0, 2)], "in order of time"
    assert (first.from_us, first.to_us, first.n_skipped) == (0, 20_000, 0)
    assert looks.after(0, "a") == 2
    assert looks.after(1, "a") == 1
    assert looks.after(0, "b") == 0, "a restarted stage counts from one"
    second = looks.look([response_of(batch(3, 21, [5])), None], 30 * MS)
    assert numbers(second.steps) == [(0, 3)]
    assert (second.from_us, second.to_us) == (20_000, 30_000)
    assert looks.after(1, "a") == 1, "no answer forgets nothing"
    # A step ended while one look was on its way, so only the next look has it.
    third = looks.look([response_of(batch(4, 25, [5], took_ms=4)), response_of(batch(2, 26, [5]))], 40 * MS)
    assert numbers(third.steps) == [(0, 4), (1, 2)]
    assert third.n_skipped == 0


def test_skipped_steps_are_counted_and_shown_for_no_stage() -> None:
    looks = StepLooks(0)
    looks.look([response_of(batch(1, 1, [5])), response_of(batch(1, 2, [5]))], 3 * MS)
    # Steps 2 to 9 of stage 0 were too many: nothing before its step 10 is shown, for stage 1 either.
    found = looks.look([response_of(batch(10, 50, [5])), response_of(batch(2, 5, [5]), batch(3, 52, [5]))], 60 * MS)
    assert numbers(found.steps) == [(0, 10), (1, 3)]
    assert found.n_skipped == 8 + 1
    assert found.from_us == 50_000


def test_a_step_has_its_times_rows_and_members() -> None:
    looks = StepLooks(1 * MS)
    record = pb.BatchRecord(
        step=7, start_ns=3 * MS, decode_ns=2 * MS, predicted_ns=MS, n_rows=3, padded_rows=1, close_reason="row_cap",
        queued_rows_before=9, queued_rows_after=6, bytes_out=12,
        members=[pb.BatchMember(session_id=50, n_rows=1, wait_ns=4_000),
                 pb.BatchMember(session_id=60, n_rows=2, is_prefill=True, wait_ns=7_000)],
    )  # fmt: skip
    looks.look([response_of(batch(6, 1, []))], 2 * MS)
    found = looks.look([response_of(record)], 6 * MS)
    assert found.steps == [[0, 7, 2_000, 2_000, 3, 1, 0, "row_cap", 7, 1_000, 9, 6, 12, 2, [1, 1, 2, -2], 0]]
    assert found.streams == {1: 50, 2: 60}
    again = looks.look([response_of(batch(8, 7, [60]))], 8 * MS)
    assert again.streams == {2: 60}, "a stream keeps its number"


def test_rows_that_the_last_stage_sent_back_are_counted_on_the_first() -> None:
    sent_at = ((0, 0, 7), (5, 6, 7), (0, 0, 0))
    for taken_ns, wanted in ((9, [2, 0, 3, 0]), (0, [0] * 4)):  # a stage of before states neither time
        records = [
            pb.BatchRecord(
                step=step, start_ns=step * MS, decode_ns=MS, taken_ns=taken_ns,
                members=[pb.BatchMember(session_id=at, n_rows=1, sent_ns=sent_ns) for at, sent_ns in enumerate(each)],
            )
            for step, each in enumerate(sent_at, start=1)
        ]  # fmt: skip
        found = StepLooks(0).look([response_of(*records), response_of(records[0])], 9 * MS)
        steps = sorted(found.steps, key=lambda step: (step[0], step[1]))
        assert [step[15] for step in steps] == [wanted[0], wanted[1], wanted[2], 0]


def test_members_are_named_up_to_a_bound() -> None:
    found = StepLooks(0).look([response_of(batch(1, 1, range(1, MEMBERS_MAX + 9)))], 2 * MS)
    (step,) = found.steps
    assert step[13] == MEMBERS_MAX + 8
    assert len(step[14]) == 2 * MEMBERS_MAX  # type: ignore[arg-type]


def test_a_stage_that_sends_more_than_it_was_asked_for_is_cut_off() -> None:
    many = [batch(step, step, range(1, 3 * MEMBERS_READ_MAX)) for step in range(1, 2 * STEPS_PER_STAGE_MAX)]
    found = StepLooks(0).look([response_of(*many)], 1000 * MS)
    assert len(found.steps) == STEPS_PER_STAGE_MAX
    assert found.steps[-1][1] == 2 * STEPS_PER_STAGE_MAX - 1, "the newest"
    assert found.n_skipped == STEPS_PER_STAGE_MAX - 1
    assert found.steps[0][13] == 3 * MEMBERS_READ_MAX - 1


def test_overlap_wait_and_hop_come_from_the_steps_shown() -> None:
    looks = StepLooks(0)
    first = [batch(1, 0, [5], took_ms=10, position=3), batch(2, 10, [6], took_ms=10, position=4)]
    second = [batch(1, 12, [5], took_ms=8, wait_ms=1, position=3)]
    found = looks.look([response_of(*first), response_of(*second)], 20 * MS)
    assert found.overlap["2+"] == pytest.approx(0.4)
    assert [stage.wait_p50_ms for stage in found.stages] == [0.0, 1.0]
    assert [stage.hop_ms for stage in found.stages] == [None, 1.0], "ended at 10, there at 11"
    assert looks.look([response_of(), None], 30 * MS).overlap == {}


def test_two_groups_have_two_numbers_on_both_stages() -> None:
    looks = StepLooks(0)
    stage0 = [batch(n, 10 * n, [1, 2] if n % 2 else [3, 4]) for n in range(1, 7)]
    stage1 = [batch(n, 10 * n + 5, [1, 2] if n % 2 else [3, 4]) for n in range(1, 7)]
    steps = looks.look([response_of(*stage0), response_of(*stage1)], 100 * MS).steps
    by_stage = [[step[6] for step in steps if step[0] == stage] for stage in (0, 1)]
    assert by_stage == [[0, 1] * 3] * 2


def test_a_group_keeps_its_number_while_it_changes_and_a_divided_one_gets_another() -> None:
    colours = Colours()
    assert colours.flight(frozenset({1, 2, 3, 4})) == 0
    assert colours.flight(frozenset({1, 2, 3, 5})) == 0, "one left, one came"
    assert colours.flight(frozenset({1, 2})) == 0
    assert colours.flight(frozenset({3, 5})) == 1, "divided: the flight before had none of these"
    assert colours.flight(frozenset({1, 2})) == 0
    assert colours.flight(frozenset({1, 2, 3, 5})) == 0, "and together again"
    assert colours.flight(frozenset()) == NO_GROUP
    assert colours.known(frozenset({9})) == NO_GROUP
    colours.keep([3])
    assert colours.known(frozenset({1, 2})) == NO_GROUP
    assert colours.known(frozenset({3, 9})) == 0


def test_numbers_of_groups_are_bounded() -> None:
    colours = Colours()
    assert {colours.flight(frozenset({session})) for session in range(5 * COLOURS)} == set(range(COLOURS))


def test_a_prompt_alone_is_no_group() -> None:
    (step,) = StepLooks(0).look([response_of(batch(1, 1, [5], is_prefill=True))], 2 * MS).steps
    assert step[6] == NO_GROUP


@pytest.mark.parametrize("n_stages", [0, 1, 2, 4, 5, 64, 128])
def test_a_look_is_bounded_over_all_stages(n_stages: int) -> None:
    assert 1 <= steps_asked(n_stages) <= STEPS_PER_STAGE_MAX
    assert n_stages * steps_asked(n_stages) <= STEPS_MAX
