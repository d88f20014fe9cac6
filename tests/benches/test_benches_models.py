"""The benches' models with random weights, and their grammars."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from benches import grammars
from benches.blocks import FILLS, random_rows
from benches.models import SHAPES, Shape, vocabulary, write_model
from benches.reference import gaps_of, greedy_batch, near_tie, prompts_for
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.tokenizer import Tokenizer

TINY = Shape("tiny", "llama", 256, 2, 4, 2, 64, 256, 400)
TINY_QWEN = Shape("tiny-qwen", "qwen3", 256, 2, 2, 1, 128, 256, 400)
TINY_EXPERTS = Shape("tiny-experts", "qwen3moe", 256, 2, 2, 1, 128, 256, 400, n_experts=8, n_used=2)
TINY_HYBRID = Shape("tiny-hybrid", "qwen35", 256, 8, 2, 1, 128, 256, 400)


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_grammars_of_every_kind_are_timed() -> None:
    table = grammars.measure(1_024, 3)
    assert [column.header for column in table.columns][1:3] == ["check ms", "start ms"]
    for column in table.columns[1:]:
        assert all(float(str(cell)) >= 0 for cell in column.cells)
    assert table.row_count == len(grammars.SHAPES)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILLS, ids=lambda kind: kind.name)
def test_random_blocks_have_zero_mean_and_the_wanted_deviation(kind: GGMLQuantizationType) -> None:
    wanted = np.linspace(0.01, 0.03, 128, dtype=np.float32)
    raw = random_rows(np.random.default_rng(1), kind, wanted, 2048)
    numbers = {"F32": np.float32, "F16": np.float16}
    rows = quants.dequantize(raw.view(numbers.get(kind.name, np.uint8)), kind)
    assert rows.shape == (128, 2048)
    assert abs(rows.mean()) < 5 * rows.std() / np.sqrt(rows.size)
    # A power of two as scale, scales near the end of their range, random scales within a block.
    coarse = {"MXFP4": 0.45, "NVFP4": 0.25, "IQ2_XXS": 0.2}
    assert np.abs(rows.std(axis=1) / wanted - 1).max() < coarse.get(kind.name, 0.1)


def test_the_same_model_has_the_same_bytes_and_another_seed_has_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, TINY, "q4_0", seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("mix", ["q4_0", "q4_k_m", "nvfp4"])
@pytest.mark.parametrize("shape", [TINY, TINY_QWEN, TINY_EXPERTS, TINY_HYBRID], ids=lambda shape: shape.architecture)
def test_answers_of_a_model_vary_and_hold_no_byte_or_end_token(tmp_path: Path, shape: Shape, mix: str) -> None:
    write_model(tmp_path / "m.gguf", shape, mix)
    prompts = prompts_for(4, 8, shape.n_vocab)
    answers = greedy_batch(tmp_path / "m.gguf", prompts, 12, 1)
    tokens = [token for answer in answers for token in answer]
    assert len(set(tokens)) > 12
    assert len({tuple(answer) for answer in answers}) == 4
    assert all(256 <= token < shape.n_vocab - 1 for token in tokens)
    gaps = gaps_of(tmp_path / "m.gguf", [(prompts[0], tuple(answers[0]))], 1)[0]
    assert max(gaps) <= near_tie(mix)  # the answers are the model's own, decoded or read as a prompt
    strange = (*answers[0][:5], (answers[0][5] + 1 - 256) % 100 + 256, *answers[0][6:])
    assert gaps_of(tmp_path / "m.gguf", [(prompts[0], strange)], 1)[0][5] > near_tie(mix)


def test_vocabulary_is_accepted_and_every_token_reads_differently(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TINY, "q4_0")
    split_model(tmp_path / "m.gguf", tmp_path / "split", n_stages=2)
    tokenizer = Tokenizer.load(tmp_path / "split" / "tokenizer.gguf")
    assert tokenizer.n_vocab == TINY.n_vocab == len(set(vocabulary(TINY.n_vocab)[0]))
    assert len({tokenizer.piece(token) for token in range(TINY.n_vocab - 1)}) == TINY.n_vocab - 1
    assert tokenizer.is_end(TINY.n_vocab - 1)
    tokenizer.close()


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    assert SHAPES["llama-1b"].n_vocab == 128_256
    assert SHAPES["qwen3-0.6b"].n_heads * SHAPES["qwen3-0.6b"].head_dim == 2_048
    assert all(shape.n_embd % 256 == 0 and shape.n_ff % 256 == 0 for shape in SHAPES.values() if not shape.window)
    assert SHAPES["gemma3-1b"].n_embd % 32 == 0, "Gemma 3 1B is no multiple of 256 wide: no K-quants"
    assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K][0] == 256
