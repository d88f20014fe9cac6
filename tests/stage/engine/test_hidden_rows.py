"""Embeddings of a split are the unsplit model's: in one, two and three stages, alone and among decoding streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.stage.engine.hidden import HiddenRows
from relayline.stage.engine.micro_batches import cut
from relayline.stage.engine.native import NativeEngine
from relayline.stage.engine.row_parts import NO_NODES
from relayline.stage.sampling.pooling import CLS, LAST, MEAN, Pool
from relayline.wire.common.errors import NativeError, NumericError, PositionGapError
from tests.support.chain import Chain
from tests.support.whole_scores import whole_pooled

PROMPT = list(range(20, 60))
CTX = 128


def reference(pooling: int) -> npt.NDArray[np.float32]:
    """llama.cpp's result for the whole model with `embeddings` on."""
    return whole_pooled(DEMO_MODEL, PROMPT, pooling)


@pytest.fixture(scope="module", params=[None, [2], [1, 3]], ids=["one", "two", "three"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    directory = tmp_path_factory.mktemp("split")
    cuts = request.param
    pipeline = split_model(DEMO_MODEL, directory, n_stages=None if cuts else 1, cuts=cuts)
    with Chain(directory, pipeline, ctx_tokens=CTX, max_rows=64, lanes=(0, 1), kv_layout="per-lane") as found:
        yield found


def through(chain: Chain, steps: Sequence[tuple[Sequence[int], int, int, Sequence[int]]]) -> NativeEngine:
    """Run one step of (tokens, lane, first position, wanted rows), f16 between stages; returns the last stage."""
    tokens = [token for part, _, _, _ in steps for token in part]
    rows = np.empty((len(tokens), chain.engines[0].n_embd), np.float32)
    chain.table.lookup(np.asarray(tokens, np.int32), rows)
    for engine in chain.engines:
        at = 0
        for part, lane, position, wanted in steps:
            span = slice(at, at + len(part))
            engine.positions[span], engine.seq_ids[span] = range(position, position + len(part)), lane
            engine.wants[span] = wanted
            at += len(part)
        engine.input_rows[:at] = rows
        engine.decode(at)
        if not engine.is_last:
            rows = engine.output_rows[:at].astype(np.float16).astype(np.float32)
    return chain.engines[-1]


def cosine(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("pooling", [MEAN, CLS, LAST])
def test_they_are_those_of_the_whole_model(chain: Chain, pooling: int) -> None:
    for engine in chain.engines:
        engine.clear(0)
        engine.clear(1)
    hidden = chain.engines[-1].hidden
    assert hidden is not None
    through(chain, [(PROMPT[:10], 1, 0, [0] * 10)])  # another stream, whose next row shares the step
    hidden.want(wanted=True)
    pool = Pool(pooling, chain.engines[-1].n_embd)
    mates = []
    for begin in (0, 20):
        part = PROMPT[begin : begin + 20]
        is_all = pooling == MEAN or (pooling == CLS and begin == 0)
        wanted = [1] * 20 if is_all else [0] * 19 + [int(begin == 20)]
        engine = through(chain, [([7], 1, 10 + begin // 20, [1]), (part, 0, begin, wanted)])
        mates.append(engine.logits(0).copy())
        if is_all:
            pool.add(begin, hidden.rows(1, 20))
        elif begin == 20:
            pool.add(39, hidden.rows(20, 1))
    hidden.want(wanted=False)
    assert cosine(pool.take(), reference(pooling)) > 0.9995
    # The concurrent stream computes the same without an embedding in its steps.
    chain_alone = []
    for engine in chain.engines:
        engine.drop_from(1, 10)
    for begin in (0, 20):
        engine = through(chain, [([7], 1, 10 + begin // 20, [1])])
        chain_alone.append(engine.logits(0).copy())
    for batched, alone in zip(mates, chain_alone, strict=True):
        assert cosine(batched, alone) > 0.9999
        assert int(batched.argmax()) == int(alone.argmax())


def test_rows_that_did_not_come_are_an_error(chain: Chain) -> None:
    hidden = chain.engines[-1].hidden
    assert hidden is not None
    for engine in chain.engines:
        engine.clear(0)
    through(chain, [(PROMPT[:3], 0, 0, [0, 0, 1])])  # none was asked for
    with pytest.raises(NativeError, match="no tensor result_norm"):
        hidden.rows(2, 1)
    hidden.want(wanted=True)
    through(chain, [(PROMPT[3:6], 0, 3, [0, 0, 1])])
    assert hidden.rows(2, 1).shape == (1, chain.engines[-1].n_embd)
    with pytest.raises(NativeError, match="hidden rows came instead of 2"):
        hidden.rows(1, 2)
    hidden.want(wanted=False)


def test_rows_stand_as_they_were_computed() -> None:
    """Lanes with separate cells are computed lane by lane; a graph may keep unwanted rows."""
    hidden = HiddenRows(8, 4, NO_NODES)
    order = cut(np.array([1, 0, 0, 0], np.int32))
    wants = np.array([1, 0, 1, 1], np.int8)
    for keeps_all in (False, True):
        computed = order.computed if keeps_all else order.computed[wants[order.computed] != 0]
        hidden.capture._state.written = 4 * len(computed)
        hidden._rows[: len(computed)] = np.asarray(computed, np.float32)[:, None]
        hidden.capture.is_armed = True
        hidden.note(wants, order)
        assert hidden.rows(0, 1)[:, 0].tolist() == [0]
        assert hidden.rows(2, 2)[:, 0].tolist() == [2, 3]


def test_a_chunk_that_comes_twice_counts_once() -> None:
    pool = Pool(MEAN, 2)
    first, second = np.full((2, 2), 1, np.float32), np.full((2, 2), 4, np.float32)
    pool.add(0, first)
    pool.add(0, first)
    pool.add(2, second)
    pool.add(2, second)
    assert pool.take().tolist() == [2.5, 2.5]
    with pytest.raises(PositionGapError):
        pool.add(5, first)
    pool.add(4, np.full((1, 2), np.inf, np.float32))
    with pytest.raises(NumericError):
        pool.take()
