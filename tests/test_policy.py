from __future__ import annotations

import pytest

from stage.policy import PREFILL_BUDGET, QUEUE_DRAINED, ROW_CAP, DrainPolicy
from stage.queue_types import QueuedFrame
from tests.fakes import rows_frame
from wire.frames import Flag


def heads(*rows: int, first_order: int = 0) -> list[QueuedFrame]:
    """Heads of different sessions with these row counts, standing in line since `first_order`, one after another."""
    frames = [rows_frame(first_order + index, 0, n_rows, Flag.PREFILL) for index, n_rows in enumerate(rows)]
    for index, frame in enumerate(frames):
        frame.line_order = first_order + index
    return frames


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
    decoders, chunks = heads(*decode, first_order=100), heads(*prefill, first_order=0 if prefill_first else 1_000)
    choice = DrainPolicy(max_rows=16, prefill_rows=8).choose(decoders, chunks, 0)
    assert (choice.n_decode, choice.n_prefill, choice.close_reason) == expected
