"""The bench of reading prompts alone: its results from the speeds of the rounds, and answers that fail."""

from __future__ import annotations

from typing import Any

import pytest

from benches import reading, tables
from relayline.deploy.cli import load
from relayline.deploy.cli.load import Request, Target


def test_the_table_has_the_medians_of_the_rounds_and_their_ratio() -> None:
    found = {"ours": {256: [100.0, 140.0, 120.0], 4_000: [90.0]}, "unsplit": {256: [60.0], 4_000: [100.0]}}
    table = reading.table_of(found, "toy Q4_0", 2, (1, 2))
    assert table["columns"] == ["256", "4,000"]
    assert [row["label"] for row in table["rows"]] == [
        "two stages of one thread", "unsplit `llama-server`, two threads", "ratio"
    ]  # fmt: skip
    assert [list(values) for values in tables.values_of(table)] == [[120.0, 90.0], [60.0, 100.0], [2.0, 0.9]]
    assert table["rows"][2]["goal"] == "1 at 256 to 8,000"
    one = reading.table_of(found, "toy Q4_0", 1, (2, 2))["rows"]
    assert (one[0]["label"], "goal" in one[2]) == ("one stage of two threads", False)


def test_the_page_has_a_table_of_this_form() -> None:
    page = tables.load("reading")
    lengths = [int(each.replace(",", "")) for each in page["columns"]]
    assert lengths == list(reading.PROMPTS)
    found = {name: {n_tokens: [1.0] for n_tokens in lengths} for name in ("ours", "unsplit")}
    made = reading.table_of(found, "llama-1b Q4_0", 2, (1, 2))
    for row, of_page in zip(made["rows"], page["rows"], strict=True):
        assert {key: row[key] for key in row if key != "values"} == {
            key: of_page[key] for key in of_page if key != "values"
        }


async def test_a_prompt_without_an_answer_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_session: Any, _target: Target, _prompt: Any, request: Request) -> Request:
        request.error = "HTTP 500"
        return request

    monkeypatch.setattr(load, "complete", fails)
    with pytest.raises(RuntimeError, match="a prompt of 3 tokens was not answered: HTTP 500"):
        await reading.read(Target("http://none", "openai"), [(1, 2, 3)], {})
