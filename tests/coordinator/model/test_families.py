"""Every family of the table, cut everywhere, computes the same as unsplit: prefill and decode, f32 between stages."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.paths import ROOT
from relayline.deploy.testing.reference import ReferenceModel
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import CutError, ModelFileError, UnsupportedArchitectureError
from relayline.wire.common.kv_layout import UNIFIED_ARCHITECTURES
from tests.support.chain import Chain
from tests.support.family_check import (
    ERROR_MAX,
    ERROR_OTHER_ROWS_MAX,
    PREFILL,
    check,
    covering_cuts,
    is_legal,
    tokens,
    whole_logits,
)
from tests.support.tiny_families import RECIPES
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_later_families import LATER
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import N_EMBD, Value
from tests.support.tiny_wide import WIDE, WIDE_STATES

pytestmark = pytest.mark.kernels

# All caches and their copies are made alike except these: layers of several widths, without cells, with an indexer, and
# with positions on several axes, in a table and in a bias.
ODD_CELLS = ["gemma4", "gemma4:e2b", "deci", "openelm", "minimax-m3", "laguna", "qwen3vl", "gpt2", "jais"]
# Families with a recurrent state are cut and copied in another way: see tests/stage/engine/test_recurrent.py.
CELLS = [name for name in RECIPES if name not in (LATER | HYBRIDS | WIDE_STATES) or name in ODD_CELLS]
PLAIN = [name for name in RECIPES if ":" not in name and name not in LATER | HYBRIDS | WIDE]
PER_LANE = [name for name in RECIPES if RECIPES[name].architecture not in UNIFIED_ARCHITECTURES]
TIED = [name for name in PLAIN if RECIPES[name].may_tie and not RECIPES[name].always_tied]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", PER_LANE)
def test_per_lane_cells_equal_the_whole(name: str, tmp_path: Path) -> None:
    """Two neighbouring lanes and one apart, so that llama.cpp computes each step in two parts; one cut.

    With or without flash attention on both sides, as stages have it here.
    """
    model = make_tiny(name, tmp_path / "model.gguf")
    facts = inspect_model(model)
    fed = tokens(facts.n_vocab)
    pipeline = split_model(model, tmp_path / "out", cuts=balanced_cuts(facts, 2))
    with Chain(tmp_path / "out", pipeline, lanes=(3, 0, 1), kv_layout="per-lane") as chain:
        steps = [fed[:PREFILL], *([token] for token in fed[PREFILL:])]
        found = [chain.step(step).reshape(3, len(step), -1) for step in steps]
        assert chain.engines[0].micro_batches == (2, 1)
    expected = whole_logits(model, facts.n_vocab, chain.flash_attn)
    error = np.abs(np.concatenate(found, axis=1) - expected).max() / expected.std()
    assert error < ERROR_OTHER_ROWS_MAX, error


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("kv_layout", "spare_lanes"), [("unified", 1), ("per-lane", 0)])
@pytest.mark.parametrize("name", CELLS)
def test_the_price_of_context_can_be_measured(name: str, kv_layout: str, spare_lanes: int, tmp_path: Path) -> None:
    """Cells are copied, or written out, repeated and read back: a format of llama.cpp's that no family may break."""
    model = make_tiny(name, tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=balanced_cuts(inspect_model(model), 2))
    config = engine_config(
        tmp_path / "out" / "stage-0.gguf", n_lanes=2, ctx_tokens=256, max_rows=16, kv_layout=kv_layout,
        spare_lanes=spare_lanes,
    )  # fmt: skip
    with NativeEngine(config) as engine:
        engine.input_rows[:16] = np.random.default_rng(3).standard_normal(engine.input_rows[:16].shape, np.float32)
        engine.positions[:16] = range(16)
        engine.decode(16)
        engine.positions[0] = 16
        engine.decode(1)
        alone = engine.output_rows[:1].copy()
        engine.drop_from(0, 16)
        assert engine.multiply(0, config.n_sequences - 1, 8)
        assert engine.lane_tokens(0) == 16
        engine.decode(1)
        assert np.isfinite(engine.output_rows[:1]).all()
        assert not np.allclose(engine.output_rows[:1], alone, atol=1e-6), "it attends to the copies"


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("kv_layout", "ctx_tokens"), [("unified", 64), ("per-lane", 64), ("per-lane", 32)])
@pytest.mark.parametrize("name", CELLS)
def test_a_copied_prefix_equals_its_original(name: str, kv_layout: str, ctx_tokens: int, tmp_path: Path) -> None:
    """A lane that copies the first 12 of 16 cells of another lane and continues, and its source.

    Of 64 per-lane cells the 16 used ones are copied, of 32 all.
    """
    # Without flash attention, which grok never has, scores are rounded to f16: one may go the other way in other cells.
    error_max = 1e-3 if name == "grok" else 1e-4
    model = make_tiny(name, tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=balanced_cuts(inspect_model(model), 2))
    config = engine_config(
        tmp_path / "out" / "stage-0.gguf", n_lanes=3, ctx_tokens=ctx_tokens, max_rows=16, kv_layout=kv_layout
    )
    with NativeEngine(config) as engine:
        rows = np.random.default_rng(3).standard_normal((17, engine.input_rows.shape[1]), np.float32)

        def decode(lane: int, first: int, n_rows: int) -> np.ndarray:
            engine.input_rows[:n_rows] = rows[first : first + n_rows]
            engine.seq_ids[:n_rows], engine.positions[:n_rows] = lane, range(first, first + n_rows)
            engine.decode(n_rows)
            return engine.output_rows[:n_rows].copy()

        decode(2, 0, 12)
        expected = decode(2, 12, 1)
        assert np.abs(decode(1, 12, 1) - expected).max() > 1e-2, "rows before it would not matter"
        engine.clear(1)
        decode(0, 0, 16)
        engine.copy_prefix(0, 1, 12)
        assert (engine.lane_tokens(0), engine.lane_tokens(1)) == (16, 12)
        np.testing.assert_allclose(decode(1, 12, 1), expected, atol=error_max)
        original = decode(0, 16, 1)
        engine.clear(1)
        engine.drop_from(0, 16)
        np.testing.assert_allclose(decode(0, 16, 1), original, atol=error_max)


