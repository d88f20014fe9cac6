"""The bench of sampling: its reference notices a wrong token, and every token is compared."""

from __future__ import annotations

import pytest

from benches import sampling
from relayline.stage.sampling.draws import BLOCKS_FROM
from relayline.stage.sampling.filters import FilteredDraws


def test_every_option_is_timed_and_no_pick_differs() -> None:
    found = sampling.measure(700, 3, 40)
    assert [row["label"] for row in found["rows"]] == [*sampling.OPTIONS]  # type: ignore[attr-defined]
    exactness = found["exactness"]
    assert isinstance(exactness, dict)
    assert exactness["different"] == 0
    assert exactness["cases"] > 30


def test_a_filter_that_keeps_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilteredDraws, "kept", lambda _, token, *__, **___: token)
    assert sampling.exactness(700, 40)[1] > 0


def test_no_pick_differs_in_a_vocabulary_of_blocks() -> None:
    n_compared, n_wrong = sampling.exactness(BLOCKS_FROM + 100, 60)
    assert n_wrong == 0
    assert n_compared > 40


def test_steps_are_timed_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TOGETHER", (1, 3))
    found = sampling.measure_together(700, 1)
    rows = found["rows"]
    assert isinstance(rows, list)
    assert len(rows) == 2 * len(sampling.STEP_OPTIONS)
    assert {len(row["values"]) for row in rows} == {len(found["columns"])} == {4}  # type: ignore[arg-type]


def test_rows_on_a_device_are_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TOGETHER", (5,))
    rows = sampling.measure_on_device(BLOCKS_FROM, 1)["rows"]
    assert isinstance(rows, list)
    assert len(rows) == 12
    assert all(
        us > 0 and kb > 0 and 0 <= share <= 100 and n >= 1 for us, kb, share, n in (row["values"] for row in rows)
    )
    monkeypatch.setattr(sampling, "sample_rows", lambda asks: [None for _ in asks])
    with pytest.raises(RuntimeError, match="a row on the device said something else"):
        sampling.measure_on_device(BLOCKS_FROM, 1)


def test_a_step_that_says_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "sample_rows", lambda asks: [None for _ in asks])
    with pytest.raises(RuntimeError, match="said something else at position 0"):
        sampling.step_us(sampling.STEP_OPTIONS["top-k 40"], sampling.rows_of("wide", 700, 2), 1)
