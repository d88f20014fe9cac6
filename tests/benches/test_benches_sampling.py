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
    monkeypatch.setattr(FilteredDraws, "_is_behind", lambda *_: False)
    monkeypatch.setattr(FilteredDraws, "_is_kept", lambda *_: True)
    assert sampling.exactness(700, 40)[1] > 0


def test_no_pick_differs_in_a_vocabulary_of_blocks() -> None:
    n_compared, n_wrong = sampling.exactness(BLOCKS_FROM + 100, 60)
    assert n_wrong == 0
    assert n_compared > 40
