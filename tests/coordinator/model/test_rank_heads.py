"""Rerankers as model files: which heads are taken, what a split's files say of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import hollow_slices, split_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.stage.engine.artifact import open_artifact
from relayline.wire.common.errors import ModelFileError, UnsupportedArchitectureError
from relayline.wire.model_files.rank_head import LABELS_KEY, LABELS_MAX, RANK_HEAD
from tests.support.family_check import ERROR_MAX, check
from tests.support.tiny_models import make_tiny

RERANKER = "qwen3:reranker"


def variant(path: Path, labels: list[str] | None, rows: int, width: int = 64, **more: Any) -> Path:
    """A qwen3 with a head of this shape."""
    values = {**({} if labels is None else {"classifier.output_labels": labels}), **more}
    head = np.ones((rows, width), np.float32)
    return make_tiny("qwen3", path, extra_values=values, extra_tensors={RANK_HEAD: head})


@pytest.mark.parametrize(("name", "cuts"), [(RERANKER, (1, 2, 3, 4)), ("qwen3vl:reranker", (3, 4))])
def test_the_vocabulary_says_how_many_labels_there_are(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "m.gguf", tokenizer=True)
    facts = inspect_model(model)
    assert (facts.supported, facts.n_labels, facts.legal_cuts) == (True, 2, cuts)
    split_model(model, tmp_path / "out", n_stages=2)
    assert open_model(tmp_path / "out" / "tokenizer.gguf").value(LABELS_KEY) == 2
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.gguf").n_labels == 2
    plain = make_tiny(name.partition(":")[0], tmp_path / "p.gguf", tokenizer=True)
    assert inspect_model(plain).n_labels == 0
    split_model(plain, tmp_path / "plain", n_stages=2)
    assert LABELS_KEY not in open_model(tmp_path / "plain" / "tokenizer.gguf").entries
    assert Tokenizer.load(tmp_path / "plain" / "tokenizer.gguf").n_labels == 0


def test_as_many_layers_as_labels_are_no_values_per_layer(tmp_path: Path) -> None:
    model = make_tiny(RERANKER, tmp_path / "m.gguf", n_layers=2)
    split_model(model, tmp_path / "out", cuts=(1,))
    entry = open_model(tmp_path / "out" / "stage-1.gguf").entries["qwen3.classifier.output_labels"]
    assert entry.length == 2


def test_a_slice_for_measuring_has_the_head_too(tmp_path: Path) -> None:
    """As a host gets it before it has any of the model: a header, and zeros for weights."""
    model = make_tiny(RERANKER, tmp_path / "m.gguf")
    cuts = balanced_cuts(inspect_model(model), 2)
    first, last = hollow_slices(model, [(cuts, 0), (cuts, 1)])
    for index, made in enumerate((first, last)):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(made.header)
        with path.open("r+b") as file:
            file.truncate(made.size_bytes)
        assert (open_artifact(path).rank_head is not None) == (index == 1)


def test_other_families_have_no_such_head(tmp_path: Path) -> None:
    head = np.ones((2, 64), np.float32)
    model = make_tiny("llama", tmp_path / "m.gguf", extra_tensors={RANK_HEAD: head})
    assert inspect_model(model).n_labels == 0
    with pytest.raises(UnsupportedArchitectureError, match=r"it has the tensor cls\.output\.weight, which belongs to"):
        split_model(model, tmp_path / "out", n_stages=2)


def test_a_head_that_reads_a_mean_is_refused(tmp_path: Path) -> None:
    model = variant(tmp_path / "m.gguf", ["yes", "no"], 2, **{"classifier.pooling_type": 1})
    facts = inspect_model(model)
    assert (facts.supported, facts.may_be_tried) == (False, False)
    with pytest.raises(UnsupportedArchitectureError, match="reads the mean of a text's rows"):
        split_model(model, tmp_path / "out", n_stages=2)


@pytest.mark.parametrize("labels", [None, ["yes"]])
def test_a_head_of_one_label_scores_nothing_and_is_left_out(labels: list[str] | None, tmp_path: Path) -> None:
    """llama.cpp gives every text the score 1. The rest is a model like any other."""
    model = variant(tmp_path / "m.gguf", labels, 1)
    facts = inspect_model(model)
    assert (facts.supported, facts.n_labels) == (True, 0)
    assert check(model, [(), (2,), (1, 3)], tmp_path / "cuts") < ERROR_MAX
    split_model(model, tmp_path / "out", cuts=(2,))
    assert all(RANK_HEAD not in open_model(tmp_path / "out" / f"stage-{at}.gguf").tensors for at in range(2))
    assert LABELS_KEY not in open_model(tmp_path / "out" / "tokenizer.gguf").entries


@pytest.mark.parametrize(
    ("labels", "rows", "width"),
    [
        (["yes", "no"], 3, 64),
        (["yes", "no"], 2, 32),
        (None, 2, 64),
        ([f"l{at}" for at in range(LABELS_MAX + 1)], LABELS_MAX + 1, 64),
    ],
)
def test_a_head_of_another_shape_is_a_damaged_file(
    labels: list[str] | None, rows: int, width: int, tmp_path: Path
) -> None:
    model = variant(tmp_path / "m.gguf", labels, rows, width)
    with pytest.raises(
        ModelFileError, match=r"cls\.output\.weight has shape \[\d+, \d+\], but \d+ labels of 64 values"
    ):
        inspect_model(model)