def test_every_family_has_a_model() -> None:
    assert {recipe.architecture for recipe in RECIPES.values()} == set(FAMILIES)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", RECIPES)
def test_cuts_equal_whole(name: str, tmp_path: Path) -> None:
    """Every legal cut between slices that are as short as they may be, and some between long ones.

    `python -m tests.families --report` tries every legal cut by itself.
    """
    model = make_tiny(name, tmp_path / "model.gguf")
    facts = inspect_model(model)
    assert facts.supported
    legal = facts.legal_cuts
    assert legal
    long = {(), (legal[0],), (legal[len(legal) // 2],)}
    plans = sorted({*covering_cuts(facts), *(cuts for cuts in long if is_legal(facts, cuts))})
    # The factor that all slices of this one carry is a rounded one.
    check(model, plans, tmp_path, ERROR_OTHER_ROWS_MAX if name == "gemma3:27b" else ERROR_MAX)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings(name: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", tied=True)
    facts = inspect_model(model)
    assert facts.tied_embeddings
    check(model, [facts.legal_cuts[:1], ()], tmp_path)


QUANTISED = [*itertools.product(["llama", "qwen3moe", "internlm2", "granite"], ["f16", "q8_0", "q4_0"]),
             ("gpt-oss", "mxfp4"), ("gpt-oss", "q8_0"), ("gemma3", "q4_0")]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "quant"), QUANTISED)
def test_quantised(name: str, quant: str, tmp_path: Path) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", quant=quant)
    check(model, [(2,)], tmp_path)


def test_smollm3_keeps_to_its_period(tmp_path: Path) -> None:
    model = make_tiny("smollm3", tmp_path / "model.gguf")
    facts = inspect_model(model)
    assert facts.legal_cuts == (4, 8)
    with pytest.raises(CutError, match=r"cut 5 .* repeats every 4 layers; legal cuts: 4,8"):
        split_model(model, tmp_path / "out", cuts=(5,))


def test_slices_state_which_of_their_layers_have_windows(tmp_path: Path) -> None:
    """A pattern counts from the first layer in the file; and a slice needs a window, or llama.cpp would abort."""
    model = make_tiny("gpt-oss", tmp_path / "model.gguf")
    facts = inspect_model(model)
    assert facts.windows == (True, False) * 3
    assert facts.legal_cuts == (1, 2, 3, 4)
    with pytest.raises(CutError, match="only together with one that has a window; legal cuts: 1-4"):
        split_model(model, tmp_path / "out", cuts=(5,))
    split_model(model, tmp_path / "out", cuts=(1, 3))
    stages = [open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    patterns = [stage.value("gpt-oss.attention.sliding_window_pattern") for stage in stages]
    assert patterns == [(True,), (False, True), (False, True, False)]


@pytest.mark.parametrize(
    ("name", "version"), [("llama", 1), ("phi3", 1), ("gpt-oss", 2), ("gemma", 2), ("gemma2", 2), ("cohere2", 2)]
)
def test_an_artifacts_version_keeps_incompatible_builds_apart(name: str, version: int, tmp_path: Path) -> None:
    split_model(make_tiny(name, tmp_path / "model.gguf"), tmp_path / "out", n_stages=2)
    for index in range(2):
        assert open_model(tmp_path / "out" / f"stage-{index}.gguf").value("relayline.version") == version
        assert open_artifact(tmp_path / "out" / f"stage-{index}.gguf").stage_index == index


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("gemma3", {}, (True,) * 5 + (False, True, True)),
        ("gemma3", {"attention.sliding_window_pattern": 2}, (True, False) * 4),
        ("gemma3", {"attention.sliding_window_pattern": 0}, (True,) * 8),
        ("gemma3", {"attention.sliding_window_pattern": [0, 1, 0, 1, 0, 1, 0, 1]}, (False, True) * 4),
        ("gemma3", {"attention.sliding_window": 0}, ()),
        ("olmo2", {"attention.sliding_window_pattern": 2}, ()),
    ],
)
def test_windows_are_those_that_llama_cpp_derives(
    name: str, values: dict[str, Value], expected: tuple[bool, ...], tmp_path: Path
) -> None:
    model = make_tiny(name, tmp_path / "model.gguf", extra_values=values)
    assert inspect_model(model).windows == expected
    check(model, [(2,)], tmp_path)


@pytest.mark.parametrize(
    ("name", "n_layers", "values", "reason"),
    [
        ("gemma2", 46, {"attention.key_length": 32, "attention.value_length": 32}, "by its number of layers alone"),
        ("llama4", 8, {"attention.sliding_window": 0}, "without windows its last layer differs"),
        ("llama4", 8, {"interleave_moe_layer_step": 3}, "with experts do not repeat"),
        ("exaone4", 64, {}, "only in a file of 64 layers"),
        ("ernie4_5-moe", 4, {"interleave_moe_layer_step": 2}, "layers with experts alternate"),
    ],
)
def test_a_family_with_values_derived_from_the_whole_file_is_refused(
    name: str, n_layers: int, values: dict[str, Value], reason: str, tmp_path: Path
) -> None:
    facts = inspect_model(make_tiny(name, tmp_path / "model.gguf", n_layers=n_layers, extra_values=values))
    assert not facts.supported
    assert facts.refusal is not None
    assert reason in facts.refusal
    for experimental in (False, True):  # a family known to compute wrongly cannot be tried
        with pytest.raises(UnsupportedArchitectureError, match=rf"cannot be split: .*{reason}") as caught:
            split_model(tmp_path / "model.gguf", tmp_path / "out", cuts=(4,), experimental=experimental)
        assert "--experimental" not in caught.value.message


def test_gemma3_of_62_layers_is_not_scaled_by_its_slices(tmp_path: Path) -> None:
    """llama.cpp scales scores by another width there, and slices compensate in the norm of the queries just before."""
    model = make_tiny("gemma3:27b", tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=(2,))
    paths = (model, tmp_path / "out" / "stage-1.gguf")
    whole, second = (
        np.fromfile(path, np.float32, 8, offset=open_model(path).tensors[f"blk.{layer}.attn_q_norm.weight"].offset)
        for path, layer in zip(paths, (7, 5), strict=True)
    )
    np.testing.assert_allclose(second, whole * np.sqrt(8 / 16), rtol=1e-6)
    check(model, [()], tmp_path)
    with pytest.raises(CutError, match="another model"):
        split_model(make_tiny("gemma3", tmp_path / "deep.gguf", n_layers=63), tmp_path / "deep", cuts=(62,))


def test_only_f32_can_be_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = dataclasses.replace(FAMILIES["llama"], factors=lambda _: {"attn_q.weight": 2.0})
    monkeypatch.setitem(FAMILIES, "llama", odd)
    model = make_tiny("llama", tmp_path / "model.gguf", quant="f16")
    with pytest.raises(ModelFileError, match=r"attn_q.weight of its blocks are not F32"):
        split_model(model, tmp_path / "out", cuts=(2,))


def test_gemma3_scales_tokens_alone(tmp_path: Path) -> None:
    """By the root of their width: the graph leaves incoming rows unscaled."""
    model = make_tiny("gemma3", tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=(2,))
    first, second = (open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(2))
    assert first.value("relayline.embedding.scale") == 8.0
    assert "relayline.embedding.scale" not in second.entries
    assert "gemma3.embedding_scale" not in first.entries


def test_gemma2_undoes_the_next_graphs_scaling_of_its_rows(tmp_path: Path) -> None:
    model = make_tiny("gemma2", tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=(2, 4))
    stages = [open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    assert [stage.value("relayline.output.scale") for stage in stages] == [1 / 8, 1 / 8, None]
    assert not any("relayline.embedding.scale" in stage.entries for stage in stages)


@pytest.mark.parametrize("kv_layout", ["unified", "per-lane"])
def test_llama4_attends_within_chunks_of_8192_positions(kv_layout: str, tmp_path: Path) -> None:
    """llama.cpp's own constant, as are the distances by which it scales queries: so the rows here are around it."""
    model = make_tiny("llama4", tmp_path / "model.gguf")
    assert inspect_model(model).legal_cuts == (4, 8)
    n_vocab = inspect_model(model).n_vocab
    fed, first = tokens(n_vocab), 8192 - 12
    pipeline = split_model(model, tmp_path / "out", cuts=(4, 8))
    with Chain(tmp_path / "out", pipeline, kv_layout=kv_layout) as chain:
        chain.position = first
        found = chain.step(fed[:PREFILL])
    positions, later = range(first, first + PREFILL), range(100, 100 + PREFILL)
    with ReferenceModel(model, n_ctx=256, n_seq_max=1, flash_attn=chain.flash_attn) as reference:
        expected = reference.decode(fed[:PREFILL], positions, [0] * PREFILL, [True] * PREFILL)
        reference.drop_from(0, 0)
        elsewhere = reference.decode(fed[:PREFILL], later, [0] * PREFILL, [True] * PREFILL)
    assert np.abs(found - expected).max() < ERROR_MAX * expected.std()
    assert np.abs(found[12:] - elsewhere[12:]).max() > 0.1 * expected.std(), "the chunk matters"


def test_granite_scales_once(tmp_path: Path) -> None:
    """The embedding multiplier moves from every slice's graph to the lookup."""
    model = make_tiny("granite", tmp_path / "model.gguf")
    split_model(model, tmp_path / "out", cuts=(2,))
    first, second = (open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(2))
    assert first.value("granite.embedding_scale") == second.value("granite.embedding_scale") == 0.0
    assert first.value("relayline.embedding.scale") == 3.0
    assert "relayline.embedding.scale" not in second.entries


def test_granite_with_deepstack_is_refused(tmp_path: Path) -> None:
    mapping = {"deepstack_mapping": [-1, 0, -1, 1, -1]}
    model = make_tiny("granite", tmp_path / "model.gguf", extra_values=mapping)
    with pytest.raises(UnsupportedArchitectureError, match="deepstack"):
        split_model(model, tmp_path / "out", cuts=(2,))


def test_command_r_with_query_norms_is_refused(tmp_path: Path) -> None:
    norms = {"blk.0.attn_q_norm.weight": np.ones((4, 16), np.float32)}
    model = make_tiny("command-r", tmp_path / "model.gguf", extra_tensors=norms)
    facts = inspect_model(model)
    assert not facts.supported
    assert facts.refusal is not None
    assert "64 or more layers" in facts.refusal


def test_deepseek2_lengths_that_look_like_lite(tmp_path: Path) -> None:
    """llama.cpp takes 26 or 27 layers for a Lite model, so a slice of another model must not have so many."""
    model = make_tiny("deepseek2", tmp_path / "model.gguf", n_layers=30)
    facts = inspect_model(model)
    with pytest.raises(CutError, match="another model"):
        split_model(model, tmp_path / "out", cuts=(26,))
    with pytest.raises(CutError, match="layers 3-29 cannot"):
        split_model(model, tmp_path / "out", cuts=(3,))
    check(model, [(25,), (2,), balanced_cuts(facts, 2)], tmp_path)


def test_leading_dense_blocks_and_prediction_blocks(tmp_path: Path) -> None:
    model = make_tiny("glm4moe", tmp_path / "model.gguf")
    facts = inspect_model(model)
    assert (facts.n_layers, facts.n_prediction_layers) == (5, 1)
    split_model(model, tmp_path / "out", cuts=(1, 3))
    stages = [open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(3)]
    assert [stage.value("glm4moe.leading_dense_block_count") for stage in stages] == [1, 1, 0]
    assert [stage.value("glm4moe.block_count") for stage in stages] == [1, 2, 2]
    assert all(stage.value("glm4moe.nextn_predict_layers") == 0 for stage in stages)
    assert not any("nextn" in name for stage in stages for name in stage.tensors)


def test_per_layer_arrays_are_sliced(tmp_path: Path) -> None:
    """Only arrays with one item per layer; one that merely has as many items stays whole."""
    extra = {"note": [10, 11, 12, 13], "longer": [1, 2, 3, 4, 5], "rope.dimension_sections": [5, 6, 7, 8]}
    model = make_tiny("llama:arrays", tmp_path / "model.gguf", n_layers=4, extra_values=extra)
    split_model(model, tmp_path / "out", cuts=(1,))
    first, second = (open_model(tmp_path / "out" / f"stage-{index}.gguf") for index in range(2))
    assert (first.value("llama.note"), second.value("llama.note")) == ((10,), (11, 12, 13))
    assert second.value("llama.attention.head_count") == (4, 4, 4)
    for stage in (first, second):
        assert stage.value("llama.longer") == (1, 2, 3, 4, 5)
        assert stage.value("llama.rope.dimension_sections") == (5, 6, 7, 8)


def test_head_is_stored_once(tmp_path: Path) -> None:
    """Where the family falls back to token_embd, the last stage has the head there; otherwise a stand-in is added."""
    for name, cheap in (("llama", False), ("internlm2", True)):
        model = make_tiny(name, tmp_path / f"{name}.gguf", vocab=4096)
        split_model(model, tmp_path / name, cuts=(2,))
        middle, last = (open_model(tmp_path / name / f"stage-{index}.gguf").tensors for index in range(2))
        assert ("output.weight" in last) is cheap
        assert (last["token_embd.weight"].type_name == "Q4_0") is cheap
        assert last["token_embd.weight"].dims == (N_EMBD, 4096)
        assert middle["token_embd.weight"].dims == (N_EMBD, 32)


def test_unknown_architecture_names_the_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "cohere2moe")
    model = make_tiny("cohere2moe", tmp_path / "model.gguf")
    with pytest.raises(
        UnsupportedArchitectureError, match=r"certified; .*; `relayline split --experimental` tries it"
    ) as caught:
        split_model(model, tmp_path / "out", n_stages=2)
    assert "\n" not in caught.value.message
    assert "cohere2" in caught.value.message, "the nearest, not a wall of all that hides the advice"
    assert len(caught.value.message) < 400
    page = (ROOT / "docs" / "reference" / "families.md").read_text()
    assert all(f"`{name}`" in page for name in FAMILIES), "the page that the message names has them all"
    assert not (tmp_path / "out").exists()
