"""Scores of a split reranker are those of the whole model by llama.cpp: in one, two and three stages, alone and not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.split import split_model
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.rank_head import RankHead
from relayline.stage.sampling.pooling import LAST, Pool
from relayline.wire.common.errors import ArtifactError, NumericError
from relayline.wire.model_files.rank_head import RANK_HEAD
from tests.support.chain import Chain
from tests.support.tiny_models import make_tiny
from tests.support.whole_scores import CTX, whole_chances

PAIRS = [list(range(20, 60)), [3, 1, 4, 1, 5, 9, 2, 6], [*range(20, 50), 7, 8, 9]]
ERROR_MAX = 1e-5  # of a chance
QUANTISED_ERROR_MAX = 3e-3  # llama.cpp quantises the row too
NAMES = ("qwen3:reranker", "qwen3vl:reranker")


def scores(chain: Chain, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Read each prompt in a lane of its own, all in one step; return the chances of all labels."""
    last = chain.engines[-1]
    assert last.hidden is not None
    assert last.hidden.rank_head is not None
    tokens = [token for prompt in prompts for token in prompt]
    rows = np.empty((len(tokens), chain.table.width), np.float32)
    chain.table.lookup(np.asarray(tokens, np.int32), rows)
    last.hidden.want(wanted=True)
    for engine in chain.engines:
        at = 0
        for lane, prompt in enumerate(prompts):
            span = slice(at, at + len(prompt))
            engine.clear(lane)
            engine.positions[span], engine.seq_ids[span] = range(len(prompt)), lane
            engine.wants[span] = 0
            engine.wants[span.stop - 1] = 1
            at = span.stop
        engine.input_rows[:at] = rows
        engine.decode(at)
        if not engine.is_last:
            rows = engine.output_rows[:at].copy()
    found, at = [], 0
    for prompt in prompts:
        at += len(prompt)
        pool = Pool(LAST, last.n_embd, last.hidden.rank_head.chances)
        pool.add(len(prompt) - 1, last.hidden.rows(at - 1, 1))
        found.append(pool.take())
    last.hidden.want(wanted=False)
    return np.stack(found)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize(("name", "quant"), [*((name, "f32") for name in NAMES), (NAMES[0], "q8_0")])
def test_they_are_those_of_the_whole_model(name: str, quant: str, n_stages: int, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", quant=quant)
    whole = np.stack([whole_chances(model, prompt) for prompt in PAIRS])
    assert whole.std(axis=0).min() > 0.05, "a model that scores all alike proves nothing"
    pipeline = split_model(model, tmp_path / "split", n_stages=n_stages)
    with Chain(tmp_path / "split", pipeline, ctx_tokens=CTX, lanes=range(len(PAIRS)), max_rows=64) as chain:
        together = scores(chain, PAIRS)
        alone = np.concatenate([scores(chain, [prompt]) for prompt in PAIRS])
    assert together.shape == whole.shape == (len(PAIRS), 2)
    limit = QUANTISED_ERROR_MAX if quant == "q8_0" else ERROR_MAX
    assert np.abs(together - whole).max() < limit
    assert np.abs(together - alone).max() < ERROR_MAX
    assert np.allclose(together.sum(axis=1), 1)


def test_only_the_last_stage_has_it(tmp_path: Path) -> None:
    model = make_tiny(NAMES[0], tmp_path / "model.gguf")
    split_model(model, tmp_path / "split", cuts=(2,))
    first, last = (open_artifact(tmp_path / "split" / f"stage-{index}.gguf") for index in range(2))
    assert first.rank_head is None
    assert RANK_HEAD not in open_model(first.path).tensors
    assert last.rank_head is not None
    assert last.rank_head.labels == 2


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_0"])
def test_a_quantised_head_is_converted(quant: str, tmp_path: Path) -> None:
    row = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    found = {}
    for each in ("f32", quant):
        model = make_tiny(NAMES[0], tmp_path / f"{each}.gguf", quant=each)
        split_model(model, tmp_path / each, cuts=(2,))
        artifact = open_artifact(tmp_path / each / "stage-1.gguf")
        assert artifact.rank_head is not None
        found[each] = RankHead(artifact, artifact.rank_head).chances(row)
    assert np.allclose(found[quant], found["f32"], atol=0.1 if quant == "q4_0" else 0.01)
    assert not np.array_equal(found[quant], found["f32"])


def test_what_cannot_be_a_score_is_an_error(tmp_path: Path) -> None:
    split_model(make_tiny(NAMES[0], tmp_path / "model.gguf"), tmp_path / "split", cuts=(2,))
    path = tmp_path / "split" / "stage-1.gguf"
    artifact = open_artifact(path)
    assert artifact.rank_head is not None
    with pytest.raises(NumericError, match="not finite"):
        RankHead(artifact, artifact.rank_head).chances(np.full(64, np.nan, np.float32))
    with path.open("r+b") as file:
        file.truncate(artifact.rank_head.offset_bytes + 4)
    with pytest.raises(ArtifactError, match="ends before its head that ranks does"):
        RankHead(artifact, artifact.rank_head)
