from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayline.coordinator.model.cuts import STEP_SLACK, balanced_cuts, check_cuts, legal_cuts, ranges
from relayline.wire.common.errors import CutError


@dataclasses.dataclass(frozen=True)
class Facts:
    layer_bytes: tuple[int, ...]
    embedding_bytes: int = 0
    head_bytes: int = 0
    cut_period: int = 1
    forbidden_lengths: frozenset[int] = frozenset()
    windows: tuple[bool, ...] = ()
    indexers: tuple[bool, ...] = ()
    blocked: Mapping[int, str] = dataclasses.field(default_factory=dict)
    kinds: str = ""
    fills_kinds: bool = False
    needed: tuple[bool, ...] = ()

    @property
    def n_layers(self) -> int:
        return len(self.layer_bytes)


def step_bytes(facts: Facts, cuts: tuple[int, ...]) -> list[int]:
    sizes = [sum(facts.layer_bytes[start:end]) for start, end in ranges(facts.n_layers, cuts)]
    sizes[-1] += facts.head_bytes
    return sizes


def test_equal_layers() -> None:
    assert balanced_cuts(Facts((10,) * 12), 1) == ()
    assert balanced_cuts(Facts((10,) * 12), 3) == (4, 8)
    sizes = step_bytes(Facts((10,) * 16), balanced_cuts(Facts((10,) * 16), 3))
    assert sorted(sizes) == [50, 50, 60]


def test_head_weighs_on_the_last_stage() -> None:
    assert balanced_cuts(Facts((10,) * 12, head_bytes=40), 2) == (8,)


def test_embedding_moves_the_cut_when_that_is_free() -> None:
    """40 layers in 3 stages leave one layer to place; it goes where the embedding table is not."""
    facts = Facts((10,) * 40, embedding_bytes=100)
    cuts = balanced_cuts(facts, 3)
    assert max(step_bytes(facts, cuts)) == 140
    assert cuts[0] < 14


def test_uneven_layers() -> None:
    facts = Facts((1, 1, 1, 9, 9, 9))
    assert balanced_cuts(facts, 3) == (4, 5)


def test_period() -> None:
    facts = Facts((10,) * 10, cut_period=4)
    assert legal_cuts(facts) == (4, 8)
    assert balanced_cuts(facts, 2) == (4,)
    assert balanced_cuts(facts, 3) == (4, 8)
    with pytest.raises(CutError, match="the maximum is 3"):
        balanced_cuts(facts, 4)


def test_every_stage_needs_a_layer_with_a_window() -> None:
    """As in gemma3 and similar families: the last layer of each period has none."""
    facts = Facts((10,) * 6, windows=(True, True, False) * 2)
    assert legal_cuts(facts) == (1, 2, 3, 4)
    with pytest.raises(CutError, match=r"cut 5 .* only together with one that has a window; legal cuts: 1-4"):
        check_cuts(facts, (5,))
    with pytest.raises(CutError, match=r"layer 2 cannot be one stage: llama.cpp runs layers without"):
        check_cuts(facts, (2, 3))
    assert balanced_cuts(facts, 4) == (1, 2, 4)
    with pytest.raises(CutError, match="the maximum is 4"):
        balanced_cuts(facts, 5)


def test_every_stage_needs_a_layer_of_both_kinds_where_the_model_has_both() -> None:
    """r has a state, a attends, f does neither, b does both."""
    facts = Facts((10,) * 8, kinds="rrfarfra")
    assert legal_cuts(facts) == (4, 5, 6)
    with pytest.raises(
        CutError, match=r"cut 3 is not legal: llama.cpp runs layers with a recurrent state only together"
    ):
        check_cuts(facts, (3,))
    for alike in ("rrrrrrrr", "bbbbbbbb", "aaaaffff"):
        assert legal_cuts(Facts((10,) * 8, kinds=alike)) == (1, 2, 3, 4, 5, 6, 7)


def test_no_stage_begins_with_a_layer_that_needs_another_layers_choice() -> None:
    facts = Facts((10,) * 6, indexers=(True, True, False, False, True, False))
    assert legal_cuts(facts) == (1, 4)
    with pytest.raises(CutError, match=r"cut 2 .* tokens that the previous layer has chosen; legal cuts: 1,4"):
        check_cuts(facts, (2,))
    assert balanced_cuts(facts, 2) == (4,)
    with pytest.raises(CutError, match="the maximum is 3"):
        balanced_cuts(facts, 4)


def test_no_stage_begins_with_a_layer_that_a_family_forbids() -> None:
    facts = Facts((10,) * 6, blocked={2: "it has no attention", 3: "it has no attention"})
    assert legal_cuts(facts) == (1, 4, 5)
    with pytest.raises(CutError, match="cut 3 is not legal: it has no attention; legal cuts: 1,4,5"):
        check_cuts(facts, (3,))
    assert balanced_cuts(facts, 4) == (1, 4, 5)
    with pytest.raises(CutError, match="the maximum is 4"):
        balanced_cuts(facts, 5)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [((0,), "outside"), ((6,), "outside"), ((-1,), "outside"), ((4, 2), "ascend"), ((2, 2), "ascend")],
)
def test_refused(cuts: tuple[int, ...], words: str) -> None:
    with pytest.raises(CutError, match=rf"{words}.*legal cuts: 1-5"):
        check_cuts(Facts((1,) * 6), cuts)


@pytest.mark.parametrize("n_stages", [0, -1, 7, 1000])
def test_impossible_number_of_stages(n_stages: int) -> None:
    with pytest.raises(CutError):
        balanced_cuts(Facts((1,) * 6), n_stages)


def test_large_model_is_quick() -> None:
    facts = Facts(tuple(range(100, 228)), 5000, 5000)
    assert len(balanced_cuts(facts, 16)) == 15


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9).map(tuple)


@given(
    sizes=SIZES,
    embedding=st.integers(0, 200),
    head=st.integers(0, 200),
    period=st.integers(1, 3),
    forbidden=st.frozensets(st.integers(2, 9), max_size=2),
    full=st.frozensets(st.integers(1, 8)) | st.none(),
    followers=st.frozensets(st.integers(1, 8)),
    n_stages=st.integers(1, 5),
)
def test_balanced_is_legal_and_as_fast_as_any(
    sizes: tuple[int, ...],
    embedding: int,
    head: int,
    period: int,
    forbidden: frozenset[int],
    full: frozenset[int] | None,
    followers: frozenset[int],
    n_stages: int,
) -> None:
    windows = () if full is None else tuple(layer not in full for layer in range(len(sizes)))
    indexers = tuple(layer not in followers for layer in range(len(sizes)))
    facts = Facts(sizes, embedding, head, period, forbidden, windows, indexers)
    every = [cuts for cuts in itertools.combinations(range(1, len(sizes)), n_stages - 1) if allowed(facts, cuts)]
    assert set(legal_cuts(facts)) == {
        cut
        for n_cuts in range(len(sizes))
        for cuts in itertools.combinations(range(1, len(sizes)), n_cuts)
        if allowed(facts, cuts)
        for cut in cuts
    }
    if not every:
        with pytest.raises(CutError):
            balanced_cuts(facts, n_stages)
        return
    chosen = balanced_cuts(facts, n_stages)
    assert chosen in every
    assert max(step_bytes(facts, chosen)) <= min(max(step_bytes(facts, cuts)) for cuts in every) * STEP_SLACK


def allowed(facts: Facts, cuts: tuple[int, ...]) -> bool:
    try:
        check_cuts(facts, cuts)
    except CutError:
        return False
    return True
