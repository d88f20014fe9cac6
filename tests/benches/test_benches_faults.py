"""How the bench of faults judges answers, and where it puts its figures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from benches.faults import CASES, Case, Progress, Row, kept, misses, pause_s, requests_of, row_of
from benches.tables import RESULTS
from relayline.deploy.cli.load import Request

S = 1_000_000_000


def answer(prompt_index: int, *tokens: int, n_tokens: int = 3, error: str = "", **fields: Any) -> Request:
    times_ns = [(at + 1) * S for at in range(len(tokens))]
    return Request(prompt_index, n_tokens, 0, list(tokens), times_ns, error, fields=fields)


ALONE = [answer(0, 1, 2, 3), answer(1, 4, 5, 6)]


def test_equal_is_every_token_and_complete_is_all_of_them_without_an_error() -> None:
    row = row_of("greedy", 2, [answer(0, 1, 2, 3), answer(1, 4, 9, 6), answer(0, 1, 2, error="cut")], ALONE)
    assert (row.n_streams, row.n_complete, row.n_equal) == (3, 2, 1)
    assert (row.parted_at, row.errors) == ((1,), ("cut",))
    assert row_of("greedy", 0, [answer(1, 4, 5)], ALONE).errors == ("2 tokens",)


def test_an_answer_that_a_grammar_ends_may_be_shorter_and_must_be_the_same() -> None:
    alone = [answer(0, 7, guided_regex="x")]
    row = row_of("bound", 1, [answer(0, 7, guided_regex="x"), answer(0, 7, 8, guided_regex="x")], alone)
    assert (row.n_complete, row.n_equal, row.parted_at) == (2, 1, (1,))
    assert row_of("bound", 1, [answer(0, guided_regex="x")], alone).n_complete == 0


def test_a_pause_counts_from_the_request_on() -> None:
    request = answer(0, 1, 2, 3)
    assert pause_s(request) == 1
    request.token_ns = [9 * S, 10 * S, 12 * S]
    assert pause_s(request) == 9
    assert pause_s(answer(0)) == 0


@pytest.mark.parametrize(
    ("n_complete", "n_equal", "says"), [(200, 199, []), (200, 198, ["the goal is 99.5 %"]), (199, 199, ["199 of 200"])]
)
def test_goals(n_complete: int, n_equal: int, says: list[str]) -> None:
    found = misses([Row("greedy", 9, 200, n_complete, n_equal, 1.0, (), ("cut",))])
    assert len(found) == len(says)
    assert all(words in line for words, line in zip(says, found, strict=True))


def test_each_round_asks_the_same_with_a_seed_where_tokens_are_drawn() -> None:
    for case in CASES.values():
        one, other = requests_of(case, 3), requests_of(case, 3)
        assert one == other
        seeds = [request.fields.get("seed") for request in one]
        assert seeds == ([1, 2, 3] if case.fields["temperature"] else [None] * 3)
    assert requests_of(Case("", {"temperature": 0}, 1.0), 1)[0].fields == {"temperature": 0}


async def test_progress_tells_when_so_many_tokens_have_come() -> None:
    progress = Progress(2)
    progress.came(ALONE[0])
    assert not progress.reached.is_set()
    progress.came(ALONE[1])
    async with asyncio.timeout(60):
        await progress.reached.wait()


def test_figures_take_the_place_of_those_of_their_case_and_of_no_other() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "greedy_killed", "label": "a", "values": [1, 2, 3, 4]},
        {"label": "by hand", "values": [None]},
    ]
    measured = {"command": "c", "rows": rows}
    fresh = [Row("greedy", 9, 144, 144, 143, 7.5, (1,), ()), Row("greedy", 0, 16, 16, 16, 0.5, (), ())]
    found = kept(measured, fresh, "abc", "2026-11-27")
    figures = {"values": [9, 144, 144, 143], "longest pause": "7.5 s", "measured": "2026-11-27, abc"}
    crowd = {
        "id": "greedy_crowd",
        "label": "in a crowd, nothing killed: greedy",
        "seen with": "`python -m benches.faults`",
        "values": [None, 16, 16, 16],
        "longest pause": "0.5 s",
        "measured": "2026-11-27, abc",
    }
    assert found["rows"] == [rows[0] | figures, rows[1], crowd], "a new one comes last"
    assert found["command"] == "c"
    assert dataclasses.asdict(fresh[0])["n_kills"] == 9


def test_no_two_rows_have_the_same_label() -> None:
    measured = json.loads((RESULTS / "faults.json").read_text())
    assert kept(measured, [], "abc", "2026-11-27") == measured
    by_hand = {"label": "stage killed: greedy", "values": [None]}
    with pytest.raises(SystemExit, match="two rows are labelled 'stage killed: greedy'; give each its own label"):
        kept({"rows": [by_hand]}, [Row("greedy", 9, 144, 144, 143, 7.5, (1,), ())], "abc", "2026-11-27")
